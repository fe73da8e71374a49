"""Which claims hold: a claim is a lease, a term is a fencing token.

The claims with the highest term own an expert; several at that term are co-owners. A claim lapses
with its peer (roster) or when it is overtaken by a higher term. Never decides who should claim.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from spesd.swarm.records import PeerRecord, PeerState

_HOLDING = (PeerState.SYNCING, PeerState.TRAINING, PeerState.PAUSED)


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Who owns one expert now: its co-owners by peer id, and the term that they hold."""

    expert: int
    term: int
    owners: tuple[str, ...]


def leases(records: Iterable[PeerRecord], n_experts: int) -> dict[int, Lease]:
    """Return the lease of every expert that has an owner among `records` (peers not gone).

    Claims on experts that the model does not have are ignored: a stranger may say anything.
    """
    terms: dict[int, int] = {}
    owners: dict[int, list[str]] = {}
    for record in sorted(records, key=lambda r: r.peer_id):
        if record.state not in _HOLDING:
            continue
        for claim in record.claims:
            if claim.expert >= n_experts or claim.term < terms.get(claim.expert, 0):
                continue
            if claim.term > terms.get(claim.expert, -1):
                terms[claim.expert] = claim.term
                owners[claim.expert] = []
            owners[claim.expert].append(record.peer_id)
    return {e: Lease(expert=e, term=terms[e], owners=tuple(owners[e])) for e in sorted(owners)}


def coverage(held: Mapping[int, Lease], n_experts: int) -> float:
    """Return the share of experts that have a live owner."""
    return len(held) / n_experts


def orphans(held: Mapping[int, Lease], n_experts: int) -> list[int]:
    """Return the experts without a live owner, ascending."""
    return [e for e in range(n_experts) if e not in held]


def next_term(expert: int, last_terms: Mapping[int, int]) -> int:
    """Return the term with which an orphan is adopted: above every term ever seen for it."""
    return last_terms.get(expert, 0) + 1
