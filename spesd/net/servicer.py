"""What this node answers to others' calls: limits first, then the daemon's `Service`.

Nothing that a stranger sends can raise out of here: a violation is counted against its sender and
the message dropped.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import AsyncIterator, Protocol  # noqa: UP035 - hivemind knows typing's only

from hivemind.p2p import P2PContext, ServicerBase

from spesd.digest import CHUNK_BYTES, chunk_digests
from spesd.errors import ProtocolViolation
from spesd.net.codec import MAX_ENVELOPES, MAX_MESSAGE_BYTES, open_envelope
from spesd.net.pb.spesd.v1 import exchange_pb2 as pb
from spesd.swarm.records import Offer, PeerRecord

MAX_STREAMS = 8  # bundles being sent at once
MAX_CHUNKS = 1024  # asked for in one stream
DIGESTS_A_MESSAGE = 8192
LISTS_KEPT = 256  # chunk lists in memory
MAX_VIOLATORS = 10_000


class Service(Protocol):
    """What the daemon provides; called on the loop, so it answers quickly."""

    def run_config(self) -> bytes | None:
        """The canonical config of the run served here."""

    def known_records(self) -> Sequence[bytes]:
        """Signed records of the peers that are not gone, our own among them."""

    def on_envelope(self, record: PeerRecord | Offer, raw: bytes, sender: str) -> None:
        """A verified record that somebody pushed."""

    def offers(self, round_number: int) -> Sequence[bytes]:
        """The signed offers known for a round."""

    async def state(self) -> bytes | str:
        """A signed state manifest, or why there is none now."""

    def bundle_path(self, digest: str) -> Path | None:
        """Where the bytes named `digest` lie, if they are here."""


class PeerServicer(ServicerBase):
    """The RPCs of proto/spesd/v1/exchange.proto."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._streams = 0
        self._lists: dict[str, list[bytes]] = {}
        self.violations: Counter[str] = Counter()
        self.bytes_up = 0

    async def rpc_run(self, request: pb.RunRequest, context: P2PContext) -> pb.RunReply:
        """Give the config of our run."""
        return pb.RunReply(config=self._service.run_config() or b"")

    async def rpc_hello(self, request: pb.HelloRequest, context: P2PContext) -> pb.HelloReply:
        """Tell the time, and whom we know."""
        return pb.HelloReply(time=time.time(), records=_fitting(self._service.known_records()))

    async def rpc_announce(self, request: pb.Announcement, context: P2PContext) -> pb.Ack:
        """Take in pushed records and offers."""
        sender = str(context.remote_id)
        for raw in request.envelopes[:MAX_ENVELOPES]:
            try:
                record = open_envelope(raw)
                if not isinstance(record, PeerRecord | Offer):
                    raise ProtocolViolation("only records and offers are announced")
            except ProtocolViolation:
                if len(self.violations) < MAX_VIOLATORS:
                    self.violations[sender] += 1
                continue
            self._service.on_envelope(record, raw, sender)
        return pb.Ack()

    async def rpc_offers(self, request: pb.OffersRequest, context: P2PContext) -> pb.OffersReply:
        """Give the offers that we know for a round."""
        return pb.OffersReply(envelopes=_fitting(self._service.offers(request.round)))

    async def rpc_state(self, request: pb.StateRequest, context: P2PContext) -> pb.StateReply:
        """Give a state manifest, or the reason why not."""
        answer = await self._service.state()
        if isinstance(answer, str):
            return pb.StateReply(reason=answer)
        return pb.StateReply(envelope=answer)

    async def rpc_fetch(
        self, request: pb.FetchRequest, context: P2PContext
    ) -> AsyncIterator[pb.FetchReply]:
        """Send a bundle's chunk list (chunks = 0), or some of its chunks."""
        path = self._service.bundle_path(request.digest.hex())
        if path is None:
            yield pb.FetchReply(refusal="unknown")
            return
        if self._streams >= MAX_STREAMS:
            yield pb.FetchReply(refusal="busy")
            return
        self._streams += 1
        try:
            if request.chunks == 0:
                for piece in await self._chunk_list(request.digest.hex(), path):
                    yield pb.FetchReply(chunk_digests=piece)
                return
            with path.open("rb") as file:
                file.seek(request.first_chunk * CHUNK_BYTES)
                for _ in range(min(request.chunks, MAX_CHUNKS)):
                    chunk = await asyncio.to_thread(file.read, CHUNK_BYTES)
                    if not chunk:
                        return
                    self.bytes_up += len(chunk)
                    yield pb.FetchReply(chunk=chunk)
        except OSError:
            yield pb.FetchReply(refusal="unknown")  # pruned while it was read
        finally:
            self._streams -= 1

    async def _chunk_list(self, digest: str, path: Path) -> list[bytes]:
        if digest not in self._lists:
            while len(self._lists) >= LISTS_KEPT:
                del self._lists[next(iter(self._lists))]
            self._lists[digest] = await asyncio.to_thread(chunk_digests, path)
        chunks = self._lists[digest]
        return [
            b"".join(chunks[at : at + DIGESTS_A_MESSAGE])
            for at in range(0, max(len(chunks), 1), DIGESTS_A_MESSAGE)
        ]


def _fitting(envelopes: Iterable[bytes]) -> list[bytes]:
    """Return as many envelopes as one message may hold."""
    chosen, room = [], MAX_MESSAGE_BYTES
    for raw in list(envelopes)[:MAX_ENVELOPES]:
        room -= len(raw)
        if room < 0:
            break
        chosen.append(raw)
    return chosen
