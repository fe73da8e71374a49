"""Who is there: alive, suspect or gone, by how long ago each was heard.

Decides whose word still counts. Freshness is measured on our own clock, from the moment a newer
record reached us: a peer's wrong clock can neither keep it alive nor kill it. It never contacts
anyone.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from spesd.swarm.records import PeerRecord, PeerState

MAX_PEERS = 20_000  # a bound on memory; far above any swarm that the rules are simulated for


class Life(StrEnum):
    """How much a peer's last word is worth."""

    ALIVE = "alive"
    SUSPECT = "suspect"  # nobody waits for it; what it owns is still its own
    GONE = "gone"  # its claims have lapsed


@dataclass(frozen=True, kw_only=True)
class RosterTimes:
    """Seconds. `gone_s` is the length of a lease."""

    heartbeat_s: float = 2.0
    suspect_s: float = 8.0
    gone_s: float = 20.0


@dataclass
class _Entry:
    record: PeerRecord
    heard_at: float
    failed_at: float | None = None  # a contact failed after heard_at


class Roster:
    """The newest record of every peer, with the time at which it was heard."""

    def __init__(self, own_id: str, times: RosterTimes | None = None) -> None:
        self.own_id = own_id
        self.times = times or RosterTimes()
        self._entries: dict[str, _Entry] = {}
        self._ticked_at: float | None = None

    def see(self, record: PeerRecord, now: float) -> bool:
        """Take in a record; False if it is our own, not newer than what we have, or too many."""
        if record.peer_id == self.own_id:
            return False
        entry = self._entries.get(record.peer_id)
        if entry is not None and record.seq <= entry.record.seq:
            return False
        if entry is None and len(self._entries) >= MAX_PEERS:
            return False
        self._entries[record.peer_id] = _Entry(record, now)
        return True

    def failed(self, peer_id: str, now: float) -> None:
        """A contact with this peer failed: it is suspect in half the time unless it is heard."""
        entry = self._entries.get(peer_id)
        if entry is not None:
            entry.failed_at = now

    def tick(self, now: float) -> None:
        """Say that time passes; call it every heartbeat.

        A gap between two calls means that we were asleep (frozen, suspended, starved), so the
        silence of the others in that gap is not their fault: their age does not count it.
        """
        if self._ticked_at is not None:
            asleep = now - self._ticked_at - 2 * self.times.heartbeat_s
            if asleep > 0:
                for entry in self._entries.values():
                    entry.heard_at += asleep
        self._ticked_at = now
        forget_before = now - 20 * self.times.gone_s
        self._entries = {p: e for p, e in self._entries.items() if e.heard_at > forget_before}

    def life(self, peer_id: str, now: float) -> Life:
        """Tell how much this peer's last word is worth now."""
        entry = self._entries.get(peer_id)
        if entry is None or entry.record.state is PeerState.OFFLINE:
            return Life.GONE
        age = now - entry.heard_at
        if age >= self.times.gone_s:
            return Life.GONE
        if age >= self.times.suspect_s:
            return Life.SUSPECT
        # one lost message is no death: it only halves our patience
        failed_since = entry.failed_at is not None and entry.failed_at > entry.heard_at
        return Life.SUSPECT if failed_since and age >= self.times.suspect_s / 2 else Life.ALIVE

    def record(self, peer_id: str) -> PeerRecord | None:
        """Return the newest record of this peer, however old."""
        entry = self._entries.get(peer_id)
        return entry.record if entry else None

    def seconds_silent(self, peer_id: str, now: float) -> float | None:
        """Return how long ago this peer was heard; None if never."""
        entry = self._entries.get(peer_id)
        return None if entry is None else now - entry.heard_at

    def present(self, now: float) -> list[PeerRecord]:
        """Return the records of all peers that are not gone, by peer id."""
        return self._where(now, (Life.ALIVE, Life.SUSPECT))

    def alive(self, now: float) -> list[PeerRecord]:
        """Return the records of the peers that are neither suspect nor gone, by peer id."""
        return self._where(now, (Life.ALIVE,))

    def _where(self, now: float, lives: Iterable[Life]) -> list[PeerRecord]:
        wanted = set(lives)
        return [
            self._entries[p].record for p in sorted(self._entries) if self.life(p, now) in wanted
        ]


def participants(records: Iterable[PeerRecord], round_number: int) -> list[PeerRecord]:
    """Return those who take part in a round: in training, and in it or just about to enter it.

    A peer whose last word was of the round before is finishing that one and will be in this one.
    """
    return [
        r for r in records if r.state is PeerState.TRAINING and r.round >= max(round_number - 1, 1)
    ]
