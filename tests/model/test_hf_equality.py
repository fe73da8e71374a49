"""Our logits against transformers' own classes, through files written as an export writes them.

Shapes: B sequences, T positions, V vocabulary.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from spesd.config import LossConfig, ModelConfig
from spesd.errors import ConfigError
from spesd.model.hf import hf_config
from spesd.model.partition import from_hf, hf_name, to_hf
from spesd.model.transformer import MoETransformer

OLMOE = ModelConfig(
    vocab_size=97, d_model=64, n_layers=3, n_heads=4, n_kv_heads=4, head_dim=16, ffn=48,
    n_experts=6, top_k=3, qk_norm="full", rope_theta=32_000.0, rms_eps=1e-6, init_std=0.2,
)  # fmt: skip
QWEN = dataclasses.replace(OLMOE, qk_norm="per_head", head_dim=32, n_kv_heads=2)

MIXTRAL = dataclasses.replace(QWEN, qk_norm="none", norm_topk_prob=True)
CLASSES = {
    "full": "OlmoeForCausalLM", "per_head": "Qwen3MoeForCausalLM", "none": "MixtralForCausalLM"
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model(config: ModelConfig) -> MoETransformer:
    """A model whose norm gains are not 1, so that a gain applied in the wrong place shows."""
    model = MoETransformer(config)
    model.init_weights(3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return model


def export(model: MoETransformer, out: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    save_file(to_hf(tensors, model.config), out / "model.safetensors", metadata={"format": "pt"})
    described = hf_config(
        model.config, max_positions=128, eos_id=1, pad_id=0, dtype=str(dtype).split(".")[1]
    )
    (out / "config.json").write_text(json.dumps(described))


CASES = {
    "olmoe": OLMOE,
    "olmoe-kv2": dataclasses.replace(OLMOE, n_kv_heads=2),
    "olmoe-normalised": dataclasses.replace(OLMOE, norm_topk_prob=True),
    "olmoe-tied": dataclasses.replace(OLMOE, tie_embeddings=True),
    "qwen-wide-heads": QWEN,
    "qwen-normalised-tied": dataclasses.replace(
        QWEN, norm_topk_prob=True, tie_embeddings=True, n_kv_heads=4, head_dim=16
    ),
    "mixtral-wide-heads": MIXTRAL,
    "mixtral-tied": dataclasses.replace(MIXTRAL, tie_embeddings=True, n_kv_heads=4, head_dim=16),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_bit_by_bit(case, dtype, tmp_path):
    config = CASES[case]
    model = make_model(config)
    export(model, tmp_path, dtype)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(theirs).__name__ == CLASSES[config.qk_norm]
    assert theirs.dtype == dtype
    ids_BT = torch.randint(
        2, config.vocab_size, (3, 64), generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        ours_BTV = model.to(dtype)(ids_BT).logits_BTV
        theirs_BTV = theirs(input_ids=ids_BT).logits
    assert ours_BTV.std() > 0.3
    assert torch.equal(ours_BTV, theirs_BTV), (ours_BTV - theirs_BTV).abs().max()


@pytest.mark.parametrize("case", ["olmoe", "qwen-wide-heads"])
def test_logits_equal_the_eager_experts_too(case, tmp_path):
    # Eager adds a token's experts in the experts' order; for two of them the sum is the same.
    config = dataclasses.replace(CASES[case], top_k=2)
    model = make_model(config)
    export(model, tmp_path, torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="eager"
    ).eval()
    ids_BT = torch.randint(
        2, config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        assert torch.equal(model(ids_BT).logits_BTV, theirs(input_ids=ids_BT).logits)


@pytest.mark.parametrize("case", ["olmoe-kv2", "qwen-normalised-tied"])
def test_gradients_agree_with_transformers(case, tmp_path):
    model = make_model(CASES[case])
    export(model, tmp_path, torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).train()
    ids_BT = torch.randint(2, 97, (2, 33), generator=torch.Generator().manual_seed(1))
    alone = LossConfig(load_balance=0.0, router_z=0.0, output_z=0.0)
    out = model.loss(ids_BT[:, :-1], ids_BT[:, 1:], alone)
    out.total.backward()
    logits_BTV = theirs(input_ids=ids_BT[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten())
    loss.backward()
    assert float(out.total.detach()) == pytest.approx(float(loss.detach()), rel=1e-6)
    fused = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in model.named_parameters():
        if "experts" in name:
            _, layer, _, expert, matrix = name.split(".")
            stacked = "gate_up_proj" if matrix == "w1" else "down_proj"
            wanted = fused[f"model.layers.{layer}.mlp.experts.{stacked}"][int(expert)]
        else:
            wanted = fused[hf_name(name)[0]]
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-3, atol=1e-6, msg=name)


def test_the_loaded_config_keeps_what_exports_tend_to_lose(tmp_path):
    config = dataclasses.replace(QWEN, rms_eps=3e-6, rope_theta=500_000.0, norm_topk_prob=True)
    (tmp_path / "config.json").write_text(
        json.dumps(hf_config(config, max_positions=77, eos_id=5, pad_id=None))
    )
    loaded = transformers.AutoConfig.from_pretrained(tmp_path)
    assert loaded.rms_norm_eps == 3e-6
    assert loaded.rope_parameters["rope_theta"] == 500_000.0
    assert (loaded.eos_token_id, loaded.pad_token_id) == (5, None)
    assert loaded.norm_topk_prob is True
    assert loaded.max_position_embeddings == 77
    assert (loaded.head_dim, loaded.moe_intermediate_size) == (32, 48)


def test_a_model_without_a_stock_class_is_refused():
    none = dataclasses.replace(OLMOE, qk_norm="none")
    wide = dataclasses.replace(OLMOE, head_dim=32)
    for config, reason in ((none, "norm_topk_prob = true"), (wide, "head_dim")):
        with pytest.raises(ConfigError, match=reason):
            hf_config(config, max_positions=8, eos_id=None, pad_id=None)


@pytest.mark.parametrize("case", ["olmoe-tied", "qwen-wide-heads", "mixtral-wide-heads"])
def test_import_undoes_export(case, tmp_path):
    model = make_model(CASES[case])
    export(model, tmp_path, torch.float32)
    on_disk = load_file(tmp_path / "model.safetensors")
    mixtral = model.config.qk_norm == "none"
    moe, gate = ("block_sparse_moe", "w1") if mixtral else ("mlp", "gate_proj")
    assert f"model.layers.0.{moe}.experts.5.{gate}.weight" in on_disk
    assert ("lm_head.weight" in on_disk) == (not model.config.tie_embeddings)
    state = from_hf(on_disk, model.config)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    del on_disk[f"model.layers.1.{moe}.gate.weight"]
    with pytest.raises(ValueError, match=rf"layers.1.{moe}.gate"):
        from_hf(on_disk, model.config)
