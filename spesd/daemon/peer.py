"""What the parts of one daemon share: this peer, its view of the swarm, its progress.

Holds state and the few questions asked of it everywhere. It starts nothing and waits for nothing.
"""

import asyncio
import os
import signal
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spesd import __version__
from spesd.checkpoint.manifest import Checkpoint
from spesd.checkpoint.store import Store
from spesd.config import RunConfig
from spesd.daemon.home import Home
from spesd.daemon.journal import Journal
from spesd.daemon.worker import Worker
from spesd.memory import Layout
from spesd.net.node import Net
from spesd.peerconfig import PeerConfig
from spesd.swarm.events import Event
from spesd.swarm.placement import Placement, Seat, SwarmView, place
from spesd.swarm.records import Claim, Offer, PeerRecord, PeerState
from spesd.swarm.roster import Roster
from spesd.swarm.round import Round, RoundRules

ROUNDS_SHOWN = 20
OFFERS_KEPT = 3  # of each peer: what we can still hand to one that missed them
RECORD_LIFE_S = 60.0


@dataclass
class Progress:
    """The swarm's progress and our own, as far as we know them."""

    global_tokens: int = 0
    contributors: int = 1
    steps: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    step_in_round: int = 0
    done: bool = False
    loss: float | None = None
    val_loss: float | None = None
    val_by_source: dict[str, float | None] = field(default_factory=dict)


