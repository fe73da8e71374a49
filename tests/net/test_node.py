"""Nodes over the real DHT and real sockets on loopback."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.swarm import wait_for

from spesd.config import RunConfig
from spesd.digest import CHUNK_BYTES, file_digest
from spesd.errors import Unavailable, UsageError
from spesd.net import fetch as fetch_module
from spesd.net.node import Net, NetConfig
from spesd.swarm.records import Offer, PartOffer, PeerRecord, PeerState, StateManifest, StatePart

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
RUN = RunConfig(name="net-test")


class FakeDaemon:
    """The daemon's side of a node, with nothing behind it."""

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.held: dict[int, list[bytes]] = {}
        self.received: list[object] = []
        self.manifest: bytes | str = "no state yet"
        self.bundles: dict[str, Path] = {}

    def run_config(self) -> bytes | None:
        return RUN.canonical()

    def known_records(self) -> Sequence[bytes]:
        return self.records

    def on_envelope(self, record: object, raw: bytes, sender: str) -> None:
        self.received.append(record)

    def offers(self, round_number: int) -> Sequence[bytes]:
        return self.held.get(round_number, [])

    async def state(self) -> bytes | str:
        return self.manifest

    def bundle_path(self, digest: str) -> Path | None:
        return self.bundles.get(digest)


