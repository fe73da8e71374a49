"""Aggregation against plain means, expert merging against the method written out.

Shapes: D model width, F expert width, E experts.
"""

import math

import pytest
import torch

from spesd.train.merge import (
    aggregate,
    check_finite,
    from_wire,
    merge_experts,
    to_wire,
    weights,
)


def rand(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_with_every_peer_it_is_the_mean_weighted_by_tokens():
    peers = [rand(7, 5, seed=s) for s in range(4)]
    tokens = [100, 300, 0, 600]
    mean = sum(t / 1000 * p.double() for t, p in zip(tokens, peers, strict=True))
    for i, own in enumerate(peers):
        x = own.clone()
        others = [j for j in range(4) if j != i]
        shares = weights(tokens[i], [tokens[j] for j in others])
        aggregate(x, own, [(w, peers[j]) for w, j in zip(shares, others, strict=True)])
        torch.testing.assert_close(x.double(), mean, rtol=1e-6, atol=1e-6)
        assert all(torch.equal(p, rand(7, 5, seed=s)) for s, p in enumerate(peers))
        assert i == 3 or (x - own).abs().max() > 0.1


def test_weights_are_shares_of_all_tokens():
    assert weights(100, [300, 0]) == [0.75, 0.0]
    assert weights(0, [1, 3]) == [0.25, 0.75]
    assert weights(0, [0, 0, 0]) == [0.25, 0.25, 0.25]
    assert weights(5, []) == []


def test_nothing_moves_where_all_agree_and_residues_survive():
    own = rand(64, seed=1)
    sent = to_wire(own, "bf16")
    x = own.clone()
    aggregate(x, sent, [(0.3, sent.clone()), (0.3, sent.clone())])
    assert torch.equal(x, own)
    assert not torch.equal(sent.float(), own)
    other = to_wire(own + 1.0, "bf16")
    aggregate(x, sent, [(0.5, other)])
    torch.testing.assert_close(x - 0.5 * (other.float() - sent.float()), own)


def test_steps_trained_since_the_offer_are_kept():
    offered, other = rand(32, seed=1), rand(32, seed=2)
    trained_since = 0.01 * rand(32, seed=3)
    x = offered + trained_since
    aggregate(x, offered, [(0.5, other)])
    torch.testing.assert_close(x, (offered + other) / 2 + trained_since)


def test_the_sum_runs_in_fp32_and_in_the_callers_order():
    own = torch.zeros(1000)
    offers = [(1 / 16, rand(1000, seed=s).bfloat16()) for s in range(16)]
    runs = []
    for _ in range(2):
        x = own.clone()
        aggregate(x, own, offers)
        runs.append(x)
    assert torch.equal(*runs)
    exact = torch.stack([o.double() for _, o in offers]).mean(0)
    assert (runs[0].double() - exact).abs().max() < 1e-6  # bf16 sums would be off by 1e-3


def test_the_wire_rounds_and_copies():
    x = rand(100, seed=1)
    for wire, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        sent = to_wire(x, wire)
        assert sent.dtype == dtype
        back = from_wire(sent)
        assert back.dtype == torch.float32
        assert torch.equal(back, x.to(dtype).float())
        assert torch.equal(to_wire(back, wire), sent)  # rounding twice is rounding once
        assert sent.data_ptr() != x.data_ptr()
    assert torch.equal(from_wire(to_wire(x, "fp32")), x)


def reference_merge(layers, alpha, donors):
    """SPES, expert merging, for all experts: three matrices, likeness by the first."""
    result, chosen = [], []
    for experts in layers:
        split = [(*w1.chunk(2), w2) for w1, w2 in experts]  # gate, up, down
        flat = torch.stack([gate.flatten() for gate, _, _ in split])
        unit = flat / flat.norm(dim=1, keepdim=True)
        likeness = unit @ unit.T
        likeness.fill_diagonal_(-math.inf)
        top = likeness.topk(min(donors, len(experts) - 1), dim=1).indices
        chosen.append({e: top[e].tolist() for e in range(len(experts))})
        merged = []
        for e, base in enumerate(split):
            pulls = [
                torch.stack([split[d][i] - base[i] for d in top[e].tolist()]).mean(0)
                for i in range(3)
            ]
            gate, up, down = (b + alpha * p for b, p in zip(base, pulls, strict=True))
            merged.append((torch.cat((gate, up)), down))
        result.append(merged)
    return result, chosen


def make_layers(E, F=6, D=5, n=3):
    return [
        [(rand(2 * F, D, seed=100 * k + e), rand(D, F, seed=5000 + 100 * k + e)) for e in range(E)]
        for k in range(n)
    ]


@pytest.mark.parametrize("E", [2, 4, 5, 16])
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_merging_equals_the_method_for_owned_experts_and_leaves_others(E, share):
    layers, originals = make_layers(E), make_layers(E)
    owned = list(range(E))[:: round(1 / share)]
    drawn = merge_experts(layers, owned, 0.3, 4)
    expected, chosen = reference_merge(originals, 0.3, 4)
    for k, experts in enumerate(layers):
        assert drawn[k] == {e: chosen[k][e] for e in owned}
        assert all(len(d) == min(4, E - 1) and e not in d for e, d in drawn[k].items())
        for e, pair in enumerate(experts):
            for ours, wanted, before in zip(pair, expected[k][e], originals[k][e], strict=True):
                if e in owned:
                    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)
                    assert (ours - before).abs().max() > 0.05
                else:
                    assert torch.equal(ours, before)


