"""Values at the joints of the schedules."""

import math

import pytest

from spesd.config import LossConfig, MergingConfig, OptimizerConfig, ScheduleConfig
from spesd.train.schedule import learning_rate, merging_alpha, owned_balance

PEAK = OptimizerConfig(lr=4e-4)


def at(tokens, kind="cosine", **kwargs):
    schedule = ScheduleConfig(
        **{"kind": kind, "warmup_tokens": 1000, "total_tokens": 9000, "final_fraction": 0.1}
        | kwargs
    )
    return learning_rate(tokens, PEAK, schedule) / PEAK.lr


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_warm_up_is_linear_in_tokens(kind):
    assert [at(t, kind) for t in (0, 250, 500)] == pytest.approx([0.0, 0.25, 0.5])
    assert at(1000, kind) == pytest.approx(1.0)
    assert at(0, kind, warmup_tokens=0) == pytest.approx(1.0)


def test_cosine_and_linear_fall_to_the_final_fraction_and_stay():
    assert at(5000) == pytest.approx(0.55)
    assert at(3000) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert at(3000, "linear") == pytest.approx(0.1 + 0.9 * 0.75)
    for kind in ("cosine", "linear"):
        assert at(9000, kind) == pytest.approx(0.1)
        assert at(10**12, kind) == pytest.approx(0.1)
    assert at(10**12, "constant") == pytest.approx(1.0)


def test_the_rate_never_rises_after_warm_up():
    for kind in ("cosine", "linear", "constant"):
        rates = [at(t, kind) for t in range(1000, 12_000, 97)]
        assert rates == sorted(rates, reverse=True)


def test_alpha_falls_linearly_and_never_below_zero():
    merging = MergingConfig(alpha=0.2, decay_tokens=1000)
    values = [merging_alpha(t, merging) for t in (0, 250, 1000, 10**9)]
    assert values == pytest.approx([0.2, 0.15, 0.0, 0.0])
    assert min(values) >= 0.0


def test_own_experts_come_to_count_as_all_others():
    loss = LossConfig(owned_balance=0.7, owned_balance_tokens=1000)
    values = [owned_balance(t, loss) for t in (0, 500, 1000, 10**9)]
    assert values == pytest.approx([0.7, 0.85, 1.0, 1.0])
    assert owned_balance(0, LossConfig()) == 1.0
