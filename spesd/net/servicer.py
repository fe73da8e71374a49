"""What this node answers to others' calls: limits first, then the daemon's `Service`.

Nothing that a stranger sends can raise out of here: a violation is counted against its sender and
the message dropped. A request about another run than ours gets an empty answer.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from hivemind.p2p import P2PContext, ServicerBase

from spesd.errors import ProtocolViolation
from spesd.net.codec import MAX_ENVELOPES, MAX_MESSAGE_BYTES, open_envelope, run_id_of
from spesd.net.pb.spesd.v1 import exchange_pb2 as pb
from spesd.swarm.records import Offer, PeerRecord

MAX_VIOLATORS = 4096
OPENED_AT_ONCE = 32  # envelopes checked before others on the loop get their turn


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


class Violations:
    """How often each peer broke a rule; the peers counted are bounded."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, peer_id: str) -> None:
        """Count one more against a peer."""
        if peer_id in self._counts or len(self._counts) < MAX_VIOLATORS:
            self._counts[peer_id] += 1

    def by_peer(self) -> dict[str, int]:
        """Return a copy of the counts."""
        return dict(self._counts)


class PeerServicer(ServicerBase):
    """The unary RPCs of proto/spesd/v1/exchange.proto."""

    def __init__(self, service: Service, violations: Violations) -> None:
        self._service, self._violations = service, violations

    async def rpc_run(self, request: pb.RunRequest, context: P2PContext) -> pb.RunReply:
        """Give the config of our run."""
        config = self._service.run_config() if self._is_ours(request.run_id) else None
        return pb.RunReply(config=config or b"")

    async def rpc_hello(self, request: pb.HelloRequest, context: P2PContext) -> pb.HelloReply:
        """Tell the time, and whom we know."""
        records = self._service.known_records() if self._is_ours(request.run_id) else []
        return pb.HelloReply(time=time.time(), records=fitting(records))

    async def rpc_announce(self, request: pb.Announcement, context: P2PContext) -> pb.Ack:
        """Take in pushed records and offers."""
        sender = str(context.remote_id)
        for number, raw in enumerate(request.envelopes[:MAX_ENVELOPES]):
            if number % OPENED_AT_ONCE == OPENED_AT_ONCE - 1:
                await asyncio.sleep(0)
            try:
                record = open_envelope(raw)
                if not isinstance(record, PeerRecord | Offer):
                    raise ProtocolViolation("only records and offers are announced")
            except ProtocolViolation:
                self._violations.count(sender)
                continue
            if self._is_ours(record.run_id):
                self._service.on_envelope(record, raw, sender)
        return pb.Ack()

    async def rpc_offers(self, request: pb.OffersRequest, context: P2PContext) -> pb.OffersReply:
        """Give the offers that we know for a round."""
        offers = self._service.offers(request.round) if self._is_ours(request.run_id) else []
        return pb.OffersReply(envelopes=fitting(offers))

    async def rpc_state(self, request: pb.StateRequest, context: P2PContext) -> pb.StateReply:
        """Give a state manifest, or the reason why not."""
        if not self._is_ours(request.run_id):
            return pb.StateReply(reason="this peer is not in that run")
        answer = await self._service.state()
        if isinstance(answer, str):
            return pb.StateReply(reason=answer)
        return pb.StateReply(envelope=answer)

    def _is_ours(self, run_id: str) -> bool:
        config = self._service.run_config()
        return config is not None and run_id_of(config) == run_id


def batches(envelopes: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Split envelopes into lists that one message may hold."""
    batch: list[bytes] = []
    room = MAX_MESSAGE_BYTES
    for raw in envelopes:
        if batch and (len(raw) > room or len(batch) == MAX_ENVELOPES):
            yield batch
            batch, room = [], MAX_MESSAGE_BYTES
        batch.append(raw)
        room -= len(raw)
    if batch:
        yield batch


def fitting(envelopes: Iterable[bytes]) -> list[bytes]:
    """Return as many envelopes as one message may hold."""
    return next(batches(envelopes), [])
