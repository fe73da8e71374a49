"""Weights that a run starts from: loaded as they are, served as they came, never replaced."""

import dataclasses
from pathlib import Path

import pytest
from helpers.models import checkpoint
from helpers.tiny import tiny_config

from spesd.checkpoint.load import find_checkpoint
from spesd.config import RunConfig, StartConfig
from spesd.errors import ConfigError, UsageError
from spesd.memory import Layout
from spesd.train.protocol import TrainerSetup
from spesd.train.trainer import Trainer


def trainer(run: RunConfig, store: Path, frozen: str) -> Trainer:
    layout = Layout(k=1, rows=0, frozen=frozen)  # type: ignore[arg-type]
    return Trainer(TrainerSetup(config=run, peer_id="a", store=store, owned=(1,), layout=layout))


@pytest.mark.parametrize("frozen", ["fp32", "bf16", "int8"])
def test_what_was_loaded_is_served_unrounded(frozen: str, tmp_path: Path) -> None:
    found = find_checkpoint(checkpoint(tmp_path))
    given = [
        {"part": p.part, "path": str(found.bundle(p.digest)), "digest": p.digest}
        for p in found.checkpoint.parts
    ]
    one = trainer(found.run, found.folder, frozen)
    one.load_state(given)
    saved = one.store.read(one.checkpoint(0, 0, 1, {}))
    assert [p.digest for p in saved.parts] == [p["digest"] for p in given]
    one.begin_round(1, 5000, 1)
    assert one.step().loss is not None
    later = one.store.read(one.checkpoint(1, 0, 1, {}))
    changed = [p.part for p, q in zip(later.parts, saved.parts, strict=True) if p != q]
    assert changed == ["shared", "expert-1"]


def test_such_a_run_never_begins_at_random(tmp_path: Path) -> None:
    run = dataclasses.replace(tiny_config(), start=StartConfig(kind="weights", digest="ab"))
    with pytest.raises(UsageError, match="starts from weights"):
        trainer(run, tmp_path, "fp32").initialise()


def test_the_weights_are_part_of_the_run_and_their_place_is_not() -> None:
    def run_id(**start: str) -> str:
        given = StartConfig(kind="weights", **start)  # type: ignore[arg-type]
        return dataclasses.replace(tiny_config(), start=given).run_id

    assert run_id(digest="a", path="/here") == run_id(digest="a", path="/there")
    assert run_id(digest="a") != run_id(digest="b") != tiny_config().run_id
    with pytest.raises(ConfigError, match=r"start\.path"):
        StartConfig(kind="weights")