@dataclass
class Peer:
    """One peer of one run."""

    home: Home
    run: RunConfig
    config: PeerConfig
    net: Net
    layout: Layout
    founder: bool
    inbox: asyncio.Queue[Event]
    worker: Worker
    state: PeerState = PeerState.JOINING
    claims: tuple[Claim, ...] = ()
    moved_at: float | None = None
    progress: Progress = field(default_factory=Progress)
    health: dict[str, str] = field(default_factory=dict)  # topic -> sentence
    rounds: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=ROUNDS_SHOWN))
    checkpoint: Checkpoint | None = None
    state_wanted: bool = False  # somebody asked for a state newer than our checkpoint
    signed_offers: dict[str, dict[int, bytes]] = field(default_factory=dict)  # peer -> round
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    last_terms: dict[int, int] = field(default_factory=dict)
    paused: bool = False

    def __post_init__(self) -> None:
        self.folder = self.home.run_folder(self.run.run_id)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.store = Store(self.folder)
        self.journal = Journal(self.folder / "journal.jsonl")
        self.roster = Roster(self.net.peer_id)
        self.raw_records: dict[str, bytes] = {}  # newest signed record per peer
        rules = RoundRules(
            local_steps=self.run.round.local_steps,
            quorum=self.run.round.quorum,
            deadline_s=self.run.round.deadline_s,
            gossip_fanout=self.run.round.gossip_fanout,
            n_experts=self.run.model.n_experts,
        )
        self.round = Round(self.net.peer_id, rules)
        self._seq = 0

    @property
    def owns(self) -> list[int]:
        """The experts that we claim, ascending."""
        return sorted(c.expert for c in self.claims)

    @property
    def capacity(self) -> int:
        """How many experts we can own."""
        return self.layout.k

    @property
    def experts(self) -> int:
        """How many experts the model has."""
        return self.run.model.n_experts

    def post(self, event: Event) -> None:
        """Put an event before the round; a full inbox is our own bug and raises."""
        self.inbox.put_nowait(event)

    def say(self, topic: str, sentence: str) -> None:
        """Set or, with "", clear the health sentence of a topic; a change is journaled."""
        if self.health.get(topic, "") == sentence:
            return
        if sentence:
            self.health[topic] = sentence
            self.journal.write("health", topic=topic, sentence=sentence)
        else:
            self.health.pop(topic, None)
        self.changed.set()

    def evaluated(self, round_number: int, reply: dict[str, Any]) -> None:
        """Take in and journal the held-out loss after the merge of `round_number`."""
        p = self.progress
        p.val_loss, p.val_by_source = reply.get("val_loss"), reply.get("val_by_source", {})
        self.journal.write(
            "evaluated",
            round=round_number,
            tokens=p.tokens,
            global_tokens=p.global_tokens,
            val_loss=p.val_loss,
            val_by_source=p.val_by_source,
        )

    def record(self) -> PeerRecord:
        """Return our heartbeat as of now."""
        now = self.net.now()
        self._seq = max(self._seq + 1, int(time.time() * 1000))
        p = self.progress
        return PeerRecord(
            run_id=self.run.run_id,
            peer_id=self.net.peer_id,
            seq=self._seq,
            time=now,
            expires=now + RECORD_LIFE_S,
            state=self.state,
            round=self.round.round,
            done=p.done,
            step_in_round=p.step_in_round,
            steps=p.steps,
            tokens=p.tokens,
            tokens_per_s=p.tokens_per_s,
            global_tokens=p.global_tokens,
            loss=p.loss,
            val_loss=p.val_loss,
            claims=self.claims,
            capacity=self.capacity,
            addresses=tuple(self.net.addresses[:8]),
            addr_kind=self.net.addr_kind,
            version=__version__,
            health=tuple(s[:256] for _, s in sorted(self.health.items()))[:8],
        )

    def see(self, record: PeerRecord, raw: bytes) -> bool:
        """Take in another peer's record."""
        if record.run_id != self.run.run_id or not self.roster.see(record, time.monotonic()):
            return False
        self.raw_records[record.peer_id] = raw
        for claim in record.claims:
            if claim.expert < self.experts:
                known = self.last_terms.get(claim.expert, 0)
                self.last_terms[claim.expert] = max(known, claim.term)
        return True

    def keep_offer(self, offer: Offer, raw: bytes) -> bool:
        """Keep a signed offer for those who ask later; False if it is known or not to be kept.

        Each peer's newest offers, whatever round we are in ourselves: after a long sleep they tell
        us where the swarm is. Only peers that we know of have a place, so it cannot grow.
        """
        known = offer.peer_id == self.net.peer_id or self.roster.record(offer.peer_id) is not None
        if offer.run_id != self.run.run_id or not known:
            return False
        kept = self.signed_offers.setdefault(offer.peer_id, {})
        if offer.round in kept or (len(kept) >= OFFERS_KEPT and offer.round < min(kept)):
            return False
        kept[offer.round] = raw
        for old in sorted(kept)[:-OFFERS_KEPT]:
            del kept[old]
        for gone in [p for p in self.signed_offers if p != self.net.peer_id]:
            if self.roster.record(gone) is None:
                del self.signed_offers[gone]
        return True

    def offers(self, round_number: int) -> list[bytes]:
        """Return the signed offers that we know for a round, by peer."""
        offers = self.signed_offers
        return [offers[p][round_number] for p in sorted(offers) if round_number in offers[p]]

    def placement(self, *, settled: bool) -> Placement:
        """Decide what we should own, given the roster as it is."""
        view = SwarmView(
            n_experts=self.experts,
            others=self.roster.present(time.monotonic()),
            last_terms=self.last_terms,
        )
        seat = Seat(
            peer_id=self.net.peer_id,
            capacity=self.capacity,
            claims=self.claims,
            moved_at=self.moved_at,
            settled=settled,
        )
        return place(seat, view, time.monotonic())

    def adopt_placement(self, placement: Placement) -> bool:
        """Make a placement ours; True if what we own changed."""
        changed = placement.claims != self.claims
        if placement.reason:
            self.journal.write(
                "placement", reason=placement.reason, experts=list(placement.experts)
            )
        if placement.moved:
            self.moved_at = time.monotonic()
        before = self.owns
        self.claims = placement.claims
        for claim in self.claims:
            known = self.last_terms.get(claim.expert, 0)
            self.last_terms[claim.expert] = max(known, claim.term)
        if changed:
            self.changed.set()
        return before != self.owns

    def fault(self, phase: str) -> None:
        """Die here if the peer's config says so: how the tests kill a peer in a given phase.

        `kill = "merging@3"` in [faults] means: when merging, three rounds after this start.
        """
        wanted, _, rounds = self.config.faults.get("kill", "").partition("@")
        if wanted == phase and len(self.rounds) >= int(rounds or 0):
            self.journal.write("fault", phase=phase, round=self.round.round)
            os.kill(os.getpid(), signal.SIGKILL)

    def bundle_path(self, digest: str) -> Path:
        """Where the bundle named `digest` lies, if we have it."""
        return self.store.bundles / f"{digest}.safetensors"
