"""Bundles come whole from whoever has them, whatever the others do."""

import asyncio
import errno
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.nodes import RUN, Start, bundle, stream_instead

from spesd.digest import CHUNK_BYTES, chunk_digests
from spesd.errors import ProtocolViolation, Unavailable
from spesd.net import fetch as fetch_module
from spesd.net import uploads
from spesd.net.node import Net
from spesd.net.pb.spesd.v1 import exchange_pb2 as pb
from spesd.swarm.records import MAX_BUNDLE_BYTES

Handler = Callable[[Any, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def until(test: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not test():
            await asyncio.sleep(0.01)


async def test_a_bundle_comes_whole_past_liars_and_strangers(start: Start, tmp_path: Path) -> None:
    a, good = await start("a")
    b, liar = await start("b", a)
    c, _ = await start("c", a)
    d, _ = await start("d", a, b, c)
    path, digest = bundle(tmp_path, 5 * CHUNK_BYTES + 777)
    other = tmp_path / "other"
    other.write_bytes(path.read_bytes()[:-1] + b"!")
    good.bundles[digest], liar.bundles[digest] = path, other
    into, size = tmp_path / "in" / "x", path.stat().st_size
    seen: list[tuple[int, int]] = []
    got = await d.fetch(
        digest, size, [c.peer_id, b.peer_id, a.peer_id], into, lambda *p: seen.append(p)
    )
    assert got == into
    assert into.read_bytes() == path.read_bytes()
    assert d.bytes_from == {a.peer_id: size}
    assert (d.bytes_down, a.bytes_up) == (size, size)
    assert d.violations == {b.peer_id: 1}
    assert seen[-1] == (size, size)
    assert sorted(seen) == seen
    assert list(into.parent.iterdir()) == [into]
    with pytest.raises(Unavailable, match="what the name says"):
        await d.fetch(digest, size, [b.peer_id], tmp_path / "y")
    with pytest.raises(Unavailable, match="chunk list"):
        await d.fetch(digest, size + 5, [a.peer_id], tmp_path / "y")
    with pytest.raises(Unavailable, match="no source"):
        await d.fetch(digest, size, [d.peer_id], tmp_path / "y")
    with pytest.raises(ProtocolViolation):
        await d.fetch(digest, MAX_BUNDLE_BYTES + 1, [a.peer_id], tmp_path / "y")


async def test_a_source_with_a_right_list_and_a_wrong_chunk_is_left(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "STREAMS", 1)
    a, good = await start("a")
    b, liar = await start("b", a)
    c, _ = await start("c", a, b)
    path, digest = bundle(tmp_path, 3 * CHUNK_BYTES)
    wrong = tmp_path / "wrong"
    wrong.write_bytes(path.read_bytes()[:-1] + b"!")
    good.bundles[digest], liar.bundles[digest] = path, wrong
    b._uploads._lists[digest] = chunk_digests(path)
    into = tmp_path / "in"
    await c.fetch(digest, 3 * CHUNK_BYTES, [b.peer_id, a.peer_id], into)
    assert into.read_bytes() == path.read_bytes()
    # what was right of the liar's is kept
    assert c.bytes_from == {b.peer_id: 2 * CHUNK_BYTES, a.peer_id: CHUNK_BYTES}


async def test_a_cut_transfer_resumes_where_it_was(start: Start, tmp_path: Path) -> None:
    a, daemon = await start("a")
    b, _ = await start("b", a)
    path, digest = bundle(tmp_path, 8 * CHUNK_BYTES)
    daemon.bundles[digest] = path
    raw = path.read_bytes()
    kept = raw[: 3 * CHUNK_BYTES] + b"\0" * CHUNK_BYTES + raw[4 * CHUNK_BYTES : 6 * CHUNK_BYTES]
    (tmp_path / ".in.part").write_bytes(kept)
    await b.fetch(digest, len(raw), [a.peer_id], tmp_path / "in")
    assert (tmp_path / "in").read_bytes() == raw
    assert b.bytes_down == 3 * CHUNK_BYTES


async def test_a_source_that_dies_midway_leaves_what_it_sent(start: Start, tmp_path: Path) -> None:
    a, good = await start("a")
    b, dying = await start("b", a)
    c, _ = await start("c", a, b)
    path, digest = bundle(tmp_path, 40 * CHUNK_BYTES)
    good.bundles[digest] = dying.bundles[digest] = path

    def kill_midway(done: int, size: int) -> None:
        if done > size / 4 and b.p2pd_pid not in killed:
            killed.append(b.p2pd_pid)
            os.kill(b.p2pd_pid, signal.SIGKILL)

    killed: list[int] = []
    await c.fetch(digest, 40 * CHUNK_BYTES, [b.peer_id, a.peer_id], tmp_path / "in", kill_midway)
    assert (tmp_path / "in").read_bytes() == path.read_bytes()
    assert c.bytes_from[b.peer_id] >= 10 * CHUNK_BYTES
    assert c.bytes_down == 40 * CHUNK_BYTES


async def test_a_source_that_breaks_off_again_and_again_is_asked_until_all_is_there(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "STREAMS", 1)
    a, daemon = await start("a")
    b, _ = await start("b", a)
    path, digest = bundle(tmp_path, 5 * CHUNK_BYTES)
    daemon.bundles[digest] = path
    sent: list[int] = []

    def breaking(path: Path, index: int) -> bytes:
        sent.append(index)
        if len(sent) % 3 == 0:
            raise PermissionError
        return path.read_bytes()[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]

    monkeypatch.setattr(uploads, "_read_chunk", breaking)
    await b.fetch(digest, 5 * CHUNK_BYTES, [a.peer_id], tmp_path / "in")
    assert (tmp_path / "in").read_bytes() == path.read_bytes()
    assert b.bytes_down == 5 * CHUNK_BYTES
    # but one that gives nothing is not asked for ever
    monkeypatch.setattr(uploads, "_read_chunk", lambda path, index: sent[-1:0])
    with pytest.raises(Unavailable, match="fewer chunks"):
        await b.fetch(digest, 5 * CHUNK_BYTES, [a.peer_id], tmp_path / "other")


async def silent(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def endless(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\xff" * 2**20)  # a message of 4 GB
    await reader.read()
    writer.close()


async def garbled(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x00\x00\x00\x03\xff\xff\xff")
    await reader.read()
    writer.close()


@pytest.mark.parametrize("handler", [silent, endless, garbled], ids=lambda h: h.__name__)
async def test_a_source_that_answers_otherwise_is_left_for_the_next(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: Handler
) -> None:
    monkeypatch.setattr(fetch_module, "IDLE_S", 0.5)
    a, good = await start("a")
    b, _ = await start("b", a)
    c, _ = await start("c", a, b)
    stream_instead(b, uploads.PROTOCOL, handler)
    path, digest = bundle(tmp_path, CHUNK_BYTES)
    good.bundles[digest] = path
    await c.fetch(digest, CHUNK_BYTES, [b.peer_id, a.peer_id], tmp_path / "in")
    assert (tmp_path / "in").read_bytes() == path.read_bytes()


async def test_a_frozen_source_is_left_for_the_next(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "IDLE_S", 1.0)
    a, good = await start("a")
    b, frozen = await start("b", a)
    c, _ = await start("c", a, b)
    path, digest = bundle(tmp_path, CHUNK_BYTES)
    good.bundles[digest] = frozen.bundles[digest] = path
    await c.hello(b.peer_id, RUN.run_id)
    os.kill(b.p2pd_pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(5.0):
            await c.fetch(digest, CHUNK_BYTES, [b.peer_id, a.peer_id], tmp_path / "in")
    finally:
        os.kill(b.p2pd_pid, signal.SIGCONT)


async def test_a_busy_source_is_asked_again_and_then_left(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "BUSY_PAUSE_S", 0.05)
    a, daemon = await start("a")
    b, _ = await start("b", a)
    path, digest = bundle(tmp_path, 4 * CHUNK_BYTES)
    daemon.bundles[digest] = path
    a._uploads._streams["others"] = uploads.MAX_STREAMS
    async with asyncio.TaskGroup() as group:
        fetching = group.create_task(b.fetch(digest, 4 * CHUNK_BYTES, [a.peer_id], tmp_path / "x"))
        await asyncio.sleep(0.2)
        assert not fetching.done()
        del a._uploads._streams["others"]
    assert (tmp_path / "x").read_bytes() == path.read_bytes()
    monkeypatch.setattr(fetch_module, "BUSY_RETRIES", 3)
    a._uploads._streams["others"] = uploads.MAX_STREAMS
    with pytest.raises(Unavailable, match="stayed busy"):
        await b.fetch(digest, 4 * CHUNK_BYTES, [a.peer_id], tmp_path / "y")
    # one stream is left for us: the bundle comes over that one
    a._uploads._streams["others"] = uploads.MAX_STREAMS - 1
    monkeypatch.setattr(fetch_module, "CHUNKS_A_STREAM", 1)
    await b.fetch(digest, 4 * CHUNK_BYTES, [a.peer_id], tmp_path / "z")
    assert (tmp_path / "z").read_bytes() == path.read_bytes()


async def take_nothing(net: Net, source: Net, digest: str) -> Any:
    """Ask for chunks, and read none of them."""
    request = pb.FetchRequest(digest=bytes.fromhex(digest), chunks=64)
    return await net._calls.open_fetch(source.peer_id, request)


async def test_readers_that_stall_do_not_keep_the_others_out(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "STALL_S", 0.5)
    a, daemon = await start("a")
    b, _ = await start("b", a)
    path, digest = bundle(tmp_path, 64 * CHUNK_BYTES)
    daemon.bundles[digest] = path
    held = [await take_nothing(b, a, digest) for _ in range(uploads.MAX_STREAMS)]
    await until(lambda: a._uploads.streams == uploads.MAX_STREAMS_A_PEER)
    await until(lambda: a._uploads.streams == 0)
    for stream in held:
        stream.close()
    # nor does one who asks for nothing at all
    _, _, writer = await b._p2pd.p2p.call_binary_stream_handler(
        a._p2pd.p2p.peer_id, uploads.PROTOCOL
    )
    await until(lambda: len(a._uploads._open) == 1)
    await until(lambda: len(a._uploads._open) == 0)
    writer.close()


async def test_a_request_that_is_nonsense_is_counted_and_dropped(start: Start) -> None:
    a, _ = await start("a")
    b, _ = await start("b", a)
    for raw in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x02\xff\xff"):
        _, reader, writer = await b._p2pd.p2p.call_binary_stream_handler(
            a._p2pd.p2p.peer_id, uploads.PROTOCOL
        )
        writer.write(raw)
        async with asyncio.timeout(5.0):
            assert await reader.read() == b""
        writer.close()
    assert a.violations == {b.peer_id: 2}


async def test_a_full_disk_is_unavailable(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, daemon = await start("a")
    b, _ = await start("b", a)
    path, digest = bundle(tmp_path, 4 * CHUNK_BYTES)
    daemon.bundles[digest] = path

    def full(self: object, index: int, chunk: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetch_module.Download, "_write", full)
    with pytest.raises(Unavailable, match="No space left"):
        await b.fetch(digest, 4 * CHUNK_BYTES, [a.peer_id], tmp_path / "in")


async def test_a_bundle_wanted_often_at_once_is_fetched_once(start: Start, tmp_path: Path) -> None:
    a, daemon = await start("a")
    b, _ = await start("b", a)
    path, digest = bundle(tmp_path, 4 * CHUNK_BYTES)
    daemon.bundles[digest] = path
    into = tmp_path / "in"
    async with asyncio.TaskGroup() as group:
        for _ in range(5):
            group.create_task(b.fetch(digest, 4 * CHUNK_BYTES, [a.peer_id], into))
    assert b.bytes_down == 4 * CHUNK_BYTES
    assert b._fetcher._locks == {}


async def test_an_empty_bundle_is_one_too(start: Start, tmp_path: Path) -> None:
    a, daemon = await start("a")
    b, _ = await start("b", a)
    path, digest = bundle(tmp_path, 0)
    daemon.bundles[digest] = path
    await b.fetch(digest, 0, [a.peer_id], tmp_path / "in")
    assert (tmp_path / "in").read_bytes() == b""
