"""The main job: peers find each other, train together, and outlive their founder."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.swarm import PeerProcess, run_toml, spesd, wait_for

pytestmark = pytest.mark.e2e

Start = Callable[..., PeerProcess]

PEER_FIELDS = {
    "id", "state", "round", "owns", "steps", "tokens", "tokens_per_s", "loss", "behind",
    "addr_kind", "version", "health",
}  # fmt: skip


def test_three_peers_train_and_go_on_without_their_founder(peers: Start, tmp_path: Path) -> None:
    founder = peers("founder", "start", run_toml(tmp_path))
    address = founder.address()
    second = peers("second", "join", "--bootstrap", address)
    third = peers("third", "join", "--bootstrap", address)
    second.address()
    third.address()

    def seen() -> dict:
        answer = spesd("status", "--bootstrap", address, "--json")
        assert answer.returncode == 0, answer.stderr
        status = json.loads(answer.stdout)
        states = [p["state"] for p in status["peers"]]
        return status if states == ["TRAINING"] * 3 and status["run"]["round"] >= 2 else {}

    status = wait_for("three peers in training", seen, 90)
    assert status["coverage"] == 1.0
    assert set(status["run"]) >= {"name", "id", "round", "global_tokens"}
    assert all(set(p) >= PEER_FIELDS for p in status["peers"])
    assert all(set(e) >= {"id", "owners", "version", "staleness_rounds"} for e in status["experts"])
    later = wait_for(
        "a growing round",
        lambda: (s := seen()) and s["run"]["round"] > status["run"]["round"] and s,
    )
    assert later["run"]["global_tokens"] > status["run"]["global_tokens"]
    mine = wait_for("a merge of the second peer", lambda: second.status()["me"]["rounds"])
    assert set(mine[-1]) == {
        "round", "closed_by", "offers", "merged", "missed", "seconds", "bytes", "stall_fraction",
    }  # fmt: skip
    assert set(mine[-1]["seconds"]) == {"train", "wait", "exchange", "merge"}

    founder.end(signal.SIGKILL)
    before = len(second.merged())
    wait_for("five more rounds", lambda: len(second.merged()) >= before + 5)
    fourth = peers("fourth", "join", "--bootstrap", second.status()["me"]["addresses"][0])
    fourth.address()
    wait_for(
        "the fourth peer's merge with others",
        lambda: [m for m in fourth.merged() if m["offers"] > 1],
    )
    for peer in (second, third, fourth):
        assert peer.end(signal.SIGTERM, timeout_s=10) == 0
        assert "Traceback" not in peer.errors.read_text()


def test_leave_pause_and_resume_are_obeyed(peers: Start, tmp_path: Path) -> None:
    peer = peers("alone", "start", run_toml(tmp_path))
    peer.address()
    wait_for("a first round", peer.merged)
    assert spesd("pause", "--home", peer.home).returncode == 0
    wait_for("a pause", lambda: peer.status()["me"]["state"] == "PAUSED")
    paused_at = len(peer.merged())
    assert spesd("resume", "--home", peer.home).returncode == 0
    wait_for("another round", lambda: len(peer.merged()) > paused_at)
    assert spesd("leave", "--home", peer.home).returncode == 0
    assert peer.process.wait(10) == 0
    assert peer.journal()[-1]["event"] == "left"


def test_a_lone_peer_restarted_goes_on_from_its_checkpoint(peers: Start, tmp_path: Path) -> None:
    first = peers("alone", "start", run_toml(tmp_path))
    first.address()
    wait_for("three rounds", lambda: len(first.merged()) >= 3)
    identity = first.status()["me"]["id"]
    first.end(signal.SIGKILL)
    rounds = first.merged()[-1]["round"]
    again = peers("alone", "start", tmp_path / "run.toml")
    again.address()
    wait_for("more rounds", lambda: again.merged()[-1]["round"] >= rounds + 2)
    assert again.status()["me"]["id"] == identity
    numbers = [m["round"] for m in again.merged()]
    assert numbers == sorted(numbers)
    assert numbers.count(rounds) <= 2
    assert any(e["event"] == "resumed" for e in again.journal())
