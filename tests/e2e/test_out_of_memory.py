"""A trainer that runs out of memory is started again with a leaner plan, and trains on."""

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.swarm import PeerProcess, run_toml, wait_for

pytestmark = pytest.mark.e2e


def test_out_of_memory_plans_again_once_and_trains_on(
    peers: Callable[..., PeerProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # blocks from 64 KiB come from the kernel, so that a limit is felt in the next step
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    peer = peers("peer", "start", run_toml(tmp_path))
    peer.address()
    wait_for("the first merges", lambda: len(peer.merged()) >= 2)
    before = len(peer.merged())
    started = next(e for e in peer.journal() if e["event"] == "started")
    resource.prlimit(peer.status()["me"]["trainer_pid"], resource.RLIMIT_DATA, (1, 1))
    replanned = wait_for(
        "another plan", lambda: [e for e in peer.journal() if e["event"] == "planned_again"]
    )
    assert len(replanned) == 1
    old, new = started["layout"], replanned[0]["layout"]
    assert old["k"] == 4 and (new["k"], new["rows"], new["recompute"]) != (
        old["k"], old["rows"], old["recompute"],
    )  # fmt: skip
    wait_for("merges again", lambda: len(peer.merged()) >= before + 3)
    status = peer.status()
    assert "memory ran out" in str(status["peers"][0]["health"])
    assert status["coverage"] == 1.0
