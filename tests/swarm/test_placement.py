"""Placement and leases: everything covered, few moves, one winner."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spesd.swarm.lease import coverage, leases, next_term, orphans
from spesd.swarm.placement import MIN_MOVE_INTERVAL_S, Seat, SwarmView, place
from spesd.swarm.records import Claim, PeerRecord, PeerState


def record(
    peer: str, claims: tuple[Claim, ...], capacity: int = 4, state: PeerState = PeerState.TRAINING
) -> PeerRecord:
    return PeerRecord(
        run_id="r", peer_id=peer, seq=1, time=0.0, expires=1.0, state=state, round=1,
        claims=claims, capacity=capacity,
    )  # fmt: skip


def claims(*experts: int, term: int = 1) -> tuple[Claim, ...]:
    return tuple(Claim(expert=e, term=term, since=0.0) for e in experts)


def settle(
    experts: int, peers: int, capacity: int, *, together: bool, settled: bool, ticks: int = 40
) -> tuple[dict[str, tuple[Claim, ...]], int]:
    """Let peers place themselves, one by one or all on the same stale view; count the changes."""
    held: dict[str, tuple[Claim, ...]] = {f"p{i}": () for i in range(peers)}
    changes = 0
    for tick in range(ticks):
        seen = dict(held)
        for peer in sorted(held):
            view = seen if together else held
            others = [record(p, c, capacity) for p, c in view.items() if p != peer and c]
            seat = Seat(peer_id=peer, capacity=capacity, claims=view[peer], settled=settled)
            placed = place(seat, SwarmView(n_experts=experts, others=others, last_terms={}), tick)
            changes += bool(placed.reason)
            held[peer] = placed.claims
    return held, changes


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    ("experts", "peers", "capacity"), [(8, 4, 4), (16, 4, 4), (8, 2, 8), (16, 8, 2), (16, 5, 7)]
)
def test_before_the_first_round_ownership_becomes_even_and_stays(
    experts: int, peers: int, capacity: int, together: bool
) -> None:
    held, changes = settle(experts, peers, capacity, together=together, settled=False)
    owners = [sum(e in [c.expert for c in cs] for cs in held.values()) for e in range(experts)]
    assert min(owners) >= peers * capacity // experts
    assert max(owners) - min(owners) <= 1
    assert changes <= 3 * peers + experts  # then nothing moves any more


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 24), st.integers(1, 9), st.integers(1, 24), st.booleans())
def test_whatever_fits_is_covered(experts: int, peers: int, capacity: int, together: bool) -> None:
    capacity = min(capacity, experts)
    held, _ = settle(experts, peers, capacity, together=together, settled=False, ticks=60)
    assert all(len(c) == capacity for c in held.values())
    if peers * capacity >= experts:
        records = [record(p, c, capacity) for p, c in held.items()]
        assert coverage(leases(records, experts), experts) == 1.0


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 8), st.integers(0, 2**32))
def test_peers_with_one_view_agree_on_who_adopts_an_orphan(peers: int, seed: int) -> None:
    rng = random.Random(seed)
    names = [f"peer{rng.random()}" for _ in range(peers)]
    records = [record(n, claims(0, 1), capacity=3) for n in names]
    winners = []
    for name in names:
        seat = Seat(peer_id=name, capacity=3, claims=claims(0, 1))
        others = [r for r in records if r.peer_id != name]
        placed = place(seat, SwarmView(n_experts=3, others=others, last_terms={2: 5}), 0.0)
        if 2 in placed.experts:
            winners.append(placed)
    assert len(winners) == 1
    assert next(c.term for c in winners[0].claims if c.expert == 2) == 6
    assert "no live owner" in winners[0].reason


def test_a_full_peer_gives_up_a_shared_expert_for_an_orphan() -> None:
    seat = Seat(peer_id="a", capacity=2, claims=claims(0, 1))
    others = [record("b", claims(1, 2), capacity=2)]
    placed = place(seat, SwarmView(n_experts=4, others=others, last_terms={}), 0.0)
    assert 0 in placed.experts  # its only owner keeps it
    assert len(placed.experts) == 2


def test_a_sole_owner_never_gives_its_expert_up() -> None:
    seat = Seat(peer_id="a", capacity=2, claims=claims(0, 1))
    others = [record("b", claims(2, 3), capacity=2), record("c", claims(2, 3), capacity=2)]
    placed = place(seat, SwarmView(n_experts=5, others=others, last_terms={}), 0.0)
    assert {0, 1} <= set(placed.experts)


def test_an_overtaken_claim_follows_the_higher_term() -> None:
    seat = Seat(peer_id="a", capacity=1, claims=claims(0, term=1))
    others = [record("b", claims(0, term=3), capacity=1)]
    placed = place(seat, SwarmView(n_experts=1, others=others, last_terms={0: 3}), 0.0)
    assert placed.claims[0].term == 3


def test_a_voluntary_move_waits_for_its_interval() -> None:
    others = [record("b", claims(0), 1), record("c", claims(0), 1), record("d", claims(1), 1)]
    view = SwarmView(n_experts=2, others=others, last_terms={})
    moved = []
    for since in (1.0, MIN_MOVE_INTERVAL_S + 1):
        names = ["a", "aa", "ab", "ac", "ad", "ae"]
        placed = [
            place(Seat(peer_id=n, capacity=1, claims=claims(0), moved_at=0.0), view, since)
            for n in names
        ]
        moved.append(sum(p.moved for p in placed))
    assert moved[0] == 0
    assert moved[1] > 0


def test_highest_term_owns_and_lapsed_peers_do_not() -> None:
    held = leases(
        [
            record("a", claims(0, term=1)),
            record("b", claims(0, 1, term=2)),
            record("c", claims(0, term=2)),
            record("d", claims(2), state=PeerState.OFFLINE),
            record("e", claims(99)),
        ],
        n_experts=3,
    )
    assert held[0].owners == ("b", "c")
    assert orphans(held, 3) == [2]
    assert coverage(held, 3) == pytest.approx(2 / 3)
    assert next_term(2, {2: 4}) == 5
