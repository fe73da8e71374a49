"""The losses against their formulas, written out.

Shapes: R rows, D model width, V vocabulary, T tokens, E experts.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from spesd.model import loss
from spesd.model.loss import head_loss, load_balance, router_z
from spesd.model.moe import Routing

R, D, V = 37, 8, 50


def make_routing(seed, T=40, E=6, K=2):
    logits = 2 * torch.randn(T, E, generator=torch.Generator().manual_seed(seed))
    weight, expert = logits.softmax(-1).topk(K, dim=-1)
    return Routing(logits, weight, expert, torch.bincount(expert.flatten(), minlength=E))


def test_load_balance_equals_the_sum_over_layers_tokens_and_experts():
    routings = [make_routing(seed) for seed in range(3)]
    T, E = routings[0].logits_TE.shape
    L, K = len(routings), 2
    total = 0.0
    for routing in routings:
        probs = routing.logits_TE.softmax(-1).tolist()
        for e in range(E):
            count = sum(row.count(e) for row in routing.expert_TK.tolist())
            mean_p = sum(row[e] for row in probs) / T
            total += count * mean_p
    assert float(load_balance(routings)) == pytest.approx(total * E / (L * T * K), rel=1e-5)


def test_load_balance_is_one_when_even_and_e_over_k_when_collapsed():
    even = Routing(
        torch.zeros(12, 4), torch.full((12, 2), 0.25),
        torch.tensor([[0, 1], [2, 3]] * 6), torch.full((4,), 6),
    )  # fmt: skip
    assert float(load_balance([even])) == pytest.approx(1.0)
    collapsed = Routing(
        torch.tensor([[50.0, 50.0, 0.0, 0.0]] * 12), torch.full((12, 2), 0.5),
        torch.tensor([[0, 1]] * 12), torch.tensor([12, 12, 0, 0]),
    )  # fmt: skip
    assert float(load_balance([collapsed])) == pytest.approx(2.0)
    # Two layers that are imbalanced in opposite ways: pooled they would look even.
    mirrored = collapsed._replace(
        logits_TE=collapsed.logits_TE.flip(1), expert_TK=3 - collapsed.expert_TK,
        tokens_E=collapsed.tokens_E.flip(0),
    )  # fmt: skip
    assert float(load_balance([collapsed, mirrored])) == pytest.approx(2.0)


def test_load_balance_pushes_the_router_away_from_busy_experts():
    routing = make_routing(1)
    logits = routing.logits_TE.requires_grad_()
    load_balance([routing]).backward()
    busiest, idlest = int(routing.tokens_E.argmax()), int(routing.tokens_E.argmin())
    assert logits.grad[:, busiest].sum() > 0 > logits.grad[:, idlest].sum()


def test_router_z_is_the_mean_square_of_logsumexp_over_tokens_and_layers():
    routings = [make_routing(seed) for seed in range(2)]
    values = [
        math.log(sum(math.exp(v) for v in row)) ** 2
        for routing in routings
        for row in routing.logits_TE.tolist()
    ]
    assert float(router_z(routings)) == pytest.approx(sum(values) / len(values), rel=1e-5)


def make_head(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(R, D, generator=generator, dtype=dtype).requires_grad_()
    head = torch.randn(V, D, generator=generator, dtype=dtype).requires_grad_()
    return h, head, torch.randint(0, V, (R,), generator=generator)


def plain(h, head, targets, z_weight):
    logits = h @ head.t()
    ce = F.cross_entropy(logits, targets)
    z = logits.logsumexp(-1).square().mean()
    return ce + z_weight * z, ce, z


@pytest.mark.parametrize("rows", [R, 10, 1])
def test_the_chunked_head_equals_plain_cross_entropy_with_z_loss(rows, monkeypatch):
    monkeypatch.setattr(loss, "head_chunk_rows", lambda vocab_size: rows)
    results = []
    for run in (plain, head_loss):
        h, head, targets = make_head(torch.float64)
        parts = run(h, head, targets, 0.03)
        (2.5 * parts[0]).backward()
        results.append((*[p.detach() for p in parts], h.grad, head.grad))
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)
    assert results[0][3].abs().max() > 0.01


def test_only_the_total_carries_a_gradient_and_evaluation_computes_none():
    h, head, targets = make_head(torch.float32)
    total, ce, z = head_loss(h, head, targets, 1e-5)
    assert (total.requires_grad, ce.requires_grad, z.requires_grad) == (True, False, False)
    with torch.no_grad():
        quiet = head_loss(h, head, targets, 1e-5)
    assert not quiet[0].requires_grad
    assert torch.equal(quiet[0], total.detach())


def test_the_loss_of_a_bf16_model_is_taken_in_fp32():
    h, head, targets = make_head(torch.float32)
    exact = plain(h.bfloat16().float(), head.bfloat16().float(), targets, 1e-3)
    rough = head_loss(h.bfloat16(), head.bfloat16(), targets, 1e-3)
    assert rough[0].dtype == torch.float32
    torch.testing.assert_close(rough[0], exact[0], rtol=0.01, atol=0.0)
    with torch.autocast("cpu", torch.bfloat16):
        cast = head_loss(h, head, targets, 1e-3)
    assert torch.equal(cast[0], rough[0])
    cast[0].backward()
    assert (h.grad.dtype, head.grad.dtype) == (torch.float32, torch.float32)
    wanted = torch.autograd.grad(plain(h, head, targets, 1e-3)[0], head)[0]
    torch.testing.assert_close(head.grad, wanted, rtol=0.05, atol=2e-3)
