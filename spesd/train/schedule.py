"""Learning rate, merging strength and balance over the swarm's progress.

Decides them as functions of the tokens that the whole swarm has trained on. It never looks at a
peer's own uptime or step count: a joiner takes the progress with the state and is where all are.
"""

import math

from spesd.config import LossConfig, MergingConfig, OptimizerConfig, ScheduleConfig


def learning_rate(tokens: int, optimizer: OptimizerConfig, schedule: ScheduleConfig) -> float:
    """Return the learning rate after `tokens` tokens of the swarm.

    Linear from 0 over `warmup_tokens`, then `kind` down to `final_fraction` of the peak at
    `total_tokens`, constant from there on. `constant` stays at the peak. At 0 tokens the rate is
    0: pass the tokens *after* the coming step if the first step should count.
    """
    if tokens < schedule.warmup_tokens:
        return optimizer.lr * tokens / schedule.warmup_tokens
    if schedule.kind == "constant":
        return optimizer.lr
    span = schedule.total_tokens - schedule.warmup_tokens
    done = min(1.0, (tokens - schedule.warmup_tokens) / span)
    left = 1.0 - done if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return optimizer.lr * (schedule.final_fraction + (1.0 - schedule.final_fraction) * left)


def merging_alpha(tokens: int, merging: MergingConfig) -> float:
    """Return expert merging's alpha after `tokens` tokens: linear to 0 at `decay_tokens`."""
    return merging.alpha * max(0.0, 1.0 - tokens / merging.decay_tokens)


def owned_balance(tokens: int, loss: LossConfig) -> float:
    """Return what owned experts count in the balance loss after `tokens` tokens of the swarm.

    Linear from `owned_balance` to 1 at `owned_balance_tokens` (SPES, the decayed balance loss).
    """
    if loss.owned_balance == 1.0:
        return 1.0
    done = min(1.0, tokens / loss.owned_balance_tokens)
    return loss.owned_balance + (1.0 - loss.owned_balance) * done
