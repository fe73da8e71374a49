"""Fetching a bundle by its name: in verified chunks, from several sources, with resume.

A source that makes no progress for IDLE_S, is busy too often, or sends a byte that is not what the
name says is dropped for the next one. The file appears under its final name only when it is whole.
Never trusts a size or a list that does not hash to the name.
"""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from spesd.digest import CHUNK_BYTES, chunk_count, digest_of
from spesd.errors import ProtocolViolation, Unavailable
from spesd.net.pb.spesd.v1 import exchange_pb2 as pb

IDLE_S = 5.0
CHUNKS_A_STREAM = 64  # 16 MiB: a broken stream costs little
STREAMS = 3  # at once: one stream is bound by its window on a long link
BUSY_RETRIES = 20
BUSY_PAUSE_S = 0.25

Open = Callable[[str, pb.FetchRequest], Any]  # (peer id, request) -> awaitable of a stream


class SourceFailed(Exception):
    """This source cannot give the rest; the reason is the message."""


class Download:
    """One bundle on its way."""

    def __init__(self, digest: str, size: int, into: Path, open_stream: Open) -> None:
        self.digest, self.size, self.into = digest, size, into
        self._open = open_stream
        self._part = into.with_name(f".{into.name}.part")
        self._chunks: list[bytes] = []
        self._missing: list[int] = []
        self.bytes_down = 0

    async def run(self, sources: Sequence[str]) -> Path:
        """Fetch from `sources` in turn; Unavailable, with each one's reason, if none can."""
        if self.into.exists():
            return self.into
        reasons = []
        for source in dict.fromkeys(sources):
            try:
                if not self._chunks:
                    await self._list(source)
                    self._resume()
                await self._chunks_from(source)
                return await asyncio.to_thread(self._finish)
            except SourceFailed as error:
                reasons.append(f"{source[-8:]}: {error}")
            except OSError as error:
                raise Unavailable(f"cannot write {self.into}: {error.strerror}") from None
        raise Unavailable("; ".join(reasons) or "no source is known")

    async def _list(self, source: str) -> None:
        expected = chunk_count(self.size)
        raw = bytearray()
        request = pb.FetchRequest(digest=bytes.fromhex(self.digest))
        async for reply in self._stream(source, request):
            raw += reply.chunk_digests
            if len(raw) > 32 * expected:
                raise SourceFailed("its chunk list is too long")
        chunks = [bytes(raw[at : at + 32]) for at in range(0, len(raw), 32)]
        if len(chunks) != expected or digest_of(self.size, chunks) != self.digest:
            raise SourceFailed("its chunk list is not what the name says")
        self._chunks = chunks

    def _resume(self) -> None:
        """Keep the chunks of an earlier attempt that are what the list says."""
        self._missing = list(range(len(self._chunks)))
        self.into.parent.mkdir(parents=True, exist_ok=True)
        if self._part.exists() and self._part.stat().st_size <= self.size:
            with self._part.open("rb") as file:
                kept = [
                    hashlib.sha256(c).digest() for c in iter(lambda: file.read(CHUNK_BYTES), b"")
                ]
            self._missing = [
                i for i, d in enumerate(self._chunks) if i >= len(kept) or kept[i] != d
            ]
        else:
            self._part.write_bytes(b"")

    async def _chunks_from(self, source: str) -> None:
        spans = _spans(self._missing, CHUNKS_A_STREAM)
        queue = list(reversed(spans))

        async def lane() -> None:
            while queue:
                first, count = queue.pop()
                await self._span(source, first, count)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(STREAMS, len(spans))):
                    group.create_task(lane())
        except* SourceFailed as failed:
            raise SourceFailed(str(failed.exceptions[0])) from None
        if self._missing:
            raise SourceFailed("it sent fewer chunks than it has")

    async def _span(self, source: str, first: int, count: int) -> None:
        request = pb.FetchRequest(
            digest=bytes.fromhex(self.digest), first_chunk=first, chunks=count
        )
        index = first
        async for reply in self._stream(source, request):
            if index >= first + count:
                raise SourceFailed("it sent more than was asked for")
            if hashlib.sha256(reply.chunk).digest() != self._chunks[index]:
                raise SourceFailed(f"chunk {index} is not what the name says")
            await asyncio.to_thread(self._write, index, reply.chunk)
            self.bytes_down += len(reply.chunk)
            self._missing.remove(index)
            index += 1

    def _write(self, index: int, chunk: bytes) -> None:
        with self._part.open("r+b") as file:
            file.seek(index * CHUNK_BYTES)
            file.write(chunk)

    def _finish(self) -> Path:
        with self._part.open("r+b") as file:
            os.fsync(file.fileno())
        self._part.replace(self.into)
        return self.into

    async def _stream(self, source: str, request: pb.FetchRequest) -> AsyncIterator[Any]:
        """Yield a source's replies; SourceFailed on silence, refusal or a lost connection."""
        for attempt in range(BUSY_RETRIES):
            stream = None
            try:
                stream = await asyncio.wait_for(self._open(source, request), IDLE_S)
                busy = False
                while True:
                    try:
                        reply = await asyncio.wait_for(anext(stream), IDLE_S)
                    except StopAsyncIteration:
                        return
                    if reply.refusal == "busy":
                        busy = True
                        break
                    if reply.refusal:
                        raise SourceFailed("it does not have this bundle")
                    yield reply
            except TimeoutError:
                raise SourceFailed(f"no progress for {IDLE_S:.0f} s") from None
            except (Unavailable, ProtocolViolation) as error:
                raise SourceFailed(str(error)) from None
            finally:
                if stream is not None:
                    await stream.aclose()
            if not busy:
                return
            await asyncio.sleep(BUSY_PAUSE_S * (1 + attempt % 4))
        raise SourceFailed("it stayed busy")


def _spans(missing: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Group ascending indices into runs of (first, count), none longer than `most`."""
    spans: list[tuple[int, int]] = []
    for index in missing:
        if spans and spans[-1][0] + spans[-1][1] == index and spans[-1][1] < most:
            spans[-1] = (spans[-1][0], spans[-1][1] + 1)
        else:
            spans.append((index, 1))
    return spans
