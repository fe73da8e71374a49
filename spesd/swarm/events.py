"""What can happen to a round (events) and what it asks for (commands).

Every event names its round: one that comes too late is dropped before the rules see it.
"""

from dataclasses import dataclass

from spesd.swarm.plan import PartMerge, Want
from spesd.swarm.records import Offer


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened, in the round in which it belongs."""

    round: int


@dataclass(frozen=True, kw_only=True)
class Synced(Event):
    """We hold the whole state after round `round` - 1, and may train in `round`."""


@dataclass(frozen=True, kw_only=True)
class StepsDone(Event):
    """The trainer has made the round's local steps."""


@dataclass(frozen=True, kw_only=True)
class RosterSeen(Event):
    """The roster as it is now: who takes part in `round`, who of them is done, who is ahead."""

    participants: frozenset[str]  # without us
    done: frozenset[str]  # of the participants: made their steps, or are in a later round


@dataclass(frozen=True, kw_only=True)
class OfferSeen(Event):
    """A peer's signed offer for `round`, already verified."""

    offer: Offer


@dataclass(frozen=True, kw_only=True)
class SnapshotTaken(Event):
    """Our bundles for `round` are on disk; this is the offer that names them."""

    offer: Offer


@dataclass(frozen=True, kw_only=True)
class PartArrived(Event):
    """A wanted bundle is here and its bytes are what its name says."""

    want: Want


@dataclass(frozen=True, kw_only=True)
class FetchFailed(Event):
    """A wanted bundle cannot be had from anybody now."""

    want: Want
    reason: str


@dataclass(frozen=True, kw_only=True)
class DeadlinePassed(Event):
    """The wait that `phase` of `round` was in has lasted long enough."""

    phase: str


@dataclass(frozen=True, kw_only=True)
class MergeDone(Event):
    """The trainer has merged; `round` is complete."""


@dataclass(frozen=True, kw_only=True)
class Interrupted(Event):
    """Training cannot go on from here (trainer lost, paused): stop, and sync before training."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class LeaveAsked(Event):
    """The user wants this peer to leave."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """Something for the daemon to do, in `round`; its result comes back as an event."""

    round: int


@dataclass(frozen=True, kw_only=True)
class Train(Command):
    """Make local steps; with `go_on`, go on training after them until told otherwise."""

    steps: int
    go_on: bool


@dataclass(frozen=True, kw_only=True)
class SayDone(Command):
    """Tell the swarm that our steps are made."""


@dataclass(frozen=True, kw_only=True)
class Snapshot(Command):
    """Stop at the next step boundary and write the bundles of what we trained."""

    closed_by: str


@dataclass(frozen=True, kw_only=True)
class PublishOffer(Command):
    """Send our signed offer to everybody."""

    offer: Offer


@dataclass(frozen=True, kw_only=True)
class AskOffers(Command):
    """Ask these peers for their offers for `round`: they may have sent them before we listened."""

    peers: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Fetch(Command):
    """Fetch a bundle."""

    want: Want


@dataclass(frozen=True, kw_only=True)
class SetDeadline(Command):
    """Send DeadlinePassed(phase) after `seconds`."""

    phase: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Merge(Command):
    """Merge what arrived; `missed` says what did not, and why."""

    offers: tuple[Offer, ...]  # of everybody in the round, ours included
    parts: tuple[PartMerge, ...]
    missed: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Resync(Command):
    """Fetch the swarm's state from a peer: we are too far behind to merge our way back."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class HandOver(Command):
    """Say goodbye: withdraw the claims, save, stop."""
