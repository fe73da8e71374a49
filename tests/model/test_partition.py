"""Names to parts, shapes without weights, loading a part."""

import dataclasses

import pytest
import torch

from spesd.config import ModelConfig
from spesd.ids import all_parts
from spesd.model.partition import (
    expert_layers,
    hf_name,
    load_part,
    part_of,
    part_shapes,
    parts,
    to_hf,
)
from spesd.model.transformer import MoETransformer

TINY = ModelConfig(
    d_model=32, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=8, ffn=24, n_experts=12
)


def make_model(**kwargs):
    model = MoETransformer(TINY, **kwargs)
    model.init_weights(0)
    return model


def test_an_expert_is_one_index_in_every_layer():
    found = parts(make_model())
    assert list(found) == all_parts(12)
    assert [name for name, _ in found["expert-11"]] == [
        "layers.0.experts.11.w1", "layers.0.experts.11.w2",
        "layers.1.experts.11.w1", "layers.1.experts.11.w2",
        "layers.2.experts.11.w1", "layers.2.experts.11.w2",
    ]  # fmt: skip
    shared = [name for name, _ in found["shared"]]
    assert shared == sorted(shared)
    assert len(shared) == 3 + 3 * 9
    assert "layers.0.router.weight" in shared


def test_every_parameter_is_in_exactly_one_part():
    model = make_model()
    members = [name for part in parts(model).values() for name, _ in part]
    assert sorted(members) == sorted(name for name, _ in model.named_parameters())
    assert all(parameter is model.get_parameter(name) for name, parameter in parts(model)["shared"])


def test_names_that_only_look_like_an_experts_are_shared():
    for name in ("experts.1.w1", "layers.0.experts.1.w3", "layers.0.experts.1.w1.x", "router"):
        assert part_of(name) == "shared"
    assert part_of("layers.10.experts.7.w2") == "expert-7"


@pytest.mark.parametrize("tied", [False, True])
def test_shapes_come_without_weights_and_are_the_models(tied):
    config = dataclasses.replace(TINY, tie_embeddings=tied)
    model = MoETransformer(config)
    shapes = part_shapes(config)
    assert {name: shape for part in shapes.values() for name, shape in part.items()} == {
        name: tuple(p.shape) for name, p in model.named_parameters()
    }
    assert shapes["expert-3"]["layers.2.experts.3.w1"] == (48, 32)
    big = ModelConfig(d_model=8192, n_layers=4, n_heads=64, n_kv_heads=64, head_dim=128, ffn=32_768)
    assert part_shapes(big)["expert-0"]["layers.0.experts.0.w2"] == (8192, 32_768)


def test_a_part_is_loaded_whole_or_not_at_all():
    model = make_model(frozen_dtype=torch.bfloat16)
    model.set_owned([1])
    new = {name: torch.randn(p.shape) for name, p in parts(model)["expert-2"]}
    load_part(model, "expert-2", new)
    for name, parameter in parts(model)["expert-2"]:
        assert torch.equal(parameter, new[name].bfloat16())
        assert not parameter.requires_grad
    before = [p.detach().clone() for _, p in parts(model)["expert-1"]]
    first = "layers.0.experts.1.w1"
    good = {name: torch.zeros(p.shape) for name, p in parts(model)["expert-1"]}
    transposed = good | {"layers.2.experts.1.w2": torch.zeros(24, 32)}
    missing = {name: tensor for name, tensor in good.items() if name != first}
    for wrong in (transposed, missing, good | {"extra": torch.zeros(1)}, new):
        with pytest.raises(ValueError, match=r"shape|odd"):
            load_part(model, "expert-1", wrong)
    after = [p for _, p in parts(model)["expert-1"]]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_expert_layers_share_memory_with_the_model():
    model = make_model()
    layers = list(expert_layers(model))
    assert (len(layers), len(layers[0])) == (3, 12)
    layers[2][7][1].fill_(5.0)
    assert float(model.get_parameter("layers.2.experts.7.w2").detach().mean()) == 5.0


def test_hugging_face_names():
    assert hf_name("layers.4.experts.11.w1") == (
        "model.layers.4.mlp.experts.11.gate_proj.weight",
        "model.layers.4.mlp.experts.11.up_proj.weight",
    )
    assert hf_name("layers.4.router.weight") == ("model.layers.4.mlp.gate.weight",)
    assert hf_name("head.weight") == ("lm_head.weight",)
    for name in ("layers.0.router.bias", "head", "model.norm.weight"):
        with pytest.raises(ValueError, match="not a parameter"):
            hf_name(name)


def test_export_refuses_a_state_that_is_not_the_whole_model():
    state = make_model().state_dict()
    del state["layers.1.experts.3.w2"]
    with pytest.raises(ValueError, match=r"layers\.1\.experts\.3\.w2"):
        to_hf(state, TINY)
