"""Dropless routing to experts, with weight gradients for owned experts only.

Decides how tokens reach experts and which gradients are computed. It never knows who owns what:
an expert is owned when its weights require a gradient.

All experts run inside one autograd function. Tokens are sorted by expert, each expert multiplies
its own slice, and the only activations kept for the backward pass are the gate and up projections
(S x 2F): the gathered inputs are gathered again, and the router's gradient is taken from the
hidden side, <h, dy W2>, so that neither inputs nor outputs of the experts are stored per slot.

Shapes: T tokens, D model width, E experts, K experts per token, S = T * K token-slots,
N slots of one expert, F expert width.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from spesd.config import ModelConfig


class Routing(NamedTuple):
    """Where one layer sends its tokens."""

    logits_TE: Tensor
    weight_TK: Tensor  # the dtype of the logits
    expert_TK: Tensor  # int64
    tokens_E: Tensor  # int64: token-slots per expert; sums to T * K


class Router(nn.Module):
    """Softmax over experts in fp32, then the K largest (ties as torch.topk breaks them)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.normalise = config.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(config.n_experts, config.d_model))

    def forward(self, x_TD: Tensor) -> Routing:
        """Choose K experts for each token."""
        logits_TE = F.linear(x_TD, self.weight)
        probs_TE = F.softmax(logits_TE, dim=-1, dtype=torch.float32)
        weight_TK, expert_TK = torch.topk(probs_TE, self.top_k, dim=-1)
        if self.normalise:
            weight_TK = weight_TK / weight_TK.sum(dim=-1, keepdim=True)
        tokens_E = torch.bincount(expert_TK.flatten(), minlength=logits_TE.shape[-1])
        return Routing(logits_TE, weight_TK.to(logits_TE.dtype), expert_TK, tokens_E)


class Expert(nn.Module):
    """One SwiGLU network of one layer: `w1` [2F, D] (gate rows first) and `w2` [D, F]."""

    def __init__(self, d: int, ffn: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(2 * ffn, d))
        self.w2 = nn.Parameter(torch.empty(d, ffn))

    def own(self) -> None:
        """Hold the weights in fp32 and train them."""
        self._hold(torch.float32, trained=True)

    def freeze(self, dtype: torch.dtype) -> None:
        """Hold the weights in `dtype`, without gradients."""
        self._hold(dtype, trained=False)

    def _hold(self, dtype: torch.dtype, *, trained: bool) -> None:
        for name in ("w1", "w2"):
            weight: nn.Parameter = getattr(self, name)
            if weight.dtype != dtype:
                # A parameter whose dtype changes under its gradient accumulator is an error in
                # autograd, so it is replaced; whoever holds parameters looks them up again.
                weight = nn.Parameter(weight.detach().to(dtype))
                setattr(self, name, weight)
            weight.requires_grad_(trained)
            weight.grad = None


def run_experts(x_TD: Tensor, routing: Routing, experts: Sequence[Expert]) -> Tensor:
    """Return the weighted sum of each token's experts, [T, D].

    Weights may be stored in another dtype than the activations; they are cast one expert at a
    time. Under autocast the experts compute in its dtype. The sum over a token's experts runs in
    the order of `routing.expert_TK`, as in Hugging Face's grouped implementation.
    """
    kind = x_TD.device.type
    if torch.is_autocast_enabled(kind):
        x_TD = x_TD.to(torch.get_autocast_dtype(kind))
    order_S = torch.argsort(routing.expert_TK.flatten(), stable=True)
    counts = routing.tokens_E.tolist()  # the one wait for the device in a layer
    weights = [weight for expert in experts for weight in (expert.w1, expert.w2)]
    with torch.autocast(kind, enabled=False):
        out_TD: Tensor = SortedExperts.apply(  # type: ignore[no-untyped-call]
            x_TD, routing.weight_TK, order_S, counts, *weights
        )
    return out_TD


