"""What a peer needs from a round's offers: which bundles, from whom, and what each is for.

A co-owned part is aggregated with our own; a foreign expert is adopted: from its owner, or, where
it has several, as their aggregate. Everything is sorted, so that peers with the same offers do the
same sums in the same order. Never touches a byte of a bundle.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from spesd.ids import SHARED, all_parts, expert_part, part_expert
from spesd.swarm.records import Offer


@dataclass(frozen=True, order=True, kw_only=True)
class Want:
    """One bundle to fetch: `peer` offered it as its version of `part`."""

    part: str
    peer: str
    digest: str
    size: int
    tokens: int
    term: int


@dataclass(frozen=True, kw_only=True)
class PartMerge:
    """What to do with one part: its inputs by peer, and our own tokens if we trained it."""

    part: str
    own_tokens: int | None  # None: a foreign expert, which is adopted
    inputs: tuple[Want, ...]
    round: int
    term: int


def wants(
    own_id: str, own_parts: Iterable[str], offers: Mapping[str, Offer], fanout: int
) -> list[Want]:
    """Return the bundles that this peer needs of the others' `offers`, by part and peer.

    `own_parts` are the parts that this peer trains; `fanout` bounds the partners of each of them
    (0: all). Offers of a lower term than the highest one for that expert are passed over.
    """
    trained = set(own_parts)
    needed: list[Want] = []
    for part in sorted({p.part for offer in offers.values() for p in offer.parts}):
        makers = current_makers(part, offers)
        if part in trained:
            round_number = next(iter(offers.values())).round
            makers = partners(own_id, part, makers, round_number, fanout)
        needed.extend(_want(part, peer, offers[peer]) for peer in makers if peer != own_id)
    return needed


def current_makers(part: str, offers: Mapping[str, Offer]) -> list[str]:
    """Return the peers whose offer of `part` carries the highest term, by peer id."""
    terms = {peer: p.term for peer, o in offers.items() if (p := o.part(part)) is not None}
    newest = max(terms.values(), default=0)
    return sorted(peer for peer, term in terms.items() if term == newest)


def partners(
    own_id: str, part: str, makers: Sequence[str], round_number: int, fanout: int
) -> list[str]:
    """Return the co-owners to aggregate with: all, or `fanout` neighbours on a ring.

    The ring is a shuffle that depends on part and round only, so partnership is mutual and every
    round mixes other pairs.
    """
    if fanout == 0 or len(makers) - 1 <= fanout:
        return [p for p in makers if p != own_id]

    def place(peer: str) -> bytes:
        return hashlib.sha256(f"{round_number}:{part}:{peer}".encode()).digest()

    ring = sorted({*makers, own_id}, key=place)
    at = ring.index(own_id)
    around = [ring[(at + (1 + i // 2) * (-1) ** i) % len(ring)] for i in range(fanout)]
    return sorted(set(around) - {own_id})


def merges(
    own: Offer, arrived: Sequence[Want], n_experts: int, versions: Mapping[str, tuple[int, int]]
) -> list[PartMerge]:
    """Return the merge of every part that has inputs, shared parameters first.

    `own` is what this peer offered; `versions` holds (round, term) of each part as this peer has
    it: a foreign expert that is not newer than that is left alone.
    """
    result = []
    for part in all_parts(n_experts):
        inputs = tuple(sorted(w for w in arrived if w.part == part))
        if not inputs:
            continue
        mine = own.part(part)
        term = max(w.term for w in inputs)
        if mine is None and (own.round, term) <= versions.get(part, (-1, -1)):
            continue
        if mine is not None and term > mine.term:
            mine = None  # our lease was overtaken while we trained: the newer term's weights win
        result.append(
            PartMerge(
                part=part,
                own_tokens=None if mine is None else mine.tokens,
                inputs=tuple(w for w in inputs if w.term == term),
                round=own.round,
                term=term,
            )
        )
    return result


def trained_parts(experts: Iterable[int]) -> list[str]:
    """Return the parts that an owner of `experts` trains."""
    return [SHARED, *(expert_part(e) for e in sorted(experts))]


def routed_experts(parts: Iterable[str]) -> list[int]:
    """Return the expert indices among `parts`, ascending."""
    return sorted(e for p in parts if (e := part_expert(p)) is not None)


def _want(part: str, peer: str, offer: Offer) -> Want:
    offered = offer.part(part)
    assert offered is not None
    return Want(
        part=part,
        peer=peer,
        digest=offered.digest,
        size=offered.size,
        tokens=offered.tokens,
        term=offered.term,
    )
