"""Run and peer configs: one canonical form, and refusals that name the key."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from spesd.config import RunConfig, run_config_from_canonical, run_config_from_toml
from spesd.configtree import from_tree
from spesd.errors import ConfigError, UsageError
from spesd.memory import count_parameters
from spesd.peerconfig import PeerConfig, parse_bytes, peer_config, profiles
from spesd.presets import COMMENTS, preset_names, preset_toml


def test_the_run_id_is_the_hash_of_the_canonical_form_and_of_every_value() -> None:
    run = RunConfig()
    assert run_config_from_canonical(run.canonical(), run.run_id) == run
    with pytest.raises(ConfigError, match="hash"):
        run_config_from_canonical(run.canonical(), "0" * 32)
    ids = {run.run_id}
    for name, value in (("seed", 1), ("name", "x")):
        ids.add(dataclasses.replace(run, **{name: value}).run_id)
    ids.add(from_tree(RunConfig, {"round": {"wire": "fp32"}}).run_id)
    assert len(ids) == 4


def test_where_the_founder_keeps_the_tokenizer_is_not_the_runs_matter() -> None:
    trees = [{"kind": "file", "digest": "d:1", "path": p} for p in ("a.json", "b.json")]
    one, two = (from_tree(RunConfig, {"tokenizer": t}) for t in trees)
    assert one.run_id == two.run_id


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"sede": 1}, "unknown key 'sede'"),
        ({"model": {"layers": 2}}, "unknown key 'model.layers'"),
        ({"model": {"n_layers": "2"}}, "model.n_layers is '2'; it must be a whole number"),
        ({"model": {"n_layers": True}}, "model.n_layers"),
        ({"model": {"n_layers": 0}}, "model.n_layers is 0"),
        ({"model": {"top_k": 9}}, "model.top_k is 9"),
        ({"model": {"n_kv_heads": 3}}, "n_kv_heads"),
        ({"model": {"head_dim": 15}}, "head_dim"),
        ({"model": {"qk_norm": "maybe"}}, "'full', 'per_head', 'none'"),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr"),
        ({"round": {"quorum": 0}}, "round.quorum"),
        ({"round": {"quorum": 1.5}}, "round.quorum"),
        ({"round": {"overlap": True}}, "round.overlap"),
        ({"schedule": {"warmup_tokens": 10, "total_tokens": 10}}, "warmup_tokens"),
        ({"swarm": {"experts_per_peer": 9}}, "own 9"),
        ({"swarm": {"experts_per_peer": 3, "min_peers": 2}}, "cannot be covered"),
        ({"data": {"sources": []}}, "data.sources is empty"),
        ({"data": {"sources": [{"kind": "text"}]}}, "needs a path"),
        ({"data": {"sources": [{}, {}]}}, "share a name"),
        ({"data": 3}, "data must be a table"),
        ({"tokenizer": {"kind": "file"}}, "tokenizer.path"),
        ({"name": "a b"}, "name is"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_cannot_be_is_refused_by_its_key(tree: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match="(?s)" + says.replace("'", ".")):
        from_tree(RunConfig, tree)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_a_valid_commented_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(preset_toml(name))
    run = run_config_from_toml(path)
    assert run.name == f"my-{name}-run"
    lines = [line for line in preset_toml(name).splitlines() if " = " in line]
    assert all("#" in line for line in lines)


def test_presets_have_the_papers_sizes(tmp_path: Path) -> None:
    for name, billions in (("1b", 1.17), ("2b", 2.07), ("7b", 7.33), ("9b", 9.43)):
        path = tmp_path / "run.toml"
        path.write_text(preset_toml(name))
        total = count_parameters(run_config_from_toml(path).model).total
        assert total / 1e9 == pytest.approx(billions, rel=0.005)
    with pytest.raises(UsageError, match="tiny, small"):
        preset_toml("huge")


def test_every_comment_belongs_to_a_setting() -> None:
    text = preset_toml("tiny")
    assert all(comment in text for comment in COMMENTS.values())


def test_layers_of_a_peers_config(tmp_path: Path) -> None:
    (tmp_path / "peer.toml").write_text('vram = "6GB"\n[data]\nbooks = "/data/*.txt"\n')
    config = peer_config(tmp_path, "12gb", {"own": 3, "listen": ("/ip4/0.0.0.0/tcp/1",)})
    assert (config.device, config.vram, config.own) == ("cuda:0", "6GB", 3)
    assert config.data == {"books": "/data/*.txt"}
    assert config.listen == ("/ip4/0.0.0.0/tcp/1",)
    assert peer_config(tmp_path / "none", None, {}) == PeerConfig()
    (tmp_path / "peer.toml").write_text("vrma = 1")
    with pytest.raises(ConfigError, match=r"peer.toml: unknown key 'vrma'"):
        peer_config(tmp_path, None, {})
    with pytest.raises(UsageError, match="cpu"):
        peer_config(tmp_path, "toaster", {})


@pytest.mark.parametrize("text", ["8", "-1GB", "0GB", "8 potatoes", "GB", ""])
def test_sizes_without_sense_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)


def test_sizes_are_understood() -> None:
    assert parse_bytes("8GB") == 8 * 10**9
    assert parse_bytes("1.5 GiB") == 3 * 2**29
    assert set(profiles()) == {"cpu", "8gb", "12gb", "16gb", "24gb", "48gb"}
