"""A peer killed with SIGKILL in each phase comes back as itself, and nobody stops for it."""

import itertools
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.swarm import PeerProcess, run_toml, wait_for

pytestmark = pytest.mark.e2e

DEADLINE_S = 15.0
PHASES = ["training", "offering", "exchanging", "merging", "checkpointing"]


@pytest.mark.parametrize("phase", PHASES)
def test_killed_while(phase: str, peers: Callable[..., PeerProcess], tmp_path: Path) -> None:
    founder = peers("founder", "start", run_toml(tmp_path, deadline_s=DEADLINE_S))
    address = founder.address()
    other = peers("other", "join", "--bootstrap", address)
    victim = peers(
        "victim", "join", "--bootstrap", address, peer_toml=f'[faults]\nkill = "{phase}@2"\n'
    )
    other.address()
    victim.address()
    identity = wait_for("the victim's id", lambda: victim.status().get("me", {}).get("id"))
    victim.process.wait(120)
    assert victim.process.returncode == -signal.SIGKILL
    assert next(e for e in victim.journal() if e["event"] == "fault")["phase"] == phase

    died = time.time()
    wait_for("three more rounds of the others", lambda: _since(founder, died) >= 3)
    again = peers("victim", "join", "--bootstrap", address)
    again.address()
    back = time.time()
    wait_for(
        "the victim merging again",
        lambda: [m for m in again.merged() if m["time"] > back and m["offers"] > 1],
    )
    assert again.status()["me"]["id"] == identity
    assert any(e["event"] in ("resumed", "synced") for e in again.journal() if e["time"] > died)
    for peer in (founder, other):
        times = [m["time"] for m in peer.merged() if m["time"] > died - 5]
        gaps = [b - a for a, b in itertools.pairwise(times)]
        assert max(gaps) < DEADLINE_S + 2, gaps
    for peer in (again, other, founder):
        assert peer.end() == 0


def _since(peer: PeerProcess, moment: float) -> int:
    return sum(m["time"] > moment for m in peer.merged())


def test_frozen_for_many_rounds_and_back(peers: Callable[..., PeerProcess], tmp_path: Path) -> None:
    """Rounds of a fraction of a second: the frozen peer wakes up dozens of them behind."""
    founder = peers("founder", "start", run_toml(tmp_path))
    address = founder.address()
    frozen = peers("frozen", "join", "--bootstrap", address)
    frozen.address()
    wait_for("both in one round", lambda: [m for m in frozen.merged() if m["offers"] == 2])
    frozen.send(signal.SIGSTOP)
    try:
        before = len(founder.merged())
        wait_for("thirty rounds without it", lambda: len(founder.merged()) >= before + 30)
    finally:
        frozen.send(signal.SIGCONT)
    woke = time.time()
    wait_for(
        "both in one round again",
        lambda: [m for m in frozen.merged() if m["time"] > woke and m["offers"] == 2],
    )
    rounds = [m["round"] for m in frozen.merged()]
    assert rounds == sorted(set(rounds))
    for peer in (frozen, founder):
        assert peer.end() == 0
