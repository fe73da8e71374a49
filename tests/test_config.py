"""Run configs: one canonical form, and refusals that name the key."""

import dataclasses
from typing import Any

import pytest

from spesd.config import RunConfig, run_config_from_canonical
from spesd.configtree import from_tree
from spesd.errors import ConfigError


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
