"""What a round does to weights: aggregate, merge experts, refuse what is not finite.

Decides the arithmetic, as functions of tensors. It never decides whose offers count or in which
order (`swarm` does), and never opens a bundle. All sums run in fp32, in the order given, so that
the same inputs give the same bits.

Shapes: D model width, F expert width.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

Wire = Literal["bf16", "fp32"]
_WIRE_DTYPE = {"bf16": torch.bfloat16, "fp32": torch.float32}


def to_wire(tensor: Tensor, wire: Wire) -> Tensor:
    """Round to the dtype that travels. Always a copy: training goes on while it is sent."""
    return tensor.detach().to(_WIRE_DTYPE[wire], copy=True).contiguous()


def from_wire(tensor: Tensor) -> Tensor:
    """Widen what travelled to fp32; exact."""
    return tensor.float()


def weights(own_tokens: int, other_tokens: Sequence[int]) -> list[float]:
    """Return the weight of each other peer's offer: its share of all tokens, one's own included.

    Equal shares if nobody trained on anything. The own weight is what is missing to 1.
    """
    total = own_tokens + sum(other_tokens)
    if total == 0:
        return [1.0 / (1 + len(other_tokens))] * len(other_tokens)
    return [tokens / total for tokens in other_tokens]


@torch.no_grad()
def aggregate(own: Tensor, own_sent: Tensor, others: Sequence[tuple[float, Tensor]]) -> None:
    """Move `own`, in place, towards others' offers: x += sum_j w_j * (q(x_j) - q(x)).

    `own_sent` is q(x): one's own offer as it travelled, which may be older than `own`; steps
    trained since are kept, and so is the full-precision residue x - q(x). Where all agree nothing
    moves. With every peer's offer this is the mean weighted by `weights`.
    """
    sent = own_sent.float()
    correction = torch.zeros_like(sent)
    for weight, offer in others:
        correction.add_(offer.to(sent.device).float() - sent, alpha=weight)
    own.add_(correction.to(own.device))


@torch.no_grad()
def merge_experts(
    layers: Iterable[Sequence[tuple[Tensor, Tensor]]],
    owned: Collection[int],
    alpha: float,
    donors: int,
) -> list[dict[int, list[int]]]:
    """Draw owned experts, in place, towards the experts most like them (SPES, expert merging).

    `layers` gives, for each layer, (w1 [2F, D], w2 [D, F]) of every expert. Per layer: likeness is
    the cosine of the gate matrices (the first of the three, rows 0 to F of w1), donors are the
    min(donors, E - 1) likest others, ties to the lower index, and merged = base + alpha *
    mean(donor - base) over all three matrices, from the weights before any merging. Returns, per
    layer, the donors of each owned expert, likest first.
    """
    drawn: list[dict[int, list[int]]] = []
    for experts in layers:
        chosen = _likest([w1.chunk(2)[0] for w1, _ in experts], sorted(owned), donors)
        merged = {
            e: [
                _drawn_to(base, [experts[d][i] for d in chosen[e]], alpha)
                for i, base in enumerate(experts[e])
            ]
            for e in chosen
        }
        for e, tensors in merged.items():
            for base, tensor in zip(experts[e], tensors, strict=True):
                base.copy_(tensor)
        drawn.append(chosen)
    return drawn


def _likest(gates: Sequence[Tensor], owned: Sequence[int], donors: int) -> dict[int, list[int]]:
    # One product at a time: a stacked fp32 copy of a layer would be 0.5 GB for the 7B model.
    norms = [float(gate.float().norm()) for gate in gates]
    chosen = {}
    for e in owned:
        own = gates[e].float().flatten()
        cosine = {
            other: float(own @ gate.float().flatten()) / max(norms[e] * norms[other], 1e-12)
            for other, gate in enumerate(gates)
            if other != e
        }
        chosen[e] = sorted(cosine, key=lambda other: (-cosine[other], other))[:donors]
    return chosen


def _drawn_to(base: Tensor, donors: Sequence[Tensor], alpha: float) -> Tensor:
    if not donors:
        return base.clone()
    base32 = base.float()
    pull = torch.zeros_like(base32)
    for donor in donors:
        pull += donor.float() - base32
    return torch.add(base32, pull, alpha=alpha / len(donors))


def check_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return None, or a sentence that names the first tensor (by name) with a NaN or infinity."""
    for name in sorted(tensors):
        bad = int((~torch.isfinite(tensors[name])).sum())
        if bad:
            return f"{name} has {bad} of {tensors[name].numel()} values that are not finite."
    return None
