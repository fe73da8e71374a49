"""A peer's round as a transition table: event in, commands out.

All that decides about a round is in this file, and the file knows no clock, socket or tensor.
TABLE is the whole protocol of one peer; ARCHITECTURE.md shows it, and a test keeps both equal. An
event that has no row raises UnexpectedEvent with the story of that round: that is a bug of ours.

Late events (of an earlier round) are dropped before the table, and offers for the next round are
kept until we are there.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from spesd.swarm import events as ev
from spesd.swarm.deadline import AdaptiveDeadline
from spesd.swarm.plan import Want, merges, wants
from spesd.swarm.records import Offer

STORY_LENGTH = 60
MAX_OFFERS = 4096  # of one round: a bound on memory


class Phase(StrEnum):
    """Where in its round a peer is."""

    SYNCING = "SYNCING"  # not in a round: holds no state from which it may train
    TRAINING = "TRAINING"
    OFFERING = "OFFERING"
    EXCHANGING = "EXCHANGING"
    MERGING = "MERGING"
    LEAVING = "LEAVING"


class UnexpectedEvent(AssertionError):
    """An event that the table has no row for: our bug, with the story of the round."""


@dataclass(frozen=True, kw_only=True)
class RoundRules:
    """What the round needs of RunConfig."""

    local_steps: int
    quorum: float
    deadline_s: float
    gossip_fanout: int
    n_experts: int


Commands = list[ev.Command]

# what the user, a crash or a loaded state says holds in whatever round we thought we were
_ANY_ROUND = (ev.LeaveAsked, ev.Interrupted, ev.Synced)


class Round:
    """The state machine. `handle(event, now)` returns the commands that follow from it."""

    def __init__(self, own_id: str, rules: RoundRules) -> None:
        self.own_id, self.rules = own_id, rules
        self.round = 0
        self.phase = Phase.SYNCING
        self.versions: dict[str, tuple[int, int]] = {}  # part -> (round, term) as we hold it
        self.story: deque[str] = deque(maxlen=STORY_LENGTH)
        self.closed_by = ""
        self._early: dict[str, Offer] = {}
        # outlives a round: with nobody in it, a fast peer would close the next one as if alone
        self._participants: frozenset[str] = frozenset()
        self._close_wait = AdaptiveDeadline(rules.deadline_s)
        self._exchange_wait = AdaptiveDeadline(rules.deadline_s)
        self._clear()

    def _clear(self) -> None:
        self.steps_done_at: float | None = None
        self.exchange_began: float | None = None
        self.offers: dict[str, Offer] = {}
        self.own_offer: Offer | None = None
        self._peers_done: frozenset[str] = frozenset()
        self._wants: dict[Want, str] = {}  # want -> "" pending, "here", or why it failed

    def handle(self, event: ev.Event, now: float) -> Commands:
        """Take in one event; return the commands that follow from it."""
        name = type(event).__name__
        if event.round < self.round and not isinstance(event, _ANY_ROUND):
            return []
        if isinstance(event, ev.OfferSeen) and event.round > self.round:
            return self._offer_ahead(event, now)
        row = TABLE.get((self.phase, type(event)))
        self.story.append(f"{now:.2f} round {self.round} {self.phase} {name}({event.round})")
        if row is None:
            raise UnexpectedEvent(
                f"{name}({event.round}) has no row in {self.phase}:\n" + "\n".join(self.story)
            )
        commands: Commands = getattr(self, row)(event, now)
        self.story.extend(f"  -> {type(c).__name__}" for c in commands)
        return commands

    # --- entering a round -------------------------------------------------------------------

    def _start(self, event: ev.Synced, now: float) -> Commands:
        early, self._early = self._early, {}
        self.round = max(event.round, self._where_the_swarm_is(early))
        self.phase = Phase.TRAINING
        self._clear()
        go_on = self.rules.quorum < 1.0
        commands: Commands = [ev.Train(round=self.round, steps=self.rules.local_steps, go_on=go_on)]
        for offer in early.values():
            if offer.round >= self.round:
                commands += self.handle(ev.OfferSeen(round=offer.round, offer=offer), now)
        return commands

    @staticmethod
    def _where_the_swarm_is(early: Mapping[str, Offer]) -> int:
        """Return the round that most of those who are ahead of us have offered for; 0 if nobody is.

        A peer whose download takes longer than a round enters where the others are. It has trained
        nothing there, so its weight is 0 and the merge gives it what they have.
        """
        return statistics.median_low(o.round for o in early.values()) if early else 0

    def _keep_early(self, event: ev.OfferSeen, now: float) -> Commands:
        if len(self._early) < MAX_OFFERS:
            self._early[event.offer.peer_id] = event.offer
        return []

    def _next(self, event: ev.MergeDone, now: float) -> Commands:
        return self._start(ev.Synced(round=event.round + 1), now)

    # --- closing ----------------------------------------------------------------------------

    def _steps_done(self, event: ev.StepsDone, now: float) -> Commands:
        self.steps_done_at = now
        seconds = self._close_wait.seconds()
        return [
            ev.SayDone(round=self.round),
            ev.SetDeadline(round=self.round, phase=Phase.TRAINING, seconds=seconds),
            *self._close_if_quorum(now),
        ]

    def _roster_while_training(self, event: ev.RosterSeen, now: float) -> Commands:
        self._participants, self._peers_done = event.participants, event.done
        return self._close_if_quorum(now)

    def _close_if_quorum(self, now: float) -> Commands:
        reason = quorum_reason(
            quorum=self.rules.quorum,
            others=len(self._participants),
            others_done=len(self._peers_done),
            own_done=self.steps_done_at is not None,
        )
        return self._close(reason, now) if reason else []

    def _close_deadline(self, event: ev.DeadlinePassed, now: float) -> Commands:
        if event.phase != Phase.TRAINING:
            return []
        return self._close("deadline: the quorum did not come", now)

    def _close_by_offer(self, event: ev.OfferSeen, now: float) -> Commands:
        self._keep(event.offer)
        return self._close("another peer's offer", now)

    def _close(self, reason: str, now: float) -> Commands:
        if self.phase is not Phase.TRAINING:
            return []
        if self.steps_done_at is not None and "deadline" not in reason:
            self._close_wait.arrived(now - self.steps_done_at)
        self.phase, self.closed_by = Phase.OFFERING, reason
        return [ev.Snapshot(round=self.round, closed_by=reason)]

    # --- offering and exchanging ------------------------------------------------------------

    def _keep_offer(self, event: ev.OfferSeen, now: float) -> Commands:
        self._keep(event.offer)
        return []

    def _keep(self, offer: Offer) -> None:
        if offer.peer_id != self.own_id and len(self.offers) < MAX_OFFERS:
            self.offers.setdefault(offer.peer_id, offer)

    def _note_roster(self, event: ev.RosterSeen, now: float) -> Commands:
        self._participants, self._peers_done = event.participants, event.done
        return []

    def _exchange(self, event: ev.SnapshotTaken, now: float) -> Commands:
        self.phase, self.own_offer, self.exchange_began = Phase.EXCHANGING, event.offer, now
        seconds = self._exchange_wait.seconds()
        missing = self._participants - self.offers.keys()
        commands: Commands = [
            ev.PublishOffer(round=self.round, offer=event.offer),
            ev.SetDeadline(round=self.round, phase=Phase.EXCHANGING, seconds=seconds),
        ]
        if missing:
            commands.append(ev.AskOffers(round=self.round, peers=missing))
        return commands + self._fetch_new() + self._merge_if_complete(now)

    def _offer_arrived(self, event: ev.OfferSeen, now: float) -> Commands:
        self._keep(event.offer)
        return self._fetch_new() + self._merge_if_complete(now)

    def _roster_while_exchanging(self, event: ev.RosterSeen, now: float) -> Commands:
        self._participants = event.participants
        missing = self._participants - self.offers.keys()
        if missing:  # its push may have been lost: ask again each heartbeat, until the deadline
            return [ev.AskOffers(round=self.round, peers=missing)]
        return self._merge_if_complete(now)

    def _part_arrived(self, event: ev.PartArrived, now: float) -> Commands:
        if event.want in self._wants:
            self._wants[event.want] = "here"
        return self._merge_if_complete(now)

    def _fetch_failed(self, event: ev.FetchFailed, now: float) -> Commands:
        if event.want in self._wants:
            self._wants[event.want] = event.reason or "failed"
        return self._merge_if_complete(now)

    def _fetch_new(self) -> Commands:
        assert self.own_offer is not None
        own_parts = [p.part for p in self.own_offer.parts]
        everybody = {**self.offers, self.own_id: self.own_offer}
        needed = wants(self.own_id, own_parts, everybody, self.rules.gossip_fanout)
        fresh = [w for w in needed if w not in self._wants]
        self._wants.update(dict.fromkeys(fresh, ""))
        return [ev.Fetch(round=self.round, want=want) for want in fresh]

    # --- merging ----------------------------------------------------------------------------

    def _merge_if_complete(self, now: float) -> Commands:
        if self._participants - self.offers.keys() or "" in self._wants.values():
            return []
        if self.exchange_began is not None and self.offers:
            self._exchange_wait.arrived(now - self.exchange_began)
        return self._merge()

    def _exchange_deadline(self, event: ev.DeadlinePassed, now: float) -> Commands:
        return self._merge() if event.phase == Phase.EXCHANGING else []

    def _merge(self) -> Commands:
        assert self.own_offer is not None
        self.phase = Phase.MERGING
        arrived = [want for want, state in self._wants.items() if state == "here"]
        missed = [f"no offer from {p}" for p in sorted(self._participants - self.offers.keys())]
        missed += [
            f"{w.part} of {w.peer}: {state or 'not here before the deadline'}"
            for w, state in sorted(self._wants.items())
            if state != "here"
        ]
        parts = merges(self.own_offer, arrived, self.rules.n_experts, self.versions)
        offers = tuple(self.offers[p] for p in sorted(self.offers))
        return [
            ev.Merge(
                round=self.round,
                offers=(self.own_offer, *offers),
                parts=tuple(parts),
                missed=tuple(missed),
            )
        ]

    # --- falling behind, interruptions, leaving ---------------------------------------------

    def _offer_ahead(self, event: ev.OfferSeen, now: float) -> Commands:
        """Others are in a later round. One ahead: hurry. More: our way back is their state."""
        self._keep_early(event, now)
        if self.phase in (Phase.SYNCING, Phase.LEAVING, Phase.MERGING):
            return []
        if event.round == self.round + 1:
            if self.phase is Phase.TRAINING:
                return self._close("others are a round ahead", now)
            return []
        return self._resync(f"the swarm is in round {event.round}, we are in {self.round}")

    def _resync(self, reason: str) -> Commands:
        self.phase = Phase.SYNCING
        return [ev.Resync(round=self.round, reason=reason)]

    def _interrupted(self, event: ev.Interrupted, now: float) -> Commands:
        return self._resync(event.reason)

    def _leave(self, event: ev.LeaveAsked, now: float) -> Commands:
        self.phase = Phase.LEAVING
        return [ev.HandOver(round=self.round)]

    def _ignore(self, event: ev.Event, now: float) -> Commands:
        return []


def quorum_reason(*, quorum: float, others: int, others_done: int, own_done: bool) -> str:
    """Return why a round closes now, or "" if it does not.

    `others` are the other live peers of the round. We count as one of them.
    """
    need = math.ceil(quorum * (others + 1))
    done = others_done + own_done
    if done < need:
        return ""
    if others == 0:
        return "alone: no other live peer in this round"
    return f"quorum: {done} of {others + 1} peers have made their steps, {need} needed"


Row = Mapping[tuple[Phase, type[ev.Event]], str]

TABLE: Row = {
    (Phase.SYNCING, ev.Synced): "_start",
    (Phase.SYNCING, ev.OfferSeen): "_keep_early",
    (Phase.SYNCING, ev.RosterSeen): "_note_roster",
    (Phase.SYNCING, ev.StepsDone): "_ignore",
    (Phase.SYNCING, ev.SnapshotTaken): "_ignore",
    (Phase.SYNCING, ev.PartArrived): "_ignore",
    (Phase.SYNCING, ev.FetchFailed): "_ignore",
    (Phase.SYNCING, ev.DeadlinePassed): "_ignore",
    (Phase.SYNCING, ev.MergeDone): "_ignore",
    (Phase.SYNCING, ev.Interrupted): "_ignore",
    (Phase.SYNCING, ev.LeaveAsked): "_leave",
    (Phase.TRAINING, ev.StepsDone): "_steps_done",
    (Phase.TRAINING, ev.RosterSeen): "_roster_while_training",
    (Phase.TRAINING, ev.OfferSeen): "_close_by_offer",
    (Phase.TRAINING, ev.DeadlinePassed): "_close_deadline",
    (Phase.TRAINING, ev.Interrupted): "_interrupted",
    (Phase.TRAINING, ev.LeaveAsked): "_leave",
    (Phase.OFFERING, ev.SnapshotTaken): "_exchange",
    (Phase.OFFERING, ev.OfferSeen): "_keep_offer",
    (Phase.OFFERING, ev.RosterSeen): "_note_roster",
    (Phase.OFFERING, ev.StepsDone): "_ignore",
    (Phase.OFFERING, ev.DeadlinePassed): "_ignore",
    (Phase.OFFERING, ev.Interrupted): "_interrupted",
    (Phase.OFFERING, ev.LeaveAsked): "_leave",
    (Phase.EXCHANGING, ev.OfferSeen): "_offer_arrived",
    (Phase.EXCHANGING, ev.PartArrived): "_part_arrived",
    (Phase.EXCHANGING, ev.FetchFailed): "_fetch_failed",
    (Phase.EXCHANGING, ev.RosterSeen): "_roster_while_exchanging",
    (Phase.EXCHANGING, ev.DeadlinePassed): "_exchange_deadline",
    (Phase.EXCHANGING, ev.Interrupted): "_interrupted",
    (Phase.EXCHANGING, ev.LeaveAsked): "_leave",
    (Phase.MERGING, ev.MergeDone): "_next",
    (Phase.MERGING, ev.OfferSeen): "_ignore",
    (Phase.MERGING, ev.PartArrived): "_ignore",
    (Phase.MERGING, ev.FetchFailed): "_ignore",
    (Phase.MERGING, ev.RosterSeen): "_note_roster",
    (Phase.MERGING, ev.DeadlinePassed): "_ignore",
    (Phase.MERGING, ev.Interrupted): "_interrupted",
    (Phase.MERGING, ev.LeaveAsked): "_leave",
    (Phase.LEAVING, ev.Synced): "_ignore",
    (Phase.LEAVING, ev.StepsDone): "_ignore",
    (Phase.LEAVING, ev.RosterSeen): "_ignore",
    (Phase.LEAVING, ev.OfferSeen): "_ignore",
    (Phase.LEAVING, ev.SnapshotTaken): "_ignore",
    (Phase.LEAVING, ev.PartArrived): "_ignore",
    (Phase.LEAVING, ev.FetchFailed): "_ignore",
    (Phase.LEAVING, ev.DeadlinePassed): "_ignore",
    (Phase.LEAVING, ev.MergeDone): "_ignore",
    (Phase.LEAVING, ev.Interrupted): "_ignore",
    (Phase.LEAVING, ev.LeaveAsked): "_ignore",
}
