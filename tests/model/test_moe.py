"""The dispatch against a naive loop over experts, in float64.

Shapes: T tokens, D model width, E experts, K experts per token, F expert width.
"""

import pytest
import torch
import torch.nn.functional as F

from spesd.config import ModelConfig
from spesd.model.moe import (
    Expert,
    Layout,
    Router,
    Routing,
    SortedExperts,
    run_experts,
    to_int8_rows,
    widen,
)

T, D, E, K, FFN = 23, 6, 5, 2, 7


def rand(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def routes(unused=()):
    """Distinct experts for each token, in no order; none goes to `unused`."""
    generator = torch.Generator().manual_seed(11)
    score_TE = torch.rand(T, E, generator=generator)
    score_TE[:, list(unused)] = -1.0
    return score_TE.topk(K, dim=-1).indices


def naive(x_TD, weight_TK, expert_TK, experts):
    """Every token by itself, its experts one after the other."""
    rows = []
    for t in range(x_TD.shape[0]):
        total = torch.zeros_like(x_TD[0])
        for k in range(expert_TK.shape[1]):
            w1, w2 = experts[int(expert_TK[t, k])]
            gate, up = (w1 @ x_TD[t]).chunk(2)
            total = total + weight_TK[t, k] * (w2 @ (F.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


def sorted_experts(x_TD, weight_TK, expert_TK, experts):
    order = torch.argsort(expert_TK.flatten(), stable=True)
    counts = torch.bincount(expert_TK.flatten(), minlength=E).tolist()
    return SortedExperts.apply(
        x_TD,
        weight_TK,
        order,
        Layout(counts, [None] * 2 * E, False),
        *(w for pair in experts for w in pair),
    )


def make_inputs(owned):
    x = rand(T, D, seed=1).requires_grad_()
    weight = rand(T, K, seed=2).abs().requires_grad_()
    experts = [
        (
            rand(2 * FFN, D, seed=10 + e).requires_grad_(e in owned),
            rand(D, FFN, seed=20 + e).requires_grad_(e in owned),
        )
        for e in range(E)
    ]
    return x, weight, experts


@pytest.mark.parametrize("owned", [range(E), [1, 4], []], ids=["all", "two", "none"])
def test_values_and_gradients_equal_the_naive_loop(owned):
    expert_TK = routes()
    results = []
    for run in (naive, sorted_experts):
        x, weight, experts = make_inputs(owned)
        out = run(x, weight, expert_TK, experts)
        out.backward(rand(T, D, seed=3))
        results.append((out.detach(), x.grad, weight.grad, experts))
    (out_a, dx_a, dw_a, experts_a), (out_b, dx_b, dw_b, experts_b) = results
    torch.testing.assert_close(out_b, out_a, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dx_b, dx_a, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dw_b, dw_a, rtol=1e-12, atol=1e-12)
    assert dx_a.abs().max() > 1
    for e in range(E):
        for ours, theirs in zip(experts_b[e], experts_a[e], strict=True):
            if e in owned:
                assert theirs.grad.abs().max() > 0.1
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
            else:
                assert ours.grad is None


def test_gradcheck_holds():
    x, weight, experts = make_inputs([0, 2])
    expert_TK = routes()
    frozen = [w for pair in experts for w in pair]

    def run(x, weight, w1, w2):
        frozen[4], frozen[5] = w1, w2
        pairs = list(zip(frozen[::2], frozen[1::2], strict=True))
        return sorted_experts(x, weight, expert_TK, pairs)

    assert torch.autograd.gradcheck(run, (x, weight, *experts[2]), fast_mode=True)


def test_experts_without_tokens_are_skipped_and_get_zero_gradients():
    x, weight, experts = make_inputs(range(E))
    expert_TK = routes(unused=(0, 3))
    out = sorted_experts(x, weight, expert_TK, experts)
    torch.testing.assert_close(out, naive(x, weight, expert_TK, experts), rtol=1e-12, atol=1e-12)
    out.sum().backward()
    for e in (0, 3):
        assert all(torch.equal(w.grad, torch.zeros_like(w)) for w in experts[e])
    assert experts[1][0].grad.abs().max() > 0


def test_a_router_weight_of_zero_still_has_a_gradient():
    # <h, dy W2> does not divide by the weight, so a softmax that underflowed is no NaN.
    x, _, experts = make_inputs([])
    weight = torch.zeros(T, K, dtype=torch.float64, requires_grad=True)
    sorted_experts(x, weight, routes(), experts).sum().backward()
    assert torch.isfinite(weight.grad).all()
    assert weight.grad.abs().min() > 0
    assert torch.equal(x.grad, torch.zeros_like(x))


def test_frozen_experts_in_bf16_compute_as_their_rounded_values_in_fp32():
    generator = torch.Generator().manual_seed(0)
    experts = [Expert(D, FFN) for _ in range(E)]
    for expert in experts:
        for w in expert.parameters():
            w.data.normal_(generator=generator)
    expert_TK = routes()
    routing = Routing(
        torch.zeros(T, E), torch.rand(T, K, generator=generator), expert_TK,
        torch.bincount(expert_TK.flatten(), minlength=E),
    )  # fmt: skip
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        for expert in experts:
            expert.freeze(dtype)
            assert {w.dtype for w in expert.parameters()} == {dtype}
            assert not any(w.requires_grad for w in expert.parameters())
        x = rand(T, D, seed=1).float().requires_grad_()
        out = run_experts(x, routing, experts)
        out.sum().backward()
        results.append((out, x.grad))
    assert results[0][0].dtype == torch.float32
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_autocast_computes_the_experts_in_its_dtype():
    generator = torch.Generator().manual_seed(0)
    experts = [Expert(16, 32) for _ in range(E)]
    for expert in experts:
        for w in expert.parameters():
            w.data.normal_(0, 0.1, generator=generator)
    expert_TK = routes()
    x = torch.randn(T, 16, generator=generator).requires_grad_()
    routing = Routing(
        torch.zeros(T, E), torch.full((T, K), 0.5), expert_TK,
        torch.bincount(expert_TK.flatten(), minlength=E),
    )  # fmt: skip
    exact = run_experts(x, routing, experts)
    with torch.autocast("cpu", torch.bfloat16):
        rough = run_experts(x, routing, experts)
    assert rough.dtype == torch.bfloat16
    torch.testing.assert_close(rough.float(), exact, rtol=0.1, atol=0.01)
    rough.sum().backward()
    assert experts[0].w1.grad.dtype == torch.float32
    assert x.grad.dtype == torch.float32


@pytest.mark.parametrize("normalise", [False, True])
def test_the_router_takes_the_largest_softmax_values(normalise):
    config = ModelConfig(d_model=D, n_experts=E, top_k=K, norm_topk_prob=normalise)
    router = Router(config)
    router.weight.data.copy_(rand(E, D, seed=4))
    x = rand(T, D, seed=5).float()
    routing = router(x)
    for t in range(T):
        probs = (router.weight.detach() @ x[t]).softmax(0)
        best = sorted(range(E), key=lambda e: -float(probs[e]))[:K]
        assert routing.expert_TK[t].tolist() == best
        expected = probs[best] / (probs[best].sum() if normalise else 1.0)
        torch.testing.assert_close(routing.weight_TK[t], expected)
    assert int(routing.tokens_E.sum()) == T * K
    assert routing.tokens_E.tolist() == [int((routing.expert_TK == e).sum()) for e in range(E)]


def test_recomputing_gives_the_same_bits():
    experts = [Expert(8, 12) for _ in range(4)]
    results = []
    for recompute in (False, True):
        for e, expert in enumerate(experts):
            for i, weight in enumerate(expert.parameters()):
                weight.data.normal_(generator=torch.Generator().manual_seed(10 * e + i))
                weight.grad = None
        x_TD = torch.randn(20, 8, generator=torch.Generator().manual_seed(3)).requires_grad_()
        router = Router(ModelConfig(d_model=8, n_experts=4))
        router.weight.data.normal_(generator=torch.Generator().manual_seed(4))
        out_TD = run_experts(x_TD, router(x_TD), experts, recompute=recompute)
        out_TD.square().sum().backward()
        weights = [w.grad for expert in experts for w in expert.parameters()]
        results.append([out_TD.detach(), x_TD.grad, router.weight.grad, *weights])
    for kept, recomputed in zip(*results, strict=True):
        assert torch.equal(kept, recomputed)


def test_int8_rows_are_close_and_rounding_them_again_changes_nothing():
    values = torch.randn(50, 300, generator=torch.Generator().manual_seed(0)) * 0.02
    values[7] = 0.0
    values[8] *= 1e-4
    whole, scale = to_int8_rows(values)
    wide = widen(whole, scale, None)
    assert whole.dtype == torch.int8 and wide.dtype == torch.float32
    assert ((wide - values).abs() <= 0.51 * scale).all()
    assert torch.equal(wide[7], torch.zeros(300))
    again, same_scale = to_int8_rows(wide)
    assert torch.equal(again, whole)
    assert torch.equal(widen(again, same_scale, None), wide)


def test_int8_experts_compute_as_their_widened_values():
    exact, held = Expert(8, 12), Expert(8, 12)
    for name in ("w1", "w2"):
        values = torch.randn(getattr(held, name).shape, generator=torch.Generator().manual_seed(1))
        held.put(name, values)
    held.freeze(torch.int8)
    for name in ("w1", "w2"):
        exact.put(name, held.dense(name))
    exact.freeze(torch.float32)
    x_TD = torch.randn(20, 8, generator=torch.Generator().manual_seed(3)).requires_grad_()
    expert_TK = torch.zeros(20, 1, dtype=torch.int64)
    routing = Routing(torch.zeros(20, 1), torch.ones(20, 1), expert_TK, torch.tensor([20]))
    grads = []
    for expert in (held, exact):
        x_TD.grad = None
        run_experts(x_TD, routing, [expert]).square().sum().backward()
        grads.append(x_TD.grad.clone())
    assert torch.equal(*grads) and grads[0].abs().max() > 0
    held.own()
    assert held.w1.dtype == torch.float32 and held.w1_scale is None
    assert torch.equal(held.w1, exact.w1)
