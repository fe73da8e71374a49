"""What peers say of themselves: frozen records, each with its validity rule.

A record is a statement by one peer, signed by `net` and valid until it expires. `check()` raises
ProtocolViolation on anything that no honest peer says. Every number has a bound, because these
values come from strangers.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from spesd.errors import ProtocolViolation
from spesd.ids import SHARED, is_digest, part_expert

MAX_EXPERTS = 4096
MAX_ADDRESSES = 8
MAX_TEXT = 256
MAX_HEALTH = 8
MAX_ROUND = 2**40
MAX_TOKENS = 2**60
MAX_BUNDLE_BYTES = 16 * 2**30  # the largest part of the largest preset, in fp32, is about 4 GB


class PeerState(StrEnum):
    """A peer's life; nothing trains before SYNCING has succeeded or the peer is the founder."""

    STARTING = "STARTING"
    JOINING = "JOINING"
    SYNCING = "SYNCING"
    TRAINING = "TRAINING"
    PAUSED = "PAUSED"
    LEAVING = "LEAVING"
    OFFLINE = "OFFLINE"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """ "I own this expert": a lease. A survivor that adopts an orphan takes a higher term."""

    expert: int
    term: int
    since: float  # when this term began; seconds since the epoch, DHT time

    def check(self) -> None:
        """Raise ProtocolViolation unless an honest peer could have said this."""
        _bounded("claim.expert", self.expert, MAX_EXPERTS - 1)
        _bounded("claim.term", self.term, MAX_ROUND)
        _bounded("claim.since", self.since, 2**40)


@dataclass(frozen=True, kw_only=True)
class PeerRecord:
    """A peer's heartbeat: who it is, where it stands, what it owns."""

    run_id: str
    peer_id: str
    seq: int  # rises with every record of this peer, across restarts: newest wins
    time: float  # when it was made; seconds since the epoch, DHT time
    expires: float
    state: PeerState
    round: int  # the round it works on; 0 before the first
    done: bool = False  # it has made the round's local steps and is ready to close
    step_in_round: int = 0
    steps: int = 0  # local optimizer steps in its whole life
    tokens: int = 0  # tokens it has trained on in its whole life
    tokens_per_s: float = 0.0
    global_tokens: int = 0  # the swarm's progress as this peer knows it
    loss: float | None = None  # training loss, mean over the last round
    val_loss: float | None = None  # held-out loss after the last merge
    claims: tuple[Claim, ...] = ()
    capacity: int = 0  # experts that its memory can own
    addresses: tuple[str, ...] = ()  # multiaddrs with peer id
    addr_kind: str = "unknown"  # public | private | loopback | relayed | unknown
    version: str = ""  # of spesd
    health: tuple[str, ...] = ()  # sentences; empty when all is well

    @property
    def owns(self) -> tuple[int, ...]:
        """The experts that this peer claims, ascending."""
        return tuple(sorted(claim.expert for claim in self.claims))

    def check(self) -> None:
        """Raise ProtocolViolation unless an honest peer could have said this."""
        _text("record.run_id", self.run_id)
        _text("record.peer_id", self.peer_id)
        _text("record.version", self.version)
        _text("record.addr_kind", self.addr_kind)
        for name in ("seq", "round", "step_in_round", "steps", "tokens", "global_tokens"):
            _bounded(f"record.{name}", getattr(self, name), MAX_TOKENS)
        _bounded("record.capacity", self.capacity, MAX_EXPERTS)
        for name in ("time", "expires"):
            _bounded(f"record.{name}", getattr(self, name), 2**40)
        _bounded("record.tokens_per_s", self.tokens_per_s, 1e9)
        for name in ("loss", "val_loss"):
            value = getattr(self, name)
            if value is not None:
                _bounded(f"record.{name}", value, 1e6)
        _few("record.claims", self.claims, MAX_EXPERTS)
        _few("record.addresses", self.addresses, MAX_ADDRESSES)
        _few("record.health", self.health, MAX_HEALTH)
        for text in (*self.addresses, *self.health):
            _text("record text", text)
        for claim in self.claims:
            claim.check()
        if len(set(self.owns)) != len(self.claims):
            raise ProtocolViolation("a record claims one expert twice")


