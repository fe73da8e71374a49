"""The main job: peers find each other, train together, and outlive their founder."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.plain import plain_loop
from helpers.swarm import PeerProcess, run_toml, spesd, wait_for

from spesd.checkpoint.load import LoadedModel, load_model

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


def weights(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    return {n: p.detach() for n, p in loaded.model.named_parameters()}


def test_a_daemon_alone_trains_as_a_plain_loop_does_bit_for_bit(
    peers: Start, tmp_path: Path
) -> None:
    peer = peers("alone", "start", run_toml(tmp_path))
    peer.address()
    wait_for("three rounds", lambda: len(peer.merged()) >= 3)
    assert peer.end() == 0
    loaded = load_model(peer.home)
    assert loaded.checkpoint.steps >= 24
    torch.set_num_threads(1)
    expected = plain_loop(loaded.run, loaded.checkpoint.peer_id, loaded.checkpoint.steps)
    for name, value in weights(loaded).items():
        assert torch.equal(value, expected[name]), name


def test_four_daemons_hold_one_model_after_each_merge(peers: Start, tmp_path: Path) -> None:
    """Each owns two of four experts, so every expert has co-owners and foreigners."""
    run_toml(tmp_path, min_peers=4, own=2, quorum=1.0)
    exact = 'frozen = "fp32"\n'
    first = peers("p0", "start", tmp_path / "run.toml", peer_toml=exact)
    address = first.address()
    everybody = [first]
    for n in (1, 2, 3):
        everybody.append(peers(f"p{n}", "join", "--bootstrap", address, peer_toml=exact))
    wait_for("four rounds", lambda: all(len(p.merged()) >= 4 for p in everybody), 120)
    for peer in everybody:
        assert [m["offers"] for m in peer.merged()[:4]] == [4] * 4
        assert all(m["missed"] == [] for m in peer.merged()[:4])
        assert len(peer.merged()[0]["owns"]) == 2
    for peer in everybody:
        peer.end(signal.SIGKILL)  # no save on leaving: what is on disk is what a merge made
    names = [{f.name for f in p.home.glob("runs/*/checkpoints/*.json")} for p in everybody]
    common = sorted(set.intersection(*names))
    assert common, names
    models = [
        weights(load_model(next(p.home.glob(f"runs/*/checkpoints/{common[-1]}"))))
        for p in everybody
    ]
    for other in models[1:]:
        for name, value in models[0].items():
            assert torch.allclose(value, other[name], rtol=1e-5, atol=1e-6), name


def test_the_files_of_a_run_are_of_use(peers: Start, tmp_path: Path) -> None:
    peer = peers("alone", "start", run_toml(tmp_path))
    peer.address()
    wait_for("a round", peer.merged)
    assert peer.end() == 0
    sample = spesd("generate", peer.home, "--prompt", "KING. ", "--tokens", "20", "--seed", "3")
    assert sample.returncode == 0 and sample.stdout.startswith("KING. ")
    again = spesd("generate", peer.home, "--prompt", "KING. ", "--tokens", "20", "--seed", "3")
    assert again.stdout == sample.stdout
    out = tmp_path / "hf"
    assert spesd("export", peer.home, out).returncode == 0
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(out)
    loaded = load_model(peer.home)
    ids = torch.arange(64).reshape(2, 32)
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, loaded.model(ids).logits_BTV, atol=1e-5)
    refused = spesd("export", peer.home, out)
    assert refused.returncode == 2 and "not an empty folder" in refused.stderr
