"""A trainer's whole state on disk: saved as it is held, refused when it is damaged."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny import make_trainer, tiny_config

from spesd.checkpoint.bundle import write_bundle
from spesd.errors import DamagedState
from spesd.memory import Layout
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


@pytest.mark.parametrize("frozen", ["bf16", "int8"])
def test_an_adopted_expert_is_saved_as_it_came_and_loads_to_the_same_bits(
    tmp_path: Path, frozen: str
) -> None:
    """It is held less precisely than it came, but others are served what the owner made."""
    setup = TrainerSetup(
        config=tiny_config(),
        peer_id="a",
        store=tmp_path / "a",
        owned=(0,),
        layout=Layout(k=1, rows=0, frozen=frozen),
    )
    trainer = Trainer(setup)
    trainer.initialise()
    generator = torch.Generator().manual_seed(0)
    wide = {n: torch.randn(s, generator=generator) for n, s in trainer.shapes["expert-1"].items()}
    plan = adopted("expert-1", None, trainer.store.bundles, {"b": wide})
    trainer.merge(1, plan)
    trainer.step()
    checkpoint = trainer.store.read(trainer.checkpoint(1, 0, 1, {}))
    saved = {p.part: p.digest for p in checkpoint.parts}
    assert saved["expert-1"] == plan[0]["inputs"][0]["digest"]
    again = Trainer(setup)
    again.load_checkpoint(checkpoint)
    assert_same = 0
    for name, values in trainer.model.named_parameters():
        assert torch.equal(again.model.get_parameter(name), values), name
        assert_same += 1
    assert assert_same > 20
    assert trainer.step().loss == again.step().loss


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
