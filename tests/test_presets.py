"""Presets: complete, commented, of the sizes they are named for."""

from pathlib import Path

import pytest
from helpers.tiny import make_trainer

from spesd.config import RunConfig, run_config_from_toml
from spesd.errors import UsageError
from spesd.memory import count_parameters
from spesd.presets import COMMENTS, preset_names, preset_toml


def preset(name: str, folder: Path) -> RunConfig:
    path = folder / "run.toml"
    path.write_text(preset_toml(name))
    return run_config_from_toml(path)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_a_valid_commented_file(name: str, tmp_path: Path) -> None:
    run = preset(name, tmp_path)
    assert run.name == f"my-{name}-run"
    lines = [line for line in preset_toml(name).splitlines() if " = " in line]
    assert all("#" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("1b", 1.17, 0.375), ("2b", 2.07, None), ("7b", 7.33, 1.70), ("9b", 9.43, 3.09)],
)
def test_big_presets_have_the_papers_sizes(
    name: str, total: float, active: float | None, tmp_path: Path
) -> None:
    count = count_parameters(preset(name, tmp_path).model)
    assert count.total / 1e9 == pytest.approx(total, rel=0.005)
    if active is not None:
        assert count.active / 1e9 == pytest.approx(active, rel=0.005)


def test_small_presets_need_no_file_and_no_network(tmp_path: Path) -> None:
    for name in ("tiny", "small"):
        run = preset(name, tmp_path)
        assert run.tokenizer.kind == "bytes"
        assert [source.kind for source in run.data.sources] == ["builtin"]


def test_every_setting_is_shown_once_with_its_comment() -> None:
    shown = [line.rpartition(" # ")[2] for line in preset_toml("7b").splitlines() if " = " in line]
    assert sorted(shown) == sorted(COMMENTS.values())


def test_an_unknown_preset_is_refused_with_the_names() -> None:
    with pytest.raises(UsageError, match="tiny, small, 1b, 2b, 7b, 9b"):
        preset_toml("huge")


@pytest.mark.parametrize("name", ["1b", "2b", "7b", "9b"])
def test_a_shrunken_preset_is_the_same_architecture_and_trains(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(preset_toml(name, 0.04))
    run, whole = run_config_from_toml(path), preset(name, tmp_path)
    for same in ("n_experts", "top_k", "qk_norm", "norm_topk_prob", "rope_theta"):
        assert getattr(run.model, same) == getattr(whole.model, same), same
    assert run.model.n_heads * whole.model.n_kv_heads == run.model.n_kv_heads * whole.model.n_heads
    assert count_parameters(run.model).total < 4_000_000
    trainer = make_trainer(run, tmp_path / "store", "a", (0, 1))
    trainer.begin_round(1, 20_000, 1)
    before = trainer.evaluate()
    for _ in range(12):
        assert trainer.step().loss is not None
    assert before > 5.4 and trainer.evaluate() < before - 0.3


@pytest.mark.parametrize("scale", [0.0, -1.0, 1.5, float("nan")])
def test_a_scale_that_is_none_is_refused(scale: float) -> None:
    with pytest.raises(UsageError, match="--scale"):
        preset_toml("1b", scale)
