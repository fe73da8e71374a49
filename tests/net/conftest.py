"""Nodes that end with their test, and leave neither a process nor a socket."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from helpers.nodes import LOOPBACK, FakeDaemon, Node, Start

from spesd.net.node import Net, NetConfig


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    nodes: list[Net] = []

    async def one(name: str, *bootstrap: Net, **values: object) -> Node:
        daemon = FakeDaemon()
        addresses = tuple(b.addresses[0] for b in bootstrap)
        config = NetConfig(
            identity_path=tmp_path / name, listen=LOOPBACK, bootstrap=addresses, patience_s=0
        )
        node = await Net.start(replace(config, **values), daemon)  # type: ignore[arg-type]
        nodes.append(node)
        return node, daemon

    yield one
    for node in nodes:
        pid, folder = node.p2pd_pid, node._p2pd._folder.path
        await node.stop()
        assert not psutil.pid_exists(pid)
        assert not folder.exists()