def test_likeness_is_of_the_gate_alone():
    layers = make_layers(3, n=1)
    gate, up = layers[0][0][0].chunk(2)
    layers[0][1][0].copy_(torch.cat((2 * gate, rand(6, 5, seed=9))))  # same gate direction
    layers[0][2][0].copy_(torch.cat((rand(6, 5, seed=8), 2 * up)))  # same up direction
    assert merge_experts(layers, [0], 0.1, 1) == [{0: [1]}]


def test_ties_go_to_the_lower_index():
    layers = [[(torch.ones(4, 3), torch.full((3, 2), float(e))) for e in range(6)]]
    assert merge_experts(layers, [4, 0], 0.5, 3) == [{0: [1, 2, 3], 4: [0, 1, 2]}]
    torch.testing.assert_close(layers[0][0][1], torch.full((3, 2), 1.0))  # 0 + 0.5 * (2 - 0)
    torch.testing.assert_close(layers[0][4][1], torch.full((3, 2), 2.5))  # 4 + 0.5 * (1 - 4)


def test_donors_may_be_stored_in_bf16_and_one_expert_has_none():
    layers = make_layers(4, n=1)
    exact = make_layers(4, n=1)
    for e in (1, 2, 3):
        rounded = tuple(w.bfloat16() for w in layers[0][e])
        layers[0][e] = rounded
        exact[0][e] = tuple(w.float() for w in rounded)
    merge_experts(layers, [0], 0.2, 2)
    expected, _ = reference_merge(exact, 0.2, 2)
    torch.testing.assert_close(layers[0][0][0], expected[0][0][0], rtol=1e-5, atol=1e-6)
    alone = make_layers(1, n=1)
    assert merge_experts(alone, [0], 0.5, 4) == [{0: []}]
    assert torch.equal(alone[0][0][0], make_layers(1, n=1)[0][0][0])


def test_alpha_zero_moves_nothing():
    layers = make_layers(5)
    merge_experts(layers, range(5), 0.0, 4)
    for ours, before in zip(layers, make_layers(5), strict=True):
        assert all(torch.equal(a[0], b[0]) for a, b in zip(ours, before, strict=True))


def test_the_first_tensor_that_is_not_finite_is_named():
    good = {"b": torch.ones(3), "a": torch.zeros(2, 2, dtype=torch.bfloat16)}
    assert check_finite(good) is None
    bad = good | {"c": torch.tensor([1.0, math.inf, math.nan]), "d": torch.tensor([math.nan])}
    assert check_finite(bad) == "c has 2 of 3 values that are not finite."
