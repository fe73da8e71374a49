"""What this node asks of others, each call with a deadline; and what it learns of their clocks.

A call raises Unavailable (the world) or ProtocolViolation (the other peer's fault, counted), and
nothing else. Never decides whom to ask.
"""

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError
from hivemind.p2p import PeerID

from spesd.errors import ProtocolViolation, Unavailable
from spesd.net.codec import (
    MAX_CHUNK_REPLY_BYTES,
    MAX_CONFIG_BYTES,
    MAX_ENVELOPES,
    Record,
    check_time,
    open_envelope,
    run_id_of,
)
from spesd.net.p2pd import LOST
from spesd.net.pb.spesd.v1 import exchange_pb2 as pb
from spesd.net.servicer import OPENED_AT_ONCE, PeerServicer, Violations, batches
from spesd.net.streams import read_message, write_message
from spesd.net.uploads import PROTOCOL
from spesd.swarm.records import Offer, PeerRecord, StateManifest

CALL_S = 6.0
CLOCK_SAMPLES = 32


class Clock:
    """The swarm's time: the median of the clocks of the peers we greeted and our own.

    Our own counts as one: were it left out, two peers would each take the other's clock and stay
    as far apart as they were.
    """

    def __init__(self) -> None:
        self._offsets: dict[str, float] = {}

    def heard(self, peer_id: str, offset: float) -> None:
        """Note how far a peer's clock is ahead of ours."""
        self._offsets.pop(peer_id, None)
        self._offsets[peer_id] = offset
        while len(self._offsets) > CLOCK_SAMPLES:
            del self._offsets[next(iter(self._offsets))]

    @property
    def offset(self) -> float:
        """Seconds by which the swarm's time is ahead of ours."""
        return statistics.median([0.0, *self._offsets.values()])

    def now(self) -> float:
        """Return the swarm's time."""
        return time.time() + self.offset


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What a peer says when greeted."""

    records: tuple[tuple[PeerRecord, bytes], ...]
    time: float


class ReplyStream:
    """Replies to one request for chunks."""

    def __init__(self, reader: Any, writer: Any) -> None:
        self._reader, self._writer = reader, writer

    async def next(self, moved: Any) -> pb.FetchReply | None:
        """Return the next reply, None at the end; `moved` is called whenever bytes arrive."""
        try:
            return await read_message(self._reader, pb.FetchReply, MAX_CHUNK_REPLY_BYTES, moved)
        except LOST as error:
            raise Unavailable(f"the connection was lost ({type(error).__name__})") from None

    def close(self) -> None:
        """Close the stream at once: nothing more is wanted of it."""
        self._writer.transport.abort()


class Calls:
    """The calling side of every RPC."""

    def __init__(self, p2p: Any, clock: Clock, violations: Violations) -> None:
        self._p2p, self._clock, self._violations = p2p, clock, violations

    async def run(self, peer_id: str, run_id: str) -> bytes | None:
        """Ask a peer for a run's config, which the run id proves; None if it does not know it."""
        with self._blaming(peer_id):
            reply = await self._call(peer_id, "rpc_run", pb.RunRequest(run_id=run_id))
            config = bytes(reply.config)
            if not config:
                return None
            if len(config) > MAX_CONFIG_BYTES or run_id_of(config) != run_id:
                raise ProtocolViolation("a config is not that of its run")
            return config

    async def hello(self, peer_id: str, run_id: str) -> Hello:
        """Greet a peer: whom does it know, and what time has it?"""
        with self._blaming(peer_id):
            began = time.time()
            reply = await self._call(peer_id, "rpc_hello", pb.HelloRequest(run_id=run_id))
            check_time("hello.time", reply.time)
            self._clock.heard(peer_id, reply.time - (began + time.time()) / 2)
            records = [
                (record, raw)
                async for record, raw in _opened(reply.records)
                if isinstance(record, PeerRecord) and record.run_id == run_id
            ]
            return Hello(records=tuple(records), time=reply.time)

    async def announce(self, peer_id: str, envelopes: Sequence[bytes]) -> None:
        """Push signed records or offers to a peer, in as many messages as they need."""
        with self._blaming(peer_id):
            for batch in batches(envelopes):
                await self._call(peer_id, "rpc_announce", pb.Announcement(envelopes=batch))

    async def offers(
        self, peer_id: str, run_id: str, round_number: int
    ) -> list[tuple[Offer, bytes]]:
        """Ask a peer for the offers that it knows for a round."""
        with self._blaming(peer_id):
            request = pb.OffersRequest(run_id=run_id, round=round_number)
            reply = await self._call(peer_id, "rpc_offers", request)
            return [
                (record, raw)
                async for record, raw in _opened(reply.envelopes)
                if isinstance(record, Offer)
                and (record.run_id, record.round) == (run_id, round_number)
            ]

    async def state(self, peer_id: str, run_id: str) -> StateManifest | str:
        """Ask a peer for the manifest of its state, or why it has none to give."""
        with self._blaming(peer_id):
            reply = await self._call(peer_id, "rpc_state", pb.StateRequest(run_id=run_id))
            if not reply.envelope:
                words = "".join(c for c in reply.reason[:256] if c.isprintable())
                return words or "no reason given"
            record = open_envelope(reply.envelope)
            if not isinstance(record, StateManifest) or record.run_id != run_id:
                raise ProtocolViolation("a state is not of this run")
            if record.peer_id != peer_id:
                raise ProtocolViolation("a state is another peer's")
            return record

    async def open_fetch(self, peer_id: str, request: pb.FetchRequest) -> ReplyStream:
        """Ask a peer for chunks of a bundle; the caller bounds the wait."""
        writer = None
        try:
            target = PeerID.from_base58(peer_id)
            _, reader, writer = await self._p2p.call_binary_stream_handler(target, PROTOCOL)
            await write_message(writer, request, CALL_S)
        except LOST as error:
            if writer is not None:
                writer.transport.abort()
            raise Unavailable(f"it does not answer ({type(error).__name__})") from None
        except (ValueError, DecodeError) as error:
            raise ProtocolViolation(f"peer {peer_id[-8:]}: {error}") from None
        return ReplyStream(reader, writer)

    async def _call(self, peer_id: str, name: str, request: Any) -> Any:
        try:
            stub = PeerServicer.get_stub(self._p2p, PeerID.from_base58(peer_id))
            async with asyncio.timeout(CALL_S):
                return await getattr(stub, name)(request)
        except LOST as error:
            raise Unavailable(
                f"peer {peer_id[-8:]} does not answer ({type(error).__name__})"
            ) from None
        except (ValueError, DecodeError) as error:
            raise ProtocolViolation(f"peer {peer_id[-8:]}: {error}") from None

    @contextlib.contextmanager
    def _blaming(self, peer_id: str) -> Iterator[None]:
        try:
            yield
        except ProtocolViolation:
            self._violations.count(peer_id)
            raise


async def _opened(envelopes: Sequence[bytes]) -> AsyncIterator[tuple[Record, bytes]]:
    """Open envelopes, and let others on the loop have their turn meanwhile."""
    for number, raw in enumerate(envelopes[:MAX_ENVELOPES]):
        if number % OPENED_AT_ONCE == OPENED_AT_ONCE - 1:
            await asyncio.sleep(0)
        yield open_envelope(raw), bytes(raw)