class SortedExperts(torch.autograd.Function):
    """The experts' forward and backward pass; see the module's docstring.

    Inputs: x [T, D], weight [T, K], order [S] (slots sorted by expert, slot = token * K + rank),
    counts (slots per expert), then w1, w2 of every expert. Experts without tokens are skipped; if
    owned, their gradient is zero, as it is with stacked weights.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_TK: Tensor, order_S: Tensor, counts: list[int], *w: Tensor
    ) -> Tensor:
        T, D = x_TD.shape
        S = order_S.shape[0]
        weight_S1 = weight_TK.reshape(S, 1).to(x_TD.dtype)
        gate_up_S2F = x_TD.new_empty(S, w[0].shape[0])
        out_SD = x_TD.new_empty(S, D)
        for e, start, end in _slices(counts):
            slots_N = order_S[start:end]
            x_ND = x_TD.index_select(0, slots_N // (S // T))
            gate_up_N2F = gate_up_S2F[start:end]
            torch.mm(x_ND, w[2 * e].to(x_TD.dtype).t(), out=gate_up_N2F)
            gate_NF, up_NF = gate_up_N2F.chunk(2, dim=-1)
            y_ND = torch.mm(F.silu(gate_NF).mul_(up_NF), w[2 * e + 1].to(x_TD.dtype).t())
            out_SD.index_copy_(0, slots_N, y_ND.mul_(weight_S1.index_select(0, slots_N)))
        ctx.save_for_backward(x_TD, weight_TK, order_S, gate_up_S2F, *w)
        ctx.counts = counts
        return out_SD.view(T, S // T, D).sum(dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_TK, order_S, gate_up_S2F, *w = ctx.saved_tensors
        needed: tuple[bool, ...] = ctx.needs_input_grad[4:]
        S, K = order_S.shape[0], weight_TK.shape[1]
        weight_S1 = weight_TK.reshape(S, 1).to(x_TD.dtype)
        dx_TD = torch.zeros_like(x_TD)
        d_weight_S = torch.zeros_like(weight_S1[:, 0])
        dw = [torch.zeros_like(p) if need else None for p, need in zip(w, needed, strict=True)]
        for e, start, end in _slices(ctx.counts):
            w1, w2 = w[2 * e].to(x_TD.dtype), w[2 * e + 1].to(x_TD.dtype)
            slots_N = order_S[start:end]
            tokens_N = slots_N // K
            weight_N1 = weight_S1.index_select(0, slots_N)
            dy_ND = d_out_TD.index_select(0, tokens_N)
            gate_NF, up_NF = gate_up_S2F[start:end].chunk(2, dim=-1)
            act_NF = F.silu(gate_NF)
            h_NF = act_NF * up_NF
            dh_NF = torch.mm(dy_ND, w2)  # not yet weighted: its product with h is the weight's
            d_weight_S.index_copy_(0, slots_N, (dh_NF * h_NF).sum(dim=-1))
            if needed[2 * e + 1]:
                dw[2 * e + 1] = torch.mm((dy_ND * weight_N1).t(), h_NF).to(w[2 * e + 1].dtype)
            d_gate_NF = torch.ops.aten.silu_backward(dh_NF * up_NF, gate_NF)
            d_gate_up_N2F = torch.cat((d_gate_NF, dh_NF.mul_(act_NF)), dim=-1)
            if needed[2 * e]:
                x_ND = x_TD.index_select(0, tokens_N).mul_(weight_N1)
                dw[2 * e] = torch.mm(d_gate_up_N2F.t(), x_ND).to(w[2 * e].dtype)
            # A token comes once to an expert, so no two rows of this addition meet: the order of
            # the sum is the experts' order on every device.
            dx_TD.index_add_(0, tokens_N, torch.mm(d_gate_up_N2F, w1).mul_(weight_N1))
        d_weight_TK = d_weight_S.view_as(weight_TK).to(weight_TK.dtype)
        return dx_TD, d_weight_TK, None, None, *dw


def _slices(counts: list[int]) -> list[tuple[int, int, int]]:
    """Return (expert, start, end) in the sorted slots, for each expert that has any."""
    slices, start = [], 0
    for e, n in enumerate(counts):
        if n:
            slices.append((e, start, start + n))
        start += n
    return slices
