"""The two smallest layers, with the exact rounding of the Hugging Face classes we export to.

Decides how a norm rounds. It never initialises a weight: `transformer.init_weights` does, so that
building a large model costs no random numbers.

Shapes: `...D` any leading dimensions, D features in, O features out.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class Linear(nn.Module):
    """A matrix `weight` [O, D] without bias, uninitialised."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., O]."""
        return F.linear(x, self.weight)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, with a gain `weight` [D]."""

    def __init__(self, d: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Norm [..., D]."""
        y: Tensor = _Norm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return y


class _Norm(torch.autograd.Function):
    """fp32 inside, cast back before the gain: the order decides the last bit.

    `F.rms_norm` rounds otherwise in bf16. Written as single operations the norm keeps two copies
    of its input for the backward pass; four norms a layer made that a sixth of all activations.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x.float()
        scale = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return weight * (x32 * scale).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed = x.float() * scale
        dy32 = dy.float()
        d_weight = (dy32 * normed).flatten(0, -2).sum(dim=0).to(weight.dtype)
        d_normed = dy32 * weight.float()
        # d normed / d x: what remains orthogonal to the vector, scaled
        overlap = (d_normed * normed).mean(dim=-1, keepdim=True)
        dx = d_normed.addcmul_(normed, overlap, value=-1).mul_(scale)
        return dx.to(x.dtype), d_weight, None
