"""A node's life: its addresses, its way in, its end."""

import asyncio
import gc
import os
import signal
import socket
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.nodes import LOOPBACK, RUN, FakeDaemon, Start, record
from helpers.swarm import wait_for

from spesd.errors import Unavailable, UsageError
from spesd.net import calls, p2pd
from spesd.net.identity import Identity
from spesd.net.node import Net, NetConfig
from spesd.net.runtime import PREFIX, base_folder, sweep


async def test_the_others_go_on_after_the_bootstrap_peer_died(start: Start) -> None:
    a, _ = await start("a")
    b, _ = await start("b", a)
    c, _ = await start("c", a)
    await c.hello(b.peer_id, RUN.run_id)
    os.kill(a.p2pd_pid, signal.SIGKILL)
    mine = record(b)
    await b.publish_peer(mine)
    assert await c.find_peers(RUN.run_id) == [mine]
    assert not await a.alive()
    d, _ = await start("d", b)
    assert await d.find_peers(RUN.run_id) == [mine]


async def test_a_node_whose_p2pd_died_ends_quickly_and_quietly(
    start: Start, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "CALL_S", 0.5)
    a, _ = await start("a")
    b, _ = await start("b", a)
    os.kill(b.p2pd_pid, signal.SIGKILL)
    with pytest.raises(Unavailable):
        await b.hello(a.peer_id, RUN.run_id)
    async with asyncio.timeout(2.0):
        await b.stop()
    gc.collect()
    assert "Traceback" not in capfd.readouterr().err


async def test_a_node_is_not_alive_once_its_calls_go_nowhere(start: Start) -> None:
    a, _ = await start("a")
    assert await a.alive()
    assert a.addresses
    a._p2pd.p2p._client.control._read_task.cancel()
    await asyncio.sleep(0.05)
    assert not await a.alive()


async def refused(kind: type[Exception], says: str, **values: object) -> None:
    config = NetConfig(identity_path=None, listen=LOOPBACK, patience_s=0)
    with pytest.raises(kind, match=says):
        await Net.start(replace(config, **values), FakeDaemon())  # type: ignore[arg-type]


async def test_wrong_addresses_are_sentences(start: Start) -> None:
    a, _ = await start("a")
    b, _ = await start("b")
    right = a.addresses[0]
    swapped = right.replace(a.peer_id, b.peer_id)
    dead = "/ip4/127.0.0.1/tcp/1/p2p/" + a.peer_id
    await refused(UsageError, "nonsense.*looks like", bootstrap=("nonsense",))
    await refused(UsageError, "looks like", bootstrap=("/ip4/127.0.0.1/tcp/1",))
    await refused(Unavailable, "nobody answers", bootstrap=(dead,))
    await refused(UsageError, "port 0", announce=("/ip4/1.2.3.4/tcp/0",))
    await refused(Unavailable, "in use", listen=(right.split("/p2p/")[0],))
    # waiting does not mend a wrong peer id
    async with asyncio.timeout(5.0):
        await refused(Unavailable, "another peer answers", bootstrap=(swapped,), patience_s=60)
    both = (dead, swapped)
    await refused(Unavailable, "tcp/1/p2p.*nobody answers.*another peer answers", bootstrap=both)
    node, _ = await start("c", bootstrap=(dead, right))
    assert node.addresses
    async with asyncio.timeout(5.0):
        await node.connect(["nonsense", dead, swapped, right, node.addresses[0]])


async def test_a_bootstrap_peer_that_starts_late_is_reached(start: Start, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        listen = f"/ip4/127.0.0.1/tcp/{free.getsockname()[1]}"
    peer_id = Identity.load_or_create(tmp_path / "late").peer_id
    async with asyncio.TaskGroup() as group:
        joining = group.create_task(
            start("early", bootstrap=(f"{listen}/p2p/{peer_id}",), patience_s=p2pd.REDIAL_S[0] + 1)
        )
        await asyncio.sleep(1.5)
        assert not joining.done()
        await start("late", listen=(listen,))


async def test_an_identity_persists_and_an_announced_address_comes_first(
    start: Start, tmp_path: Path
) -> None:
    a, _ = await start("a")
    await a.stop()
    again, _ = await start("a", announce=("/dns4/peer.example/tcp/4001",))
    assert again.peer_id == a.peer_id
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    assert again.addresses[0] == f"/dns4/peer.example/tcp/4001/p2p/{a.peer_id}"
    assert again.addr_kind == "public"


async def test_a_start_that_fails_leaves_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(base_folder().glob(f"{PREFIX}*"))
    dead = "/ip4/127.0.0.1/tcp/1/p2p/" + Identity.generate().peer_id
    await refused(Unavailable, "nobody answers", bootstrap=(dead,))
    await refused(Unavailable, "did not start", startup_timeout_s=0.001)
    assert set(base_folder().glob(f"{PREFIX}*")) == before


def test_p2pd_dies_with_a_killed_parent(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent.parent)!r})\n"
        "from helpers.nodes import *\n"
        "from spesd.net.node import NetConfig\n"
        "async def main():\n"
        "    net = await Net.start(NetConfig(identity_path=None, listen=LOOPBACK), FakeDaemon())\n"
        "    print(net.p2pd_pid, net._p2pd._folder.path, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, folder = parent.stdout.readline().split()
    parent.kill()
    parent.communicate()

    def gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
        except OSError:
            return True

    wait_for("the end of p2pd", gone, 10)
    assert Path(folder).exists()
    sweep()
    assert not Path(folder).exists()
