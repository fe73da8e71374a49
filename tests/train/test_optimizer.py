"""The optimizer against a plain torch loop, and moments that follow ownership."""

import dataclasses
import math

import pytest
import torch

from spesd.config import LossConfig, ModelConfig, OptimizerConfig
from spesd.model.transformer import MoETransformer
from spesd.train.optimizer import PeerOptimizer

TINY = ModelConfig(
    vocab_size=61, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, ffn=24,
    n_experts=6, top_k=2,
)  # fmt: skip
CONFIG = OptimizerConfig(lr=1e-2, grad_clip=0.5, weight_decay=0.1)


def make_model(owned=(0, 1, 2), config=TINY, **kwargs):
    model = MoETransformer(config, **kwargs)
    model.init_weights(1)
    model.set_owned(owned)
    return model


def backward(model, seed=0):
    ids = torch.randint(0, 61, (3, 17), generator=torch.Generator().manual_seed(seed))
    out = model.loss(ids[:, :-1], ids[:, 1:], LossConfig())
    out.total.backward()


def train(model, optimizer, seeds, lr=1e-2):
    norms = []
    for seed in seeds:
        backward(model, seed)
        norms.append(optimizer.step(lr))
    return norms


def same(a, b):
    assert a.keys() == b.keys()
    return all(torch.equal(a[key], b[key]) for key in a)


def test_a_lone_peer_learns_bit_by_bit_as_a_plain_loop_does():
    ours, plain = make_model(range(6)), make_model(range(6))
    optimizer = PeerOptimizer(ours, CONFIG)
    matrices = [p for p in plain.parameters() if p.ndim >= 2]
    gains = [p for p in plain.parameters() if p.ndim < 2]
    adam = torch.optim.AdamW(
        [{"params": matrices}, {"params": gains, "weight_decay": 0.0}],
        betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True,
    )  # fmt: skip
    for seed in range(6):
        lr = 1e-2 / (1 + seed)
        backward(ours, seed)
        norm = optimizer.step(lr)
        backward(plain, seed)
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
        adam.zero_grad()
        assert norm == float(expected)
        assert norm > 0.5, "clipping must have had something to do"
        assert same(ours.state_dict(), plain.state_dict())
    assert all(parameter.grad is None for parameter in ours.parameters())


def test_matrices_decay_and_gains_do_not():
    model = make_model()
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
    optimizer = PeerOptimizer(model, dataclasses.replace(CONFIG, weight_decay=0.5))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.1)
    for name, parameter in model.named_parameters():
        decays = parameter.requires_grad and parameter.ndim == 2
        expected = torch.full_like(parameter, 0.95 if decays else 1.0)
        torch.testing.assert_close(parameter.detach(), expected, msg=name)


