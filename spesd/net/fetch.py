"""Fetching a bundle by its name: in verified chunks, from several sources, with resume.

A source that makes no progress for IDLE_S, stays busy, or sends a byte that is not what the name
says is dropped for the next one. The file appears under its final name only when it is whole.
Never trusts a size or a list that does not hash to the name.
"""

import asyncio
import contextlib
import hashlib
import os
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from spesd.digest import CHUNK_BYTES, chunk_count, digest_of
from spesd.errors import ProtocolViolation, Unavailable
from spesd.net.calls import ReplyStream
from spesd.net.pb.spesd.v1 import exchange_pb2 as pb
from spesd.net.servicer import Violations
from spesd.swarm.records import MAX_BUNDLE_BYTES

IDLE_S = 5.0
CHUNKS_A_STREAM = 64  # 16 MiB: a broken stream costs little
STREAMS = 4  # at once: one stream is bound by its window on a long link
BUSY_RETRIES = 20
BUSY_PAUSE_S = 0.5
MAX_SOURCES_COUNTED = 4096

Open = Callable[[str, pb.FetchRequest], Awaitable[ReplyStream]]
Progress = Callable[[int, int], None]  # (bytes here, bytes in all)


class SourceFailed(Exception):
    """This source cannot give the rest; the reason is the message."""


class Lied(SourceFailed):
    """This source sent what the name does not say: it is not asked again."""


class Busy(Exception):
    """This source serves as many as it can; it may be asked again."""


class Fetcher:
    """All downloads of a node: one at a time for each bundle, and what came from whom."""

    def __init__(self, open_stream: Open, violations: Violations) -> None:
        self.open, self.violations = open_stream, violations
        self._locks: dict[str, tuple[asyncio.Lock, list[None]]] = {}
        self.bytes_from: Counter[str] = Counter()

    async def fetch(
        self, digest: str, size: int, sources: Sequence[str], into: Path, progress: Progress | None
    ) -> Path:
        """Fetch a bundle into a file, or wait for whoever is fetching it already."""
        if not 0 <= size <= MAX_BUNDLE_BYTES:
            raise ProtocolViolation(f"a bundle of {size} bytes is refused")
        async with self._alone(digest):
            return await Download(digest, size, into, self).run(sources, progress)

    def count(self, source: str, size: int) -> None:
        """Account for bytes that came from a source."""
        if source not in self.bytes_from and len(self.bytes_from) >= MAX_SOURCES_COUNTED:
            source = "others"
        self.bytes_from[source] += size

    @contextlib.asynccontextmanager
    async def _alone(self, digest: str) -> AsyncIterator[None]:
        lock, users = self._locks.setdefault(digest, (asyncio.Lock(), []))
        users.append(None)
        try:
            async with lock:
                yield
        finally:
            users.pop()
            if not users:  # nobody waits for this lock: the next one may start afresh
                del self._locks[digest]


