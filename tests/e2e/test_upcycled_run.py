"""A dense model becomes a swarm's mixture of experts, and nobody begins at random."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.models import checkpoint, dense_model
from helpers.swarm import PeerProcess, spesd, wait_for
from safetensors.torch import load_file

from spesd.cli.files import export_checkpoint
from spesd.config import run_config_from_toml
from spesd.data.bytes_json import byte_tokenizer_json
from spesd.data.stream import TextStream
from spesd.data.tokenizer import ByteTokenizer

pytestmark = pytest.mark.e2e

Start = Callable[..., PeerProcess]


def trained(steps: int = 80):
    """A dense model that has learned a little of the text that the run reads."""
    torch.set_num_threads(1)
    dense = dense_model(initializer_range=0.05, tie_word_embeddings=True).train()
    adam = torch.optim.AdamW(dense.parameters(), lr=5e-3)
    for inputs, targets in batches(3, steps):
        logits = dense(input_ids=inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        adam.step()
        adam.zero_grad()
    return dense.eval()


def batches(seed: int, count: int):
    from spesd.config import DataConfig

    data = DataConfig(seq_len=64, batch_size=8)
    stream = TextStream(data, ByteTokenizer(), seed=seed, peer_id="test")
    for _ in range(count):
        inputs, targets = stream.next_batch()
        yield torch.from_numpy(inputs), torch.from_numpy(targets)


def mean_loss(dense) -> float:
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(
                dense(input_ids=i).logits.flatten(0, 1), t.flatten()
            ).item()
            for i, t in batches(9, 12)
        ]
    return sum(losses) / len(losses)


def edited(run: Path, **values: object) -> Path:
    """Change settings of a run.toml in place, as a user does."""
    text = run.read_text()
    for key, value in values.items():
        text, count = re.subn(rf"(?m)^{key} = \S+", f"{key} = {value}", text)
        assert count == 1, key
    run.write_text(text)
    return run


def test_an_upcycled_model_is_trained_on_by_a_swarm(peers: Start, tmp_path: Path) -> None:
    dense = trained()
    own = mean_loss(dense)
    assert own < 3.2  # it has learned: a random model has 5.6
    source = tmp_path / "dense"
    dense.save_pretrained(source)
    (source / "tokenizer.json").write_bytes(byte_tokenizer_json())
    made = spesd("import", "--upcycle", source, tmp_path / "start", "--experts", "4")
    assert made.returncode == 0, made.stderr
    run = edited(
        tmp_path / "start" / "run.toml", min_peers=2, experts_per_peer=2, local_steps=6,
        warmup_tokens=10_000, quorum=1.0, wire='"fp32"', lr=0.001,
    )  # fmt: skip
    assert made.stdout == f"spesd start {run}\n"
    founder = peers("founder", "start", run)
    joiner = peers("joiner", "join", "--bootstrap", founder.address())
    joiner.address()
    everybody = (founder, joiner)
    wait_for("two rounds", lambda: all(len(p.merged()) >= 2 for p in everybody), 120)
    for peer in everybody:
        first = next(e for e in peer.journal() if e["event"] == "evaluated")
        assert first["val_loss"] == pytest.approx(own, abs=0.3)
        assert peer.merged()[0]["offers"] == 2
        assert peer.merged()[0]["loss"] < own + 0.15
    assert any(e["event"] == "started_from" for e in founder.journal())
    synced = next(e for e in joiner.journal() if e["event"] == "synced")
    assert synced["round"] == 0
    named = {p.name for p in (tmp_path / "start" / "weights").glob("*.safetensors")}
    config = run_config_from_toml(run)
    assert len(named) == 1 + config.model.n_experts
    for peer in everybody:
        assert peer.end() == 0
        assert "Traceback" not in peer.errors.read_text()

    again = peers("founder", "start", run)  # its own checkpoint is newer than the weights
    again.address()
    wait_for("a resume", lambda: any(e["event"] == "resumed" for e in again.journal()))
    assert again.end() == 0


def test_altered_weights_or_another_shape_end_the_start(tmp_path: Path) -> None:
    hf = export_checkpoint(checkpoint(tmp_path), tmp_path / "hf", "fp32")
    assert spesd("import", hf, tmp_path / "start").returncode == 0
    run = tmp_path / "start" / "run.toml"
    bundle = next(p for p in (tmp_path / "start" / "weights").glob("*.safetensors"))
    assert load_file(bundle)

    def refused(code: int, sentence: str) -> None:
        done = spesd("start", run, "--home", tmp_path / "home")
        assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
        assert sentence in done.stderr and not done.stdout

    whole, text = bundle.read_bytes(), run.read_text()
    bundle.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused(1, "not what its name says")
    bundle.unlink()
    refused(1, "cannot be read")
    bundle.write_bytes(whole)
    edited(run, rope_theta=5.0)
    refused(2, "model.rope_theta")
    run.write_text(text)
    edited(run, digest='"abc"') if text.count("\ndigest") == 1 else run.write_text(
        re.sub(r'(\[start\](?s:.*?)digest = ")\w', r"\g<1>z", text)
    )
    refused(2, "start.digest")
    run.write_text(text.replace('path = "weights"', 'path = "elsewhere"'))
    refused(1, "no weights in")
