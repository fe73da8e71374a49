"""The memory plan against what the model was measured to take, and against the model itself."""

import dataclasses
import subprocess
import sys

import pytest
import torch

from spesd.config import LossConfig, ModelConfig
from spesd.memory import Layout, count_parameters, head_chunk_rows, largest_k, plan
from spesd.model.transformer import MoETransformer

MIB = 2**20
M41 = ModelConfig(
    vocab_size=4096, d_model=256, n_layers=6, n_heads=4, n_kv_heads=4, head_dim=64, ffn=512,
    n_experts=16, top_k=2,
)  # fmt: skip


def planned(k, frozen="fp32", model=M41, device="cpu", **layout):
    held = Layout(k=k, frozen=frozen, **({"rows": 8} | layout))
    return plan(model, seq_len=256, batch_size=8, layout=held, device=device)


# k, frozen: weights, gradients and Adam in MiB, as the 41M model was measured
@pytest.mark.parametrize(
    ("k", "frozen", "weights", "gradients", "adam"),
    [
        (16, "fp32", 158, 158, 316),
        (4, "fp32", 158, 50, 100),
        (1, "fp32", 158, 23, 46),
        (1, "bf16", 91, 23, 46),
    ],
)
def test_weights_gradients_and_moments_are_those_measured(k, frozen, weights, gradients, adam):
    found = planned(k, frozen)
    total = found.frozen_weights + found.trained_weights
    assert total / MIB == pytest.approx(weights, rel=0.05)
    assert found.gradients / MIB == pytest.approx(gradients, rel=0.05)
    assert found.moments / MIB == pytest.approx(adam, rel=0.05)


# Peak resident size of three steps above that of a process that had run a one-layer model, every
# block above 128 KiB returned when freed (glibc keeps more, see MALLOC_MMAP_THRESHOLD_).
@pytest.mark.parametrize(
    ("k", "frozen", "peak"),
    [(16, "fp32", 742), (4, "fp32", 514), (1, "fp32", 460), (1, "bf16", 393)],
)
def test_the_peak_is_that_measured(k, frozen, peak):
    found = planned(k, frozen)
    assert (found.peak - found.overhead) / MIB == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_kv_heads": 2},
        {"qk_norm": "none"},
        {"qk_norm": "per_head", "head_dim": 32},
        {"top_k": 3, "ffn": 200, "tie_embeddings": True},
    ],
)
@pytest.mark.parametrize("recompute", ["none", "experts"])
def test_activations_are_what_autograd_keeps(changes, recompute):
    config = dataclasses.replace(
        ModelConfig(vocab_size=500, n_layers=3, ffn=128), **changes
    )  # fmt: skip
    model = MoETransformer(config, recompute=recompute)
    model.init_weights(0)
    model.set_owned([0])
    ids = torch.randint(0, 500, (4, 129), generator=torch.Generator().manual_seed(0))
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model.loss(ids[:, :-1], ids[:, 1:], LossConfig())
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    measured = sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in weights)
    measured -= 4 * config.vocab_size * config.d_model  # the output matrix's gradient: `logits`
    held = Layout(k=1, rows=4, frozen="fp32", recompute=recompute)
    found = plan(config, seq_len=128, batch_size=4, layout=held, device="cpu")
    assert found.activations == pytest.approx(measured, rel=0.02)
    assert out.total.requires_grad


@pytest.mark.parametrize(
    "changes",
    [{}, {"qk_norm": "per_head", "head_dim": 32}, {"qk_norm": "none", "tie_embeddings": True}],
)
def test_parameters_are_counted_as_the_model_has_them(changes):
    config = dataclasses.replace(M41, n_kv_heads=2, **changes)
    with torch.device("meta"):
        model = MoETransformer(config)
    count = count_parameters(config)
    assert count.total == model.num_parameters()
    model.set_owned([])
    assert count.shared == model.num_parameters(trained_only=True)
    model.set_owned([3])
    assert count.shared + count.expert == model.num_parameters(trained_only=True)


def test_active_parameters_of_the_reference_models():
    small = ModelConfig(
        d_model=768, n_layers=12, n_heads=12, n_kv_heads=12, head_dim=64, ffn=2048,
        n_experts=16, top_k=2, vocab_size=151_665,
    )  # fmt: skip
    large = dataclasses.replace(
        small, d_model=2048, n_layers=16, n_heads=16, n_kv_heads=16, head_dim=128, n_experts=32,
        top_k=4,
    )  # fmt: skip
    assert count_parameters(small).active / 1e9 == pytest.approx(0.375, abs=0.001)
    assert count_parameters(large).active / 1e9 == pytest.approx(1.696, abs=0.001)


def test_the_largest_k_fits_and_the_next_does_not():
    ask = {"seq_len": 256, "batch_size": 8, "device": "cuda"}
    held = Layout(k=0, rows=8)
    for budget, expected in ((1_234_000_000, 1), (1_334_000_000, 5), (1_434_000_000, 9)):
        assert largest_k(M41, layout=held, budget_bytes=budget, **ask) == expected
        peaks = [planned(k, "bf16", device="cuda").peak for k in (expected, expected + 1)]
        assert peaks[0] <= budget < peaks[1]
    assert largest_k(M41, layout=held, budget_bytes=10**12, **ask) == 16
    assert largest_k(M41, layout=held, budget_bytes=1_190_000_000, **ask) is None


def test_memory_grows_with_k_and_shrinks_with_bf16():
    peaks = [planned(k, "bf16").peak for k in range(17)]
    assert peaks == sorted(peaks)
    assert planned(1, "bf16").peak < planned(1, "fp32").peak
    assert planned(1, device="cuda").peak > planned(1).peak
    with pytest.raises(ValueError, match="17 of 16"):
        planned(17)


def test_chunks_of_logits_stay_small_for_any_vocabulary():
    assert head_chunk_rows(264) == 7943
    assert head_chunk_rows(4096) == 512
    assert head_chunk_rows(151_665) == 128


def test_planning_needs_no_torch():
    code = "import sys, spesd.memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
