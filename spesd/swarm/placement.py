"""Which experts a peer should own: orphans first, then those with the fewest owners.

`place` is a pure function of what everybody can see, so peers with the same view agree on who
acts; where their views differ, the worst outcome is one co-owner more than planned. It moves few
experts: at most one exchange at a time, and only when the move is worth it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spesd.swarm.lease import Lease, leases, next_term, orphans
from spesd.swarm.records import Claim, PeerRecord, PeerState

MIN_MOVE_INTERVAL_S = 600.0  # between two voluntary moves of one peer
WORTHWHILE = 2  # the expert given up must have this many owners more than the one taken


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The claims a peer should hold, and the sentence that says why they changed."""

    claims: tuple[Claim, ...]
    reason: str  # "" when nothing changed
    moved: bool = False  # one expert was given up for another

    @property
    def experts(self) -> tuple[int, ...]:
        """The experts claimed, ascending."""
        return tuple(claim.expert for claim in self.claims)


@dataclass(frozen=True, kw_only=True)
class Seat:
    """What placement must know of the peer that asks."""

    peer_id: str
    capacity: int  # experts that its memory can own
    claims: tuple[Claim, ...] = ()
    moved_at: float | None = None  # when it last gave up one expert for another
    settled: bool = True  # False before the first round, when moving costs nothing


@dataclass(frozen=True, kw_only=True)
class SwarmView:
    """What a peer sees of the others: their records (not gone), and terms ever seen."""

    n_experts: int
    others: Sequence[PeerRecord]
    last_terms: Mapping[int, int]  # the highest term ever seen, per expert


def rendezvous(expert: int, peer_id: str) -> int:
    """Score a peer for an expert; the same everywhere, and unrelated between experts."""
    raw = hashlib.sha256(f"{expert}:{peer_id}".encode()).digest()
    return int.from_bytes(raw[:8], "big")


def place(seat: Seat, view: SwarmView, now: float) -> Placement:
    """Decide which claims `seat` should hold now, and why."""
    plan = _Plan(seat, view, now)
    reasons = [plan.shrink(), plan.adopt_orphans(), plan.fill()]
    moved = ""
    if not any(reasons):
        moved = plan.rebalance()
        reasons.append(moved)
    return Placement(
        claims=tuple(plan.mine[e] for e in sorted(plan.mine)),
        reason="; ".join(r for r in reasons if r),
        moved=bool(moved),
    )


class _Plan:
    """One decision in the making: our claims, changed step by step."""

    def __init__(self, seat: Seat, view: SwarmView, now: float) -> None:
        self.seat, self.view, self.now = seat, view, now
        self.held: dict[int, Lease] = leases(view.others, view.n_experts)
        self.mine = {c.expert: self._at_swarm_term(c) for c in seat.claims}
        self.had_claims = bool(seat.claims)

    def _at_swarm_term(self, claim: Claim) -> Claim:
        """An overtaken claim becomes co-ownership at the term that the others hold."""
        lease = self.held.get(claim.expert)
        if lease is None or lease.term <= claim.term:
            return claim
        return Claim(expert=claim.expert, term=lease.term, since=claim.since)

    def _take(self, expert: int) -> None:
        lease = self.held.get(expert)
        term = lease.term if lease else next_term(expert, self.view.last_terms)
        self.mine[expert] = Claim(expert=expert, term=term, since=self.now)

    def _free(self) -> list[int]:
        """Experts that we could take. Orphans are left to their one winner, but for newcomers."""
        free = [e for e in range(self.view.n_experts) if e not in self.mine]
        if self.had_claims:
            free = [e for e in free if e in self.held]
        return free

    def _others_on(self, expert: int) -> int:
        lease = self.held.get(expert)
        return len(lease.owners) if lease else 0

    def shrink(self) -> str:
        """Give up what memory no longer holds: first what most others own too."""
        surplus = len(self.mine) - self.seat.capacity
        if surplus <= 0:
            return ""
        given = sorted(self.mine, key=lambda e: (-self._others_on(e), e))[:surplus]
        for expert in given:
            del self.mine[expert]
        return f"gave up experts {_listed(given)}: memory holds {self.seat.capacity}"

    def adopt_orphans(self) -> str:
        """Adopt the orphans whose turn falls on us: one winner each, by rendezvous."""
        adopted = []
        for expert in orphans(self.held, self.view.n_experts):
            if expert in self.mine or not self._wins(expert):
                continue
            if len(self.mine) >= self.seat.capacity:
                spare = self._most_shared()
                if spare is None:
                    continue
                del self.mine[spare]
            self._take(expert)
            adopted.append(expert)
        if not adopted:
            return ""
        return f"adopted experts {_listed(adopted)}: they had no live owner"

    def _wins(self, expert: int) -> bool:
        """Tell whether this orphan falls on us: peers with room first, then by rendezvous."""
        ours = (len(self.mine) < self.seat.capacity, rendezvous(expert, self.seat.peer_id))
        for record in self.view.others:
            room = len(record.claims) < record.capacity
            able = room or any(self._others_on(e) > 1 or e in self.mine for e in record.owns)
            if record.state is not PeerState.TRAINING or not able:
                continue
            if (room, rendezvous(expert, record.peer_id)) > ours:
                return False
        return True

    def _most_shared(self) -> int | None:
        """Return our expert with the most other owners, if any has another owner."""
        shared = [e for e in self.mine if self._others_on(e)]
        return max(shared, key=lambda e: (self._others_on(e), -e)) if shared else None

    def fill(self) -> str:
        """Use spare capacity for co-ownership of the experts with the fewest owners."""
        room = self.seat.capacity - len(self.mine)
        free = self._free()
        free.sort(key=lambda e: (self._others_on(e), rendezvous(e, self.seat.peer_id)))
        taken = free[: max(room, 0)]
        for expert in taken:
            self._take(expert)
        if not taken:
            return ""
        return f"took experts {_listed(taken)}: memory holds {self.seat.capacity}, rarest first"

    def rebalance(self) -> str:
        """Exchange one widely owned expert for a rare one, if that turn falls on us."""
        last = self.seat.moved_at
        if self.seat.settled and last is not None and self.now - last < MIN_MOVE_INTERVAL_S:
            return ""
        free = self._free()
        spare = self._most_shared()
        if spare is None or not free:
            return ""
        rare = min(free, key=lambda e: (self._others_on(e), rendezvous(e, self.seat.peer_id)))
        if self._others_on(spare) + 1 - self._others_on(rare) < WORTHWHILE:
            return ""
        owners = self.held[spare].owners
        if any(rendezvous(spare, p) < rendezvous(spare, self.seat.peer_id) for p in owners):
            return ""  # exactly one of its co-owners acts: the one with the lowest score
        del self.mine[spare]
        self._take(rare)
        return (
            f"gave up expert {spare} for expert {rare}: {len(owners)} others own {spare}, "
            f"{self._others_on(rare)} own {rare}"
        )


def _listed(experts: Sequence[int]) -> str:
    return ", ".join(str(e) for e in sorted(experts))
