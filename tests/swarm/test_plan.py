"""The exchange plan: which bundles, from whom, for what; and the adaptive deadline."""

import pytest

from spesd.swarm.deadline import AdaptiveDeadline
from spesd.swarm.plan import merges, partners, trained_parts, wants
from spesd.swarm.records import Offer, PartOffer


def offer(peer: str, terms: dict[str, int], number: int = 3, tokens: int = 10) -> Offer:
    return Offer(
        run_id="r", peer_id=peer, round=number, tokens=tokens, global_tokens=0, loss=None,
        parts=tuple(
            PartOffer(part=p, term=t, tokens=tokens, digest="0" * 64, size=1)
            for p, t in terms.items()
        ),
    )  # fmt: skip


OFFERS = {
    "a": offer("a", {"shared": 0, "expert-0": 1}),
    "b": offer("b", {"shared": 0, "expert-0": 1, "expert-1": 1}),
    "c": offer("c", {"shared": 0, "expert-1": 2}),
}


def test_co_owned_parts_come_from_co_owners_and_foreign_ones_from_the_newest_term() -> None:
    needed = wants("a", trained_parts([0]), OFFERS, fanout=0)
    assert [(w.part, w.peer) for w in needed] == [
        ("expert-0", "b"), ("expert-1", "c"), ("shared", "b"), ("shared", "c"),
    ]  # fmt: skip


def test_merging_adopts_foreign_experts_only_if_they_are_newer() -> None:
    needed = wants("a", trained_parts([0]), OFFERS, fanout=0)
    plan = {m.part: m for m in merges(OFFERS["a"], needed, 4, {"expert-1": (2, 9)})}
    assert list(plan) == ["shared", "expert-0", "expert-1"]
    assert plan["shared"].own_tokens == 10
    assert plan["expert-1"].own_tokens is None
    stale = merges(OFFERS["a"], needed, 4, {"expert-1": (3, 2)})
    assert [m.part for m in stale] == ["shared", "expert-0"]


def test_an_overtaken_lease_adopts_the_newer_term() -> None:
    mine = offer("b", {"shared": 0, "expert-1": 1})
    needed = wants("b", trained_parts([1]), {"b": mine, "c": OFFERS["c"]}, fanout=0)
    plan = {m.part: m for m in merges(mine, needed, 2, {"expert-1": (2, 1)})}
    assert plan["expert-1"].own_tokens is None
    assert [w.peer for w in plan["expert-1"].inputs] == ["c"]


@pytest.mark.parametrize("fanout", [1, 2, 4])
def test_partners_on_the_ring_are_bounded_and_two_are_mutual(fanout: int) -> None:
    peers = [f"p{i}" for i in range(9)]
    chosen = {p: partners(p, "shared", peers, 7, fanout) for p in peers}
    assert all(len(c) == fanout and p not in c for p, c in chosen.items())
    if fanout % 2 == 0:
        assert all(p in chosen[q] for p in peers for q in chosen[p])
    assert partners("p0", "shared", peers, 8, 2) != partners("p0", "shared", peers, 9, 2)


def test_the_deadline_follows_arrivals_and_forgets_a_slow_peer() -> None:
    wait = AdaptiveDeadline(ceiling_s=60)
    assert wait.seconds() == 60
    for _ in range(16):
        wait.arrived(2.0)
    assert wait.seconds() == 4.0
    for _ in range(16):
        wait.arrived(20.0)
    assert wait.seconds() == 40.0
    for _ in range(9):
        wait.arrived(0.1)
    assert wait.seconds() == 3.0  # the floor
    for _ in range(16):
        wait.arrived(50.0)
    assert wait.seconds() == 60
