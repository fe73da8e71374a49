"""Sampling text from a model, one token at a time.

Decides how the next token is drawn. It never keeps keys and values between tokens: simple, and
fast enough to look at a model while it trains.

Shapes: B = 1 sequence, T positions, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spesd.model.transformer import MoETransformer


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to draw. Temperature 0 takes the likeliest token; `top_p` keeps the likeliest tokens
    that reach this probability together, at least the likeliest one.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    max_context: int = 2048  # the model sees at most this many of the last tokens
    eos_id: int | None = None


def generate(
    model: MoETransformer,
    ids: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """Yield up to `max_new_tokens` ids that continue `ids`; ends before `eos_id`.

    `generator` lives on the CPU; with the same seed and model the text is the same. Raises
    ValueError if `ids` is empty.
    """
    if not ids:
        raise ValueError("there is nothing to continue: give at least one token")
    context = list(ids)
    for _ in range(max_new_tokens):
        window = torch.tensor([context[-sampling.max_context :]], device=model.embed.weight.device)
        with torch.no_grad():
            last_D = model.hidden(window).hidden_BTD[0, -1]
            logits_V = (model.head_weight @ last_D).float().cpu()
        token = draw(logits_V, sampling, generator)
        if token == sampling.eos_id:
            return
        context.append(token)
        yield token


def draw(logits_V: Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    """Draw one token id from fp32 logits on the CPU."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    # the likeliest at 0, so that no division by a small temperature overflows towards +inf
    scaled_V = (logits_V - logits_V.max()).double() / sampling.temperature
    probs_V, order_V = scaled_V.softmax(-1).sort(descending=True)
    if sampling.top_p < 1:
        before_V = probs_V.cumsum(-1) - probs_V
        before_V[0] = -1.0  # the likeliest token stays, even where top_p is 0
        probs_V[before_V >= sampling.top_p] = 0.0
    return int(order_V[torch.multinomial(probs_V, 1, generator=generator)])
