"""What this peer answers to others: its run, whom it knows, offers, states and bundles."""

import time
from collections.abc import Sequence
from pathlib import Path

from spesd.daemon.peer import Peer
from spesd.swarm.events import OfferSeen
from spesd.swarm.records import Offer, PeerRecord


class PeerService:
    """The daemon's side of the RPCs; `net` has verified everything that comes in."""

    def __init__(self) -> None:
        self.peer: Peer | None = None  # until the run is known there is nothing to say
        self.served: dict[str, float] = {}  # digest -> when it was last asked for
        self.assets: dict[str, Path] = {}  # other files by digest: the tokenizer

    def run_config(self) -> bytes | None:
        """The run's config, from which a joiner learns everything."""
        return self.peer.run.canonical() if self.peer else None

    def known_records(self) -> Sequence[bytes]:
        """Signed records of the peers that are not gone, and our own."""
        if self.peer is None:
            return []
        here = {r.peer_id for r in self.peer.roster.present(time.monotonic())}
        here.add(self.peer.net.peer_id)
        return [raw for p, raw in sorted(self.peer.raw_records.items()) if p in here]

    def on_envelope(self, record: object, raw: bytes, sender: str) -> None:
        """Take in what somebody pushed: a heartbeat or an offer."""
        peer = self.peer
        if peer is None:
            return
        if isinstance(record, PeerRecord):
            known = peer.roster.record(record.peer_id)
            news = peer.see(record, raw)
            moved = known is None or (record.round, record.done) != (known.round, known.done)
            if news and moved:
                peer.changed.set()
        elif isinstance(record, Offer) and peer.keep_offer(record, raw):
            peer.post(OfferSeen(round=record.round, offer=record))

    def offers(self, round_number: int) -> Sequence[bytes]:
        """The signed offers that we know for a round."""
        if self.peer is None:
            return []
        return self.peer.offers(round_number)

    async def state(self) -> bytes | str:
        """A signed manifest of our last checkpoint, or why there is none to give."""
        peer = self.peer
        if peer is None or peer.checkpoint is None:
            return "this peer holds no state yet"
        if peer.checkpoint.round < peer.round.round - 1:
            peer.state_wanted = True
            return f"a newer state will be there after round {peer.round.round}"
        return peer.net.sign(peer.checkpoint.to_state())

    def bundle_path(self, digest: str) -> Path | None:
        """Where the bytes named `digest` lie, if we have them."""
        if self.peer is None:
            return None
        path = self.assets.get(digest) or self.peer.bundle_path(digest)
        if not path.is_file():
            return None
        self.served[digest] = time.monotonic()
        return path
