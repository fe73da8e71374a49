"""The training loss: cross-entropy and three regularisers.

Decides the formulas (SPES, training details; Switch Transformer for balance, ST-MoE for z-loss).
It never decides their weights (`LossConfig`).

The output layer and its loss are one autograd function that walks over the rows in chunks, so
that logits for a large vocabulary are never whole in memory: with 151,665 tokens and 2,048 rows
they, and two fp32 copies, would be 3.1 GB.

Shapes: R rows (positions) of the batch, C rows of a chunk, D model width, V vocabulary, T tokens,
E experts.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from spesd.memory import head_chunk_rows
from spesd.model.moe import Routing


class LossOutput(NamedTuple):
    """The loss of one batch. Only `total` carries a gradient; the rest are fp32 scalars, in
    nats or unweighted.
    """

    total: Tensor
    cross_entropy: Tensor
    load_balance: Tensor  # 1.0 at perfect balance
    router_z: Tensor
    output_z: Tensor
    tokens_per_expert_E: Tensor  # int64, summed over layers


def load_balance(
    routings: Sequence[Routing], favoured: Collection[int] = (), factor: float = 1.0
) -> Tensor:
    """Return the mean over layers of E * sum_e f_e * (n_e / (T K)) * mean_t p_te.

    n_e are the token-slots of expert e in that layer, p the router's full softmax. It is 1.0 when
    tokens or probabilities are spread evenly, up to E / K when all go to the same K experts. Per
    layer and not pooled: pooling lets one layer's imbalance hide behind another's.

    f_e is `factor` for the favoured experts and 1 for others: a peer whose own experts are charged
    less sends them more of its tokens (SPES, the decayed balance loss).
    """
    terms = []
    for routing in routings:
        T, E = routing.logits_TE.shape
        mean_p_E = F.softmax(routing.logits_TE, dim=-1, dtype=torch.float32).mean(dim=0)
        share_E = routing.tokens_E / (T * routing.expert_TK.shape[1])
        if favoured:
            share_E[sorted(favoured)] *= factor
        terms.append(E * torch.dot(share_E.to(mean_p_E.dtype), mean_p_E))
    return torch.stack(terms).mean()


def router_z(routings: Sequence[Routing]) -> Tensor:
    """Return the mean over tokens and layers of logsumexp(router logits) squared."""
    terms = [r.logits_TE.float().logsumexp(dim=-1).square().mean() for r in routings]
    return torch.stack(terms).mean()


def head_loss(
    h_RD: Tensor, head_VD: Tensor, targets_R: Tensor, z_weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (cross_entropy + z_weight * output_z, cross_entropy, output_z), means over rows.

    output_z is the mean of logsumexp(logits) squared. Only the first carries a gradient. The
    gradients are computed in the forward pass, chunk by chunk, while the logits are there.
    """
    kind = h_RD.device.type
    compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else h_RD.dtype
    with torch.autocast(kind, enabled=False):
        total, cross_entropy, output_z = _HeadLoss.apply(  # type: ignore[no-untyped-call]
            h_RD.to(compute), head_VD, targets_R, z_weight, torch.is_grad_enabled()
        )
    return total, cross_entropy, output_z


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_RD: Tensor, head_VD: Tensor, targets_R: Tensor, z_weight: float, train: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        R, V = h_RD.shape[0], head_VD.shape[0]
        cast_VD = head_VD.to(h_RD.dtype)
        wide = torch.promote_types(h_RD.dtype, torch.float32)
        ce = torch.zeros((), dtype=wide, device=h_RD.device)
        z = torch.zeros_like(ce)
        dh_RD = torch.empty_like(h_RD) if train else None
        d_head_VD = torch.zeros_like(head_VD) if train and head_VD.requires_grad else None
        C = head_chunk_rows(V)
        for row in range(0, R, C):
            h_CD, target_C1 = h_RD[row : row + C], targets_R[row : row + C, None]
            logits_CV = torch.mm(h_CD, cast_VD.t()).to(wide)
            lse_C1 = logits_CV.logsumexp(dim=-1, keepdim=True)
            ce += (lse_C1 - logits_CV.gather(1, target_C1)).sum()
            z += lse_C1.square().sum()
            if dh_RD is None:
                continue
            # d total / d logits = (softmax * (1 + 2 z_weight lse) - onehot) / R, in place
            d_CV = logits_CV.sub_(lse_C1).exp_().mul_((1 + 2 * z_weight * lse_C1) / R)
            d_CV.scatter_add_(1, target_C1, torch.full_like(lse_C1, -1.0 / R))
            d_CV = d_CV.to(h_RD.dtype)
            torch.mm(d_CV, cast_VD, out=dh_RD[row : row + C])
            if d_head_VD is not None and d_head_VD.dtype == d_CV.dtype:
                d_head_VD.addmm_(d_CV.t(), h_CD)
            elif d_head_VD is not None:
                d_head_VD += torch.mm(d_CV.t(), h_CD)
        ce, z = ce / R, z / R
        ctx.save_for_backward(dh_RD, d_head_VD)
        ctx.mark_non_differentiable(ce, z)
        return ce + z_weight * z, ce, z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # In place, as a second copy of a large vocabulary's gradient would be the peak of the
        # step; a second backward pass through the same loss is refused by autograd.
        gradients = [None if g is None else g.mul_(d_total) for g in ctx.saved_tensors]
        return (*gradients, None, None, None)
