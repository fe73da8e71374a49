"""Serving bundles: who may take how much at once, and for how long it may keep us waiting.

Nothing that a stranger sends, or does not send, can hold a stream for ever. Never checks that the
bytes on this disk are what their name says: the receiver does.
"""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from spesd.digest import CHUNK_BYTES, chunk_digests
from spesd.errors import ProtocolViolation
from spesd.net.codec import MAX_REQUEST_BYTES
from spesd.net.p2pd import LOST
from spesd.net.pb.spesd.v1 import exchange_pb2 as pb
from spesd.net.servicer import Service, Violations
from spesd.net.streams import read_message, write_message

PROTOCOL = "spesd.fetch.v1"
MAX_STREAMS = 8  # bundles being sent at once
MAX_STREAMS_A_PEER = 6  # so that one peer cannot keep all others out
MAX_WAITING = 64  # streams whose request has not come yet
MAX_CHUNKS = 1024  # asked for in one stream
DIGESTS_A_MESSAGE = 4096
LISTS_KEPT = 256  # chunk lists in memory
STALL_S = 10.0  # a peer that sends no request, or takes no byte, for so long is let go


class Uploads:
    """The serving side of `rpc_fetch`."""

    def __init__(self, service: Service, violations: Violations) -> None:
        self._service, self._violations = service, violations
        self._streams: Counter[str] = Counter()
        self._open: set[asyncio.Task[None]] = set()
        self._lists: dict[str, list[bytes]] = {}
        self.bytes_up = 0

    @property
    def streams(self) -> int:
        """How many bundles are being sent now."""
        return self._streams.total()

    async def handle(
        self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer one stream, then close it."""
        task = asyncio.current_task()
        assert task is not None
        peer = str(info.peer_id)
        if len(self._open) >= MAX_STREAMS + MAX_WAITING:
            writer.close()
            return
        self._open.add(task)
        try:
            async with asyncio.timeout(STALL_S):
                request = await read_message(
                    reader, pb.FetchRequest, MAX_REQUEST_BYTES, lambda: None
                )
            if request is not None:
                await self._answer(peer, request, writer)
        except ProtocolViolation:
            self._violations.count(peer)
        except LOST:
            writer.transport.abort()  # it left or stalled: what is buffered will not be read
        finally:
            writer.close()
            self._open.discard(task)

    async def stop(self) -> None:
        """End all streams."""
        for task in list(self._open):
            task.cancel()
        if self._open:
            await asyncio.wait(list(self._open), timeout=STALL_S)

    async def _answer(
        self, peer: str, request: pb.FetchRequest, writer: asyncio.StreamWriter
    ) -> None:
        digest = request.digest.hex()
        path = self._service.bundle_path(digest) if len(request.digest) == 32 else None
        if path is None:
            await write_message(writer, pb.FetchReply(refusal="unknown"), STALL_S)
            return
        if self.streams >= MAX_STREAMS or self._streams[peer] >= MAX_STREAMS_A_PEER:
            await write_message(writer, pb.FetchReply(refusal="busy"), STALL_S)
            return
        self._streams[peer] += 1
        try:
            if request.chunks == 0:
                await self._send_list(digest, path, writer)
            else:
                await self._send_chunks(request, path, writer)
        except FileNotFoundError:
            # pruned while it was read
            await write_message(writer, pb.FetchReply(refusal="unknown"), STALL_S)
        finally:
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]

    async def _send_chunks(
        self, request: pb.FetchRequest, path: Path, writer: asyncio.StreamWriter
    ) -> None:
        first, count = request.first_chunk, min(request.chunks, MAX_CHUNKS)
        if first >= 2**40:
            raise ProtocolViolation("a request begins at a chunk that no bundle has")
        for index in range(first, first + count):
            chunk = await asyncio.to_thread(_read_chunk, path, index)
            if not chunk:
                return
            await write_message(writer, pb.FetchReply(chunk=chunk), STALL_S)
            self.bytes_up += len(chunk)

    async def _send_list(self, digest: str, path: Path, writer: asyncio.StreamWriter) -> None:
        if digest not in self._lists:
            chunks = await asyncio.to_thread(chunk_digests, path)
            while len(self._lists) >= LISTS_KEPT:
                del self._lists[next(iter(self._lists))]
            self._lists[digest] = chunks
        chunks = self._lists[digest]
        for at in range(0, max(len(chunks), 1), DIGESTS_A_MESSAGE):
            piece = b"".join(chunks[at : at + DIGESTS_A_MESSAGE])
            await write_message(writer, pb.FetchReply(chunk_digests=piece), STALL_S)


def _read_chunk(path: Path, index: int) -> bytes:
    with path.open("rb") as file:
        file.seek(index * CHUNK_BYTES)
        return file.read(CHUNK_BYTES)