@dataclass(frozen=True, kw_only=True)
class PartOffer:
    """One part as a peer made it in a round: a promise to serve the bundle `digest`."""

    part: str  # "shared" or "expert-N"
    term: int  # of the claim, 0 for the shared parameters
    tokens: int  # that this peer trained it on: for an expert, the tokens routed to it
    digest: str
    size: int  # bytes

    def check(self) -> None:
        """Raise ProtocolViolation unless an honest peer could have said this."""
        try:
            expert = part_expert(self.part)
        except ValueError as error:
            raise ProtocolViolation(str(error)) from None
        if expert is not None:
            _bounded("offer.part", expert, MAX_EXPERTS - 1)
        _bounded("offer.term", self.term, MAX_ROUND)
        _bounded("offer.tokens", self.tokens, MAX_TOKENS)
        _bounded("offer.size", self.size, MAX_BUNDLE_BYTES)
        if not is_digest(self.digest):
            raise ProtocolViolation("an offer's digest is not 64 hex digits")


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A peer's signed manifest of the parts that it produced in a round."""

    run_id: str
    peer_id: str
    round: int
    tokens: int  # that this peer trained on in the round
    global_tokens: int  # the swarm's progress before the round, as this peer knows it
    loss: float | None
    parts: tuple[PartOffer, ...]

    def part(self, name: str) -> PartOffer | None:
        """Return the offered part called `name`, if it is among them."""
        return next((p for p in self.parts if p.part == name), None)

    def check(self) -> None:
        """Raise ProtocolViolation unless an honest peer could have said this."""
        _text("offer.run_id", self.run_id)
        _text("offer.peer_id", self.peer_id)
        _bounded("offer.round", self.round, MAX_ROUND)
        _bounded("offer.tokens", self.tokens, MAX_TOKENS)
        _bounded("offer.global_tokens", self.global_tokens, MAX_TOKENS)
        if self.loss is not None:
            _bounded("offer.loss", self.loss, 1e6)
        _few("offer.parts", self.parts, MAX_EXPERTS + 1)
        for part in self.parts:
            part.check()
        names = [p.part for p in self.parts]
        if len(set(names)) != len(names):
            raise ProtocolViolation("an offer names one part twice")
        if SHARED not in names:
            raise ProtocolViolation("an offer lacks the shared parameters")


@dataclass(frozen=True, kw_only=True)
class StatePart:
    """One part of a whole state: which round and term made it, and the bundle that holds it."""

    part: str
    round: int
    term: int
    digest: str
    size: int

    def check(self) -> None:
        """Raise ProtocolViolation unless an honest peer could have said this."""
        _bounded("state.round", self.round, MAX_ROUND)
        PartOffer(
            part=self.part, term=self.term, tokens=0, digest=self.digest, size=self.size
        ).check()


@dataclass(frozen=True, kw_only=True)
class StateManifest:
    """A whole model after the merge of `round`: what a joiner downloads."""

    run_id: str
    peer_id: str  # the donor
    round: int
    global_tokens: int
    contributors: int  # peers whose offers the last merge knew; the schedule needs it
    parts: tuple[StatePart, ...]

    def check(self) -> None:
        """Raise ProtocolViolation unless an honest peer could have said this."""
        _text("state.run_id", self.run_id)
        _text("state.peer_id", self.peer_id)
        _bounded("state.round", self.round, MAX_ROUND)
        _bounded("state.global_tokens", self.global_tokens, MAX_TOKENS)
        _bounded("state.contributors", self.contributors, 2**20)
        _few("state.parts", self.parts, MAX_EXPERTS + 1)
        for part in self.parts:
            part.check()
        if len({p.part for p in self.parts}) != len(self.parts):
            raise ProtocolViolation("a state names one part twice")


def _bounded(name: str, value: float, most: float) -> None:
    if not math.isfinite(value) or value < 0 or value > most:
        raise ProtocolViolation(f"{name} is {value}, outside 0 to {most}")


def _text(name: str, value: str) -> None:
    if len(value) > MAX_TEXT or not value.isprintable():
        raise ProtocolViolation(f"{name} is not a printable text of at most {MAX_TEXT} characters")


def _few(name: str, values: tuple[object, ...], most: int) -> None:
    if len(values) > most:
        raise ProtocolViolation(f"{name} has {len(values)} entries, more than {most}")
