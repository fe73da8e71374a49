"""Calls between nodes: what they bring, and what strangers may not do with them."""

import pytest
from helpers.nodes import RUN, Start, answer_instead, offer, record

from spesd.config import RunConfig
from spesd.errors import ProtocolViolation, Unavailable
from spesd.net import calls
from spesd.net.calls import Clock
from spesd.net.codec import MAX_ENVELOPES, MAX_MESSAGE_BYTES
from spesd.net.pb.spesd.v1 import exchange_pb2 as pb
from spesd.net.servicer import batches
from spesd.swarm.records import PartOffer, StateManifest, StatePart

ANOTHER = RunConfig(name="another-run")


async def test_every_call_brings_what_the_other_side_has(start: Start) -> None:
    a, served = await start("a")
    b, _ = await start("b", a)
    served.records = [a.sign(record(a))]
    hello = await b.hello(a.peer_id, RUN.run_id)
    assert hello.records[0][0].peer_id == a.peer_id
    assert abs(b.clock_offset) < 1.0
    theirs = offer(a)
    served.held[4] = [a.sign(theirs)]
    assert await b.offers(a.peer_id, RUN.run_id, 4) == [(theirs, served.held[4][0])]
    assert await b.offers(a.peer_id, RUN.run_id, 5) == []
    assert await b.state(a.peer_id, RUN.run_id) == "no state yet"
    state = StateManifest(
        run_id=RUN.run_id, peer_id=a.peer_id, round=3, global_tokens=1, contributors=1,
        parts=(StatePart(part="shared", round=3, term=0, digest="ab" * 32, size=3),),
    )  # fmt: skip
    served.manifest = a.sign(state)
    assert await b.state(a.peer_id, RUN.run_id) == state
    await b.announce(a.peer_id, [b.sign(record(b)), b"junk", b.sign(offer(b))])
    assert [type(r).__name__ for r in served.received] == ["PeerRecord", "Offer"]
    assert a.violations == {b.peer_id: 1}
    with pytest.raises(Unavailable):
        await b.hello("QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", RUN.run_id)
    with pytest.raises(ProtocolViolation):
        await b.hello("no peer id at all", RUN.run_id)


async def test_a_request_about_another_run_gets_nothing(start: Start) -> None:
    a, served = await start("a")
    b, _ = await start("b", a)
    served.records, served.held[4] = [a.sign(record(a))], [a.sign(offer(a))]
    other = ANOTHER.run_id
    assert (await b.hello(a.peer_id, other)).records == ()
    assert await b.offers(a.peer_id, other, 4) == []
    assert await b.state(a.peer_id, other) == "this peer is not in that run"
    assert await b.find_config(other) is None
    await b.announce(a.peer_id, [b.sign(record(b, run_id=other))])
    assert served.received == []
    assert a.violations == {}
    served.config = None  # a peer that has no run yet
    assert (await b.hello(a.peer_id, RUN.run_id)).records == ()


async def test_a_config_comes_from_a_peer_where_the_dht_has_none(start: Start) -> None:
    a, _ = await start("a")
    liar, _ = await start("liar", a)
    b, _ = await start("b", a, liar)
    reply = pb.RunReply(config=ANOTHER.canonical()).SerializeToString()
    answer_instead(liar, "rpc_run", lambda: reply)
    with pytest.raises(ProtocolViolation, match="not that of its run"):
        await b._calls.run(liar.peer_id, RUN.run_id)
    assert await b.find_config(RUN.run_id) == RUN.canonical()
    assert liar.peer_id in b.violations


async def test_a_reply_that_is_nonsense_is_a_violation(start: Start) -> None:
    a, _ = await start("a")
    b, _ = await start("b", a)
    for name in ("rpc_run", "rpc_hello", "rpc_offers", "rpc_state", "rpc_announce"):
        answer_instead(a, name, lambda: b"\xff\xff\xff")
    with pytest.raises(ProtocolViolation):
        await b._calls.run(a.peer_id, RUN.run_id)
    with pytest.raises(ProtocolViolation):
        await b.hello(a.peer_id, RUN.run_id)
    with pytest.raises(ProtocolViolation):
        await b.offers(a.peer_id, RUN.run_id, 1)
    with pytest.raises(ProtocolViolation):
        await b.state(a.peer_id, RUN.run_id)
    with pytest.raises(ProtocolViolation):
        await b.announce(a.peer_id, [b.sign(record(b))])
    assert b.violations == {a.peer_id: 5}
    junk = pb.StateReply(envelope=b"junk").SerializeToString()
    answer_instead(a, "rpc_state", lambda: junk)
    with pytest.raises(ProtocolViolation):
        await b.state(a.peer_id, RUN.run_id)
    said = pb.StateReply(reason="\x1b[31mred\n" + "x" * 999).SerializeToString()
    answer_instead(a, "rpc_state", lambda: said)
    reason = await b.state(a.peer_id, RUN.run_id)
    assert isinstance(reason, str)
    assert reason.isprintable()
    assert len(reason) <= 256


async def test_no_answer_can_break_the_clock(start: Start) -> None:
    a, _ = await start("a")
    b, _ = await start("b", a)
    said = [float("nan"), float("inf"), -1.0, 1e300]
    answer_instead(a, "rpc_hello", lambda: pb.HelloReply(time=said.pop()).SerializeToString())
    while said:
        with pytest.raises(ProtocolViolation, match="no time"):
            await b.hello(a.peer_id, RUN.run_id)
    assert b.clock_offset == 0.0


def test_peers_agree_on_the_time_however_their_clocks_differ() -> None:
    def agreed(*clocks: float) -> list[float]:
        said = []
        for i, mine in enumerate(clocks):
            clock = Clock()
            for j, theirs in enumerate(clocks):
                if i != j:
                    clock.heard(str(j), theirs - mine)
            said.append(mine + clock.offset)
        return said

    assert agreed(0.0, 10.0) == [5.0, 5.0]
    assert agreed(0.0, 0.5, 100.0) == [0.5, 0.5, 0.5]
    assert agreed(7.0) == [7.0]


def test_the_clock_forgets_whom_it_heard_longest_ago() -> None:
    clock = Clock()
    for i in range(calls.CLOCK_SAMPLES):
        clock.heard(str(i), 1.0)
    clock.heard("0", 1.0)
    clock.heard("new", 1.0)
    assert "0" in clock._offsets
    assert "1" not in clock._offsets
    assert len(clock._offsets) == calls.CLOCK_SAMPLES


def test_envelopes_travel_in_messages_of_bounded_size() -> None:
    raws = [b"x" * 300_000] * 7
    assert [len(b) for b in batches(raws)] == [3, 3, 1]
    assert all(sum(map(len, b)) <= MAX_MESSAGE_BYTES for b in batches(raws))
    assert [len(b) for b in batches([b"x"] * (MAX_ENVELOPES + 5))] == [MAX_ENVELOPES, 5]
    assert list(batches([])) == []


async def test_many_large_envelopes_arrive_and_the_connection_lives(start: Start) -> None:
    a, served = await start("a")
    b, _ = await start("b", a)
    part = offer(b).parts[0]
    parts = [part, *(part_of(e) for e in range(4000))]
    large = b.sign(offer(b, parts=tuple(parts)))
    await b.announce(a.peer_id, [large] * 20)  # 5 MB: more than p2pd passes on in one message
    assert len(served.received) == 20
    assert await b.alive()


def part_of(expert: int) -> PartOffer:
    return PartOffer(part=f"expert-{expert}", term=1, tokens=1, digest="cd" * 32, size=9)