Node = tuple[Net, FakeDaemon]
Start = Callable[..., Awaitable[Node]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    nodes: list[Net] = []

    async def one(name: str, *bootstrap: Net, **values: object) -> Node:
        daemon = FakeDaemon()
        addresses = tuple(b.addresses[0] for b in bootstrap)
        config = NetConfig(identity_path=tmp_path / name, listen=LOOPBACK, bootstrap=addresses)
        node = await Net.start(replace(config, **values), daemon)  # type: ignore[arg-type]
        nodes.append(node)
        return node, daemon

    yield one
    for node in nodes:
        await node.stop()


def record(net: Net, **values: object) -> PeerRecord:
    now = net.now()
    base = PeerRecord(
        run_id=RUN.run_id, peer_id=net.peer_id, seq=1, time=now, expires=now + 60,
        state=PeerState.TRAINING, round=1, addresses=net.addresses,
    )  # fmt: skip
    return replace(base, **values)  # type: ignore[arg-type]


async def test_peers_and_runs_are_found_and_only_their_owners_may_write(start: Start) -> None:
    a, _ = await start("a")
    b, _ = await start("b", a)
    observer, _ = await start("o", a, identity_path=None, observer=True)
    mine = record(b)
    await b.publish_peer(mine)
    await b.publish_run(RUN)
    assert await observer.find_peers(RUN.run_id) == [mine]
    assert await observer.find_runs() == {RUN.run_id: "net-test"}
    assert await observer.find_config(RUN.run_id) == RUN.canonical()
    forged = record(b, seq=2, round=99, expires=mine.expires + 9)
    await a._dht.publish_peer(forged, a.sign(record(a)))  # a's word under b's subkey
    assert await observer.find_peers(RUN.run_id) == [mine]
    newer = record(b, seq=2, round=2, expires=mine.expires + 9)
    await b.publish_peer(newer)
    assert await observer.find_peers(RUN.run_id) == [newer]
    assert (observer.addr_kind, b.addr_kind) == ("relayed", "loopback")


async def test_every_call_brings_what_the_other_side_has(start: Start) -> None:
    a, served = await start("a")
    b, _ = await start("b", a)
    mine, raw = record(a), a.sign(record(a))
    served.records = [raw]
    hello = await b.hello(a.peer_id, RUN.run_id)
    assert hello.records[0][0].peer_id == mine.peer_id
    assert abs(b.clock_offset) < 1.0
    part = PartOffer(part="shared", term=0, tokens=1, digest="ab" * 32, size=3)
    offer = Offer(
        run_id=RUN.run_id, peer_id=a.peer_id, round=4, tokens=1, global_tokens=0, loss=None,
        parts=(part,),
    )  # fmt: skip
    served.held[4] = [a.sign(offer)]
    assert await b.offers(a.peer_id, RUN.run_id, 4) == [(offer, served.held[4][0])]
    assert await b.offers(a.peer_id, RUN.run_id, 5) == []
    assert await b.state(a.peer_id, RUN.run_id) == "no state yet"
    state = StateManifest(
        run_id=RUN.run_id, peer_id=a.peer_id, round=3, global_tokens=1, contributors=1,
        parts=(StatePart(part="shared", round=3, term=0, digest="ab" * 32, size=3),),
    )  # fmt: skip
    served.manifest = a.sign(state)
    assert await b.state(a.peer_id, RUN.run_id) == state
    await b.announce(a.peer_id, [b.sign(record(b)), b"junk", b.sign(offer_of(b, offer))])
    assert [type(r).__name__ for r in served.received] == ["PeerRecord", "Offer"]
    assert a.violations == {b.peer_id: 1}


def offer_of(net: Net, offer: Offer) -> Offer:
    return replace(offer, peer_id=net.peer_id)


def bundle(folder: Path, size: int, name: str = "bundle") -> tuple[Path, str]:
    path = folder / name
    path.write_bytes(os.urandom(1024) * (size // 1024) + os.urandom(size % 1024))
    return path, file_digest(path)


async def test_a_bundle_comes_whole_past_liars_and_strangers(start: Start, tmp_path: Path) -> None:
    a, good = await start("a")
    b, liar = await start("b", a)
    c, stranger = await start("c", a)
    d, _ = await start("d", a, b, c)
    path, digest = bundle(tmp_path, 5 * CHUNK_BYTES + 777)
    other = tmp_path / "other"
    other.write_bytes(path.read_bytes()[:-1] + b"!")
    good.bundles[digest], liar.bundles[digest] = path, other
    stranger.bundles = {}
    into = tmp_path / "in" / "x"
    size = path.stat().st_size
    await d.fetch(digest, size, [c.peer_id, b.peer_id, a.peer_id], into)
    assert into.read_bytes() == path.read_bytes()
    assert d.bytes_down == size
    assert list(into.parent.iterdir()) == [into]
    with pytest.raises(Unavailable, match="what the name says"):
        await d.fetch(digest, size, [b.peer_id], tmp_path / "y")
    with pytest.raises(Unavailable, match="chunk list"):
        await d.fetch(digest, size + 5, [a.peer_id], tmp_path / "y")


async def test_a_cut_transfer_resumes_where_it_was(start: Start, tmp_path: Path) -> None:
    a, daemon = await start("a")
    b, _ = await start("b", a)
    path, digest = bundle(tmp_path, 8 * CHUNK_BYTES)
    daemon.bundles[digest] = path
    raw = path.read_bytes()
    into = tmp_path / "in"
    kept = raw[: 3 * CHUNK_BYTES] + b"\0" * CHUNK_BYTES + raw[4 * CHUNK_BYTES : 6 * CHUNK_BYTES]
    (tmp_path / ".in.part").write_bytes(kept)
    await b.fetch(digest, len(raw), [a.peer_id], into)
    assert into.read_bytes() == raw
    assert b.bytes_down == 3 * CHUNK_BYTES


async def test_a_silent_source_is_left_for_the_next(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "IDLE_S", 1.0)
    a, good = await start("a")
    b, frozen = await start("b", a)
    c, _ = await start("c", a, b)
    path, digest = bundle(tmp_path, CHUNK_BYTES)
    good.bundles[digest] = frozen.bundles[digest] = path
    await c.hello(b.peer_id, RUN.run_id)
    pid = b._p2p._child.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        began = asyncio.get_running_loop().time()
        await c.fetch(digest, CHUNK_BYTES, [b.peer_id, a.peer_id], tmp_path / "in")
        assert asyncio.get_running_loop().time() - began < 5.0
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_the_others_go_on_after_the_bootstrap_peer_died(start: Start) -> None:
    a, _ = await start("a")
    b, _ = await start("b", a)
    c, _ = await start("c", a)
    await c.hello(b.peer_id, RUN.run_id)
    os.kill(a._p2p._child.pid, signal.SIGKILL)
    mine = record(b)
    await b.publish_peer(mine)
    assert await c.find_peers(RUN.run_id) == [mine]
    assert not await a.alive()
    d, _ = await start("d", b)
    assert await d.find_peers(RUN.run_id) == [mine]


async def test_wrong_addresses_are_sentences(start: Start, tmp_path: Path) -> None:
    a, _ = await start("a")
    b, _ = await start("b")
    right = a.addresses[0]
    swapped = right.replace(a.peer_id, b.peer_id)
    dead = "/ip4/127.0.0.1/tcp/1/p2p/" + a.peer_id

    async def fails(kind: type[Exception], says: str, **values: object) -> None:
        config = NetConfig(identity_path=None, listen=LOOPBACK)
        with pytest.raises(kind, match=says):
            await Net.start(replace(config, **values), FakeDaemon())  # type: ignore[arg-type]

    await fails(UsageError, "looks like", bootstrap=("nonsense",))
    await fails(UsageError, "looks like", bootstrap=("/ip4/127.0.0.1/tcp/1",))
    await fails(Unavailable, "nobody answers", bootstrap=(dead,))
    await fails(Unavailable, "another peer answers", bootstrap=(swapped,))
    await fails(UsageError, "port 0", announce=("/ip4/1.2.3.4/tcp/0",))
    await fails(Unavailable, "in use", listen=(right.split("/p2p/")[0],))
    node, _ = await start("c", listen=LOOPBACK, bootstrap=(dead, right))
    assert node.addresses


def test_p2pd_dies_with_a_killed_parent(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from test_node import *\n"
        "async def main():\n"
        "    net = await Net.start(NetConfig(identity_path=None, listen=LOOPBACK), FakeDaemon())\n"
        "    print(net._p2p._child.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()

    def gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
        except OSError:
            return True

    wait_for("the end of p2pd", gone, 10)