def test_frozen_experts_stay_as_they_are():
    model = make_model([1])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = PeerOptimizer(model, CONFIG)
    assert optimizer.trained_parts == ["shared", "expert-1"]
    train(model, optimizer, range(3))
    for name, parameter in model.named_parameters():
        moved = not torch.equal(parameter, before[name])
        assert moved == parameter.requires_grad, name


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    model = make_model()
    optimizer = PeerOptimizer(model, CONFIG)
    train(model, optimizer, range(2))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    moments = optimizer.state_of("shared")
    backward(model)
    model.layers[0].router.weight.grad[0, 0] = bad
    assert not math.isfinite(optimizer.step(1e-2))
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert same(optimizer.state_of("shared"), moments)
    assert all(p.grad is None for p in model.parameters())
    assert math.isfinite(train(model, optimizer, [3])[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_parts_that_stay_keep_their_moments_when_ownership_changes(dtype):
    model = make_model([0, 1], frozen_dtype=dtype)
    optimizer = PeerOptimizer(model, CONFIG)
    train(model, optimizer, range(3))
    before = {part: optimizer.state_of(part) for part in optimizer.trained_parts}
    model.set_owned([1, 4])
    optimizer.rebuild()
    assert optimizer.trained_parts == ["shared", "expert-1", "expert-4"]
    for part in ("shared", "expert-1"):
        assert same(optimizer.state_of(part), before[part])
    assert all(not tensor.any() for tensor in optimizer.state_of("expert-4").values())
    with pytest.raises(KeyError):
        optimizer.state_of("expert-0")
    train(model, optimizer, [9])
    assert float(optimizer.state_of("expert-1")["layers.0.experts.1.w1.step"]) == 4
    assert float(optimizer.state_of("expert-4")["layers.0.experts.4.w1.step"]) == 1
    assert optimizer.state_of("expert-4")["layers.1.experts.4.w2.exp_avg"].abs().max() > 0


def test_a_rebuild_without_a_change_is_not_felt():
    runs = []
    for rebuild in (False, True):
        model = make_model()
        optimizer = PeerOptimizer(model, CONFIG)
        train(model, optimizer, range(2))
        if rebuild:
            model.set_owned([0, 1, 2])
            optimizer.rebuild()
        train(model, optimizer, range(2, 4))
        runs.append(model.state_dict())
    assert same(*runs)


def test_state_moves_to_another_peer_and_training_goes_on_as_if_it_had_not():
    model = make_model()
    optimizer = PeerOptimizer(model, CONFIG)
    train(model, optimizer, range(3))
    other = make_model()
    other.load_state_dict(model.state_dict())
    heir = PeerOptimizer(other, CONFIG)
    for part in optimizer.trained_parts:
        heir.load_state_of(part, optimizer.state_of(part))
    for pair in ((model, optimizer), (other, heir)):
        train(*pair, range(3, 6))
    assert same(model.state_dict(), other.state_dict())


def test_exported_state_is_a_copy_and_so_is_what_was_loaded():
    model = make_model()
    optimizer = PeerOptimizer(model, CONFIG)
    train(model, optimizer, range(2))
    state = optimizer.state_of("expert-2")
    assert sorted(state)[:3] == [
        "layers.0.experts.2.w1.exp_avg",
        "layers.0.experts.2.w1.exp_avg_sq",
        "layers.0.experts.2.w1.step",
    ]
    kept = {key: tensor.clone() for key, tensor in state.items()}
    optimizer.load_state_of("expert-2", state)
    train(model, optimizer, [5])
    assert same(state, kept)
    assert not same(optimizer.state_of("expert-2"), kept)


def test_impossible_state_is_refused_whole():
    model = make_model()
    optimizer = PeerOptimizer(model, CONFIG)
    train(model, optimizer, range(2))
    good = optimizer.state_of("expert-0")
    key = "layers.1.experts.0.w2.exp_avg_sq"
    bad = {
        "odd": {k: v for k, v in good.items() if k != key},
        "shape": good | {key: good[key].t().contiguous()},
        "not finite": good | {key: torch.full_like(good[key], math.nan)},
        "negative": good | {key: -torch.ones_like(good[key])},
    }
    for reason, tensors in bad.items():
        with pytest.raises(ValueError, match=reason):
            optimizer.load_state_of("expert-0", tensors)
        assert same(optimizer.state_of("expert-0"), good)
    with pytest.raises(KeyError):
        optimizer.load_state_of("expert-5", good)


def test_moments_in_8_bits_learn_and_move_to_a_peer_that_keeps_them_in_fp32():
    pytest.importorskip("bitsandbytes")
    wide = dataclasses.replace(TINY, d_model=128, ffn=64)  # the library keeps small tensors as fp32
    losses = {}
    for name, small in (("fp32", False), ("int8", True)):
        model = make_model(config=wide)
        optimizer = PeerOptimizer(model, CONFIG, moments8=small)
        train(model, optimizer, [0] * 20)
        ids = torch.randint(0, 61, (3, 17), generator=torch.Generator().manual_seed(0))
        losses[name] = float(model.loss(ids[:, :-1], ids[:, 1:], LossConfig()).cross_entropy)
        state = optimizer.state_of("shared")
        other = PeerOptimizer(make_model(config=wide), CONFIG, moments8=not small)
        other.load_state_of("shared", state)
        for key, values in other.state_of("shared").items():
            scale = values.abs().max().clamp_min(1e-12)
            assert ((values - state[key]).abs() / scale).max() < 0.02, key
        again = PeerOptimizer(make_model(config=wide), CONFIG, moments8=small)
        again.load_state_of("shared", state)
        for key, values in again.state_of("shared").items():
            scale = values.abs().max().clamp_min(1e-12)
            assert ((values - state[key]).abs() / scale).max() < (0.01 if small else 1e-9), key
        assert (optimizer.moment_bytes < 0.5 * other.moment_bytes) is small
    assert losses["fp32"] < 3.5  # from 4.1
    assert losses["int8"] == pytest.approx(losses["fp32"], abs=0.05)
