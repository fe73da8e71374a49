"""Peers that a test starts end with it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.swarm import PeerProcess


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Callable[..., PeerProcess]]:
    """Start peers by name, each in its own home; all are ended with the test."""
    started: list[PeerProcess] = []

    def start(name: str, *arguments: str | Path, peer_toml: str = "") -> PeerProcess:
        peer = PeerProcess(tmp_path / name, *arguments, peer_toml=peer_toml)
        started.append(peer)
        return peer

    yield start
    for peer in started:
        if peer.process.poll() is None:
            peer.process.kill()
        peer.process.wait()
        if peer.process.stdout is not None:
            peer.process.stdout.close()
