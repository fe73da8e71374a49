"""The roster: freshness on our own clock, and our own sleep is not the others' fault."""

from dataclasses import replace

from spesd.swarm.records import PeerRecord, PeerState
from spesd.swarm.roster import Life, Roster, RosterTimes, participants

TIMES = RosterTimes(heartbeat_s=2, suspect_s=8, gone_s=20)


def record(peer: str = "b", seq: int = 1, **values: object) -> PeerRecord:
    base = PeerRecord(
        run_id="r", peer_id=peer, seq=seq, time=0.0, expires=60.0, state=PeerState.TRAINING, round=1
    )
    return replace(base, **values)  # type: ignore[arg-type]


def roster() -> Roster:
    return Roster("a", TIMES)


def test_silence_makes_a_peer_suspect_and_then_gone() -> None:
    r = roster()
    r.see(record(), 100.0)
    assert r.life("b", 107.9) is Life.ALIVE
    assert r.life("b", 108.0) is Life.SUSPECT
    assert r.life("b", 120.0) is Life.GONE
    assert [p.peer_id for p in r.present(119.0)] == ["b"]
    assert r.present(121.0) == []


def test_an_old_record_is_no_sign_of_life() -> None:
    r = roster()
    assert r.see(record(seq=5), 100.0)
    assert not r.see(record(seq=5), 107.0)
    assert not r.see(record(seq=4), 107.0)
    assert r.life("b", 109.0) is Life.SUSPECT


def test_our_own_record_is_not_another_peer() -> None:
    r = roster()
    assert not r.see(record(peer="a"), 0.0)
    assert r.present(0.0) == []


def test_a_failed_contact_halves_the_patience_until_it_is_heard_again() -> None:
    r = roster()
    r.see(record(seq=1), 100.0)
    r.failed("b", 101.0)
    assert r.life("b", 103.9) is Life.ALIVE
    assert r.life("b", 104.0) is Life.SUSPECT
    r.see(record(seq=2), 104.5)
    assert r.life("b", 110.0) is Life.ALIVE


def test_our_own_sleep_is_not_the_others_silence() -> None:
    r = roster()
    r.tick(100.0)
    r.see(record(), 100.0)
    r.tick(3700.0)  # the machine was suspended for an hour
    assert r.life("b", 3700.0) is Life.ALIVE
    for now in range(3702, 3724, 2):
        r.tick(float(now))
    assert r.life("b", 3722.0) is Life.GONE


def test_a_goodbye_is_believed_at_once() -> None:
    r = roster()
    r.see(record(), 0.0)
    r.see(record(seq=2, state=PeerState.OFFLINE), 1.0)
    assert r.life("b", 1.0) is Life.GONE


def test_participants_are_in_the_round_or_about_to_enter_it() -> None:
    records = [
        record("b", round=4),
        record("c", round=5),
        record("d", round=6),
        record("e", round=3),
        record("f", round=5, state=PeerState.PAUSED),
        record("g", round=0),
    ]
    assert [p.peer_id for p in participants(records, 5)] == ["b", "c", "d"]
    assert [p.peer_id for p in participants([record("g", round=0)], 1)] == []