class Download:
    """One bundle on its way."""

    def __init__(self, digest: str, size: int, into: Path, fetcher: Fetcher) -> None:
        self.digest, self.size, self.into = digest, size, into
        self._fetcher = fetcher
        self._part = into.with_name(f".{into.name}.part")
        self._chunks: list[bytes] | None = None
        self._missing: set[int] = set()
        self._verified = 0  # chunks that came and were right
        self._moved_at = 0.0
        self._lanes = 0

    async def run(self, sources: Sequence[str], progress: Progress | None) -> Path:
        """Fetch from `sources` in turn; Unavailable, with each one's reason, if none can.

        A source that failed after it gave some chunks is asked again when all have been asked: on a
        crowded link it may be the only one, and slow. Each time round brings a chunk, so this ends.
        """
        self._progress = progress or (lambda done, size: None)
        reasons: dict[str, str] = {}
        asked = list(dict.fromkeys(sources))
        try:
            if await asyncio.to_thread(self._is_here):
                return self.into
            while asked:
                again = []
                for source in asked:
                    before = self._verified
                    try:
                        return await self._from(source)
                    except SourceFailed as error:
                        reasons[source] = str(error)
                        if self._verified > before and not isinstance(error, Lied):
                            again.append(source)
                asked = again
        except OSError as error:
            raise Unavailable(f"cannot write {self.into}: {error.strerror}.") from None
        told = "; ".join(f"{source[-8:]}: {reason}" for source, reason in reasons.items())
        raise Unavailable(told or "no source is known")

    async def _from(self, source: str) -> Path:
        if self._chunks is None:
            await self._watched([self._list(source)])
            self._missing = await asyncio.to_thread(self._resume)
        await self._chunks_from(source)
        return await asyncio.to_thread(self._finish)

    def _is_here(self) -> bool:
        return self.into.exists() and self.into.stat().st_size == self.size

    # --- the list and what is here already ----------------------------------------------------

    async def _list(self, source: str) -> None:
        expected = chunk_count(self.size)
        raw = bytearray()
        try:
            async with contextlib.aclosing(self._replies(source, first=0, count=0)) as replies:
                async for reply in replies:
                    raw += reply.chunk_digests
                    if len(raw) > 32 * expected:
                        raise self._lie(source, "its chunk list is too long")
        except Busy:
            raise SourceFailed("it stayed busy") from None
        chunks = [bytes(raw[at : at + 32]) for at in range(0, len(raw), 32)]
        if len(chunks) != expected or digest_of(self.size, chunks) != self.digest:
            raise self._lie(source, "its chunk list is not what the name says")
        self._chunks = chunks

    def _resume(self) -> set[int]:
        """Keep what an earlier attempt left that fits the list; return the chunks still missing."""
        assert self._chunks is not None
        self.into.parent.mkdir(parents=True, exist_ok=True)
        missing = set(range(len(self._chunks)))
        if not self._part.exists() or self._part.stat().st_size > self.size:
            self._part.write_bytes(b"")
            return missing
        with self._part.open("rb") as file:
            for index, expected in enumerate(self._chunks):
                if hashlib.sha256(file.read(CHUNK_BYTES)).digest() == expected:
                    missing.discard(index)
        return missing

    # --- chunks -------------------------------------------------------------------------------

    async def _chunks_from(self, source: str) -> None:
        share = -(-len(self._missing) // STREAMS)  # a small bundle, too, comes over every stream
        most = max(1, min(share, CHUNKS_A_STREAM))
        spans = list(reversed(_spans(sorted(self._missing), most)))
        await self._watched([self._lane(source, spans) for _ in range(min(STREAMS, len(spans)))])
        if self._missing:
            raise SourceFailed("it sent fewer chunks than it has")

    async def _lane(self, source: str, spans: list[tuple[int, int]]) -> None:
        self._lanes += 1
        try:
            while spans:
                span = spans.pop()
                try:
                    await self._span(source, *span)
                except Busy:
                    spans.append(span)
                    if self._lanes > 1:
                        return  # the other lanes have streams: fewer of them is what is asked for
                    raise SourceFailed("it stayed busy") from None
        finally:
            self._lanes -= 1

    async def _span(self, source: str, first: int, count: int) -> None:
        assert self._chunks is not None
        index = first
        async with contextlib.aclosing(self._replies(source, first, count)) as replies:
            async for reply in replies:
                if index >= first + count:
                    raise self._lie(source, "it sent more than was asked for")
                if hashlib.sha256(reply.chunk).digest() != self._chunks[index]:
                    raise self._lie(source, f"chunk {index} is not what the name says")
                await asyncio.to_thread(self._write, index, reply.chunk)
                self._moved()  # a slow disk is not the source's fault
                self._fetcher.count(source, len(reply.chunk))
                self._missing.discard(index)
                self._verified += 1
                index += 1
                here = self.size - CHUNK_BYTES * len(self._missing)
                self._progress(max(here, 0), self.size)

    def _lie(self, source: str, what: str) -> Lied:
        self._fetcher.violations.count(source)
        return Lied(what)

    def _write(self, index: int, chunk: bytes) -> None:
        # opened each time: after a cancellation this thread may outlive the download
        with self._part.open("r+b") as file:
            file.seek(index * CHUNK_BYTES)
            file.write(chunk)

    def _finish(self) -> Path:
        with self._part.open("r+b") as file:
            os.fsync(file.fileno())
        self._part.replace(self.into)
        folder = os.open(self.into.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return self.into

    # --- streams ------------------------------------------------------------------------------

    async def _replies(self, source: str, first: int, count: int) -> AsyncGenerator[Any, None]:
        """Yield a source's replies; SourceFailed if it refuses or is lost, Busy if it stays so."""
        request = pb.FetchRequest(
            digest=bytes.fromhex(self.digest), first_chunk=first, chunks=count
        )
        for attempt in range(BUSY_RETRIES):
            try:
                stream = await self._fetcher.open(source, request)
                try:
                    while (reply := await stream.next(self._moved)) is not None:
                        if reply.refusal == "busy":
                            break
                        if reply.refusal:
                            raise SourceFailed("it does not have this bundle")
                        yield reply
                    else:
                        return
                finally:
                    stream.close()
            except (Unavailable, ProtocolViolation) as error:
                raise SourceFailed(str(error)) from None
            if self._lanes > 1:
                break
            self._moved()
            await asyncio.sleep(BUSY_PAUSE_S * (1 + attempt % 4) * random.uniform(0.5, 1.0))
        raise Busy

    def _moved(self) -> None:
        self._moved_at = asyncio.get_running_loop().time()

    async def _watched(self, jobs: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Run jobs side by side until all are done, one fails, or nothing moves for IDLE_S.

        Progress is the source's as a whole: on a slow link each of several streams may well wait
        longer for its next chunk than a silent source deserves.
        """
        self._moved()
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch())
                running = [group.create_task(job) for job in jobs]
                if running:
                    await asyncio.wait(running)
                watch.cancel()
        except BaseExceptionGroup as failures:
            expected, others = failures.split((SourceFailed, OSError))
            if others is not None or expected is None:
                raise
            raise expected.exceptions[0] from None

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while (left := self._moved_at + IDLE_S - loop.time()) > 0:
            await asyncio.sleep(left)
        raise SourceFailed(f"no progress for {IDLE_S:.0f} s")


def _spans(missing: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Group ascending indices into runs of (first, count), none longer than `most`."""
    spans: list[tuple[int, int]] = []
    for index in missing:
        if spans and spans[-1][0] + spans[-1][1] == index and spans[-1][1] < most:
            spans[-1] = (spans[-1][0], spans[-1][1] + 1)
        else:
            spans.append((index, 1))
    return spans
