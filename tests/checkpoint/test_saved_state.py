"""A trainer's whole state on disk: saved as it is held, refused when it is damaged."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny import make_trainer, tiny_config
from safetensors.torch import load_file

from spesd.checkpoint.bundle import write_bundle
from spesd.errors import DamagedState
from spesd.train.protocol import TrainerSetup
from spesd.train.trainer import Trainer

ALL = (0, 1, 2, 3)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().float().clone() for n, p in trainer.model.named_parameters()}


def adopted(part: str, own_tokens: int | None, folder: Path, made: dict[str, Any]) -> list[Any]:
    """A plan for one part, from what each peer made of it, one token each."""
    inputs = []
    for peer, tensors in made.items():
        digest, _ = write_bundle(folder, tensors)
        path = folder / f"{digest}.safetensors"
        inputs.append({"path": str(path), "digest": digest, "tokens": 1, "peer": peer})
    return [{"part": part, "own_tokens": own_tokens, "inputs": inputs}]


def test_an_expert_adopted_wider_than_it_is_held_is_saved_as_it_is_held(tmp_path: Path) -> None:
    """The bundle that came would load other weights than those that were trained with."""
    config = tiny_config(round={"wire": "bf16"})
    setup = TrainerSetup(
        config=config, peer_id="a", store=tmp_path / "a", owned=(0,), frozen="bf16"
    )
    trainer = Trainer(setup)
    trainer.initialise()
    wide = {n: torch.full(s, 1.0 + 2**-12) for n, s in trainer.shapes["expert-1"].items()}
    trainer.merge(1, adopted("expert-1", None, trainer.store.bundles, {"b": wide}))
    path = trainer.checkpoint(1, 0, 1, {})
    held = {p.part: p.digest for p in trainer.store.read(path).parts}
    saved = load_file(trainer.bundle(held["expert-1"]))
    assert {t.dtype for t in saved.values()} == {torch.bfloat16}
    narrow = {n: t.bfloat16() for n, t in wide.items()}
    second = {n: narrow[n.replace("experts.2", "experts.1")] for n in trainer.shapes["expert-2"]}
    plan = adopted("expert-2", None, trainer.store.bundles, {"b": second})
    trainer.merge(2, plan)
    held = {p.part: p.digest for p in trainer.store.read(trainer.checkpoint(2, 0, 1, {})).parts}
    assert held["expert-2"] == plan[0]["inputs"][0]["digest"]  # as it came: not written again


def test_damaged_moments_are_found_before_anything_changes(tmp_path: Path) -> None:
    trainer = make_trainer(tiny_config(), tmp_path, "a", ALL)
    trainer.step()
    checkpoint = trainer.store.read(trainer.checkpoint(1, 0, 1, {}))
    trainer.step()
    before = weights(trainer)
    path = trainer.bundle(checkpoint.moments[-1].digest)
    raw = path.read_bytes()
    for damaged in (raw[:-3] + bytes([raw[-3] ^ 1]) + raw[-2:], raw[:50], b""):
        path.write_bytes(damaged)
        with pytest.raises(DamagedState):
            trainer.load_checkpoint(checkpoint)
        assert all(torch.equal(v, before[n]) for n, v in weights(trainer).items())


def test_a_state_that_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    trainer = make_trainer(tiny_config(), tmp_path, "a", ALL)
    good = trainer.store.read(trainer.checkpoint(1, 0, 1, {}))
    trainer.step()
    with torch.no_grad():
        dict(trainer.model.named_parameters())["layers.0.experts.1.w2"].fill_(float("inf"))
    with pytest.raises(DamagedState, match="expert-1 cannot be saved"):
        trainer.checkpoint(2, 0, 1, {})
    assert trainer.store.newest() == (good, [])
