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
    weight_TK: Tensor  # the dtype of the logits, or fp32 as Mixtral has it
    expert_TK: Tensor  # int64
    tokens_E: Tensor  # int64: token-slots per expert; sums to T * K


class Router(nn.Module):
    """Softmax over experts in fp32, then the K largest (ties as torch.topk breaks them)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.normalise = config.norm_topk_prob
        self.weights_fp32 = config.qk_norm == "none"  # Mixtral's class alone does not round them
        self.weight = nn.Parameter(torch.empty(config.n_experts, config.d_model))

    def forward(self, x_TD: Tensor) -> Routing:
        """Choose K experts for each token."""
        logits_TE = F.linear(x_TD, self.weight)
        probs_TE = F.softmax(logits_TE, dim=-1, dtype=torch.float32)
        weight_TK, expert_TK = torch.topk(probs_TE, self.top_k, dim=-1)
        if self.normalise:
            weight_TK = weight_TK / weight_TK.sum(dim=-1, keepdim=True)
        tokens_E = torch.bincount(expert_TK.flatten(), minlength=logits_TE.shape[-1])
        if not self.weights_fp32:
            weight_TK = weight_TK.to(logits_TE.dtype)
        return Routing(logits_TE, weight_TK, expert_TK, tokens_E)


class Expert(nn.Module):
    """One SwiGLU network of one layer: `w1` [2F, D] (gate rows first) and `w2` [D, F].

    Owned weights are fp32 parameters. Frozen ones are held in any `Storage`; as int8 the
    parameters hold whole numbers and the buffers `w1_scale` [2F, 1] and `w2_scale` [D, 1] what one
    of them is worth in its row.
    """

    w1_scale: Tensor | None
    w2_scale: Tensor | None

    def __init__(self, d: int, ffn: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(2 * ffn, d))
        self.w2 = nn.Parameter(torch.empty(d, ffn))
        self.register_buffer("w1_scale", None, persistent=False)
        self.register_buffer("w2_scale", None, persistent=False)

    def own(self) -> None:
        """Hold the weights in fp32 and train them."""
        self._hold(torch.float32, trained=True)

    def freeze(self, dtype: torch.dtype) -> None:
        """Hold the weights in `dtype` (fp32, bf16 or int8), without gradients."""
        self._hold(dtype, trained=False)

    def dense(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return `w1` or `w2` as floating point numbers; itself where it is held so."""
        weight: Tensor = getattr(self, name)
        return widen(weight, getattr(self, f"{name}_scale"), dtype)

    @torch.no_grad()
    def put(self, name: str, values: Tensor) -> None:
        """Set `w1` or `w2`, rounded to the form in which it is held."""
        weight: nn.Parameter = getattr(self, name)
        scale: Tensor | None = getattr(self, f"{name}_scale")
        if scale is None:
            weight.copy_(values)
        else:
            whole, new_scale = to_int8_rows(values)
            weight.copy_(whole)
            scale.copy_(new_scale)

    def _hold(self, dtype: torch.dtype, *, trained: bool) -> None:
        for name in ("w1", "w2"):
            weight: nn.Parameter = getattr(self, name)
            if weight.dtype != dtype:
                # A parameter whose dtype changes under its gradient accumulator is an error in
                # autograd, so it is replaced; whoever holds parameters looks them up again.
                values, scale = self.dense(name).detach(), None
                if dtype == torch.int8:
                    values, scale = to_int8_rows(values)
                weight = nn.Parameter(values.to(dtype), requires_grad=False)
                setattr(self, name, weight)
                setattr(self, f"{name}_scale", scale)
            weight.requires_grad_(trained)
            weight.grad = None


def to_int8_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix to int8 with one fp32 scale for each row: ([O, D] int8, [O, 1]).

    The scale has 16 significant bits, so that widening is exact in fp32 and rounding the widened
    matrix again gives the same bits: what is saved and loaded does not drift.
    """
    values32 = values.float()
    scale = values32.abs().amax(dim=1, keepdim=True).div_(127.0).clamp_min_(1e-30)
    bits = scale.view(torch.int32)
    scale = ((bits + 0xFF) & ~0xFF).view(torch.float32)  # up, so that 127 is never passed
    return torch.round(values32 / scale).to(torch.int8), scale


def widen(weight: Tensor, scale: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """Return a matrix as floating point numbers, of `dtype` if one is given."""
    if scale is None:
        return weight if dtype is None else weight.to(dtype)
    # multiplied in fp32: a scale rounded to bf16 would shift whole rows
    wide = torch.mul(weight, scale)
    return wide if dtype is None else wide.to(dtype)


def run_experts(
    x_TD: Tensor, routing: Routing, experts: Sequence[Expert], *, recompute: bool = False
) -> Tensor:
    """Return the weighted sum of each token's experts, [T, D].

    Weights may be stored in another dtype than the activations; they are cast one expert at a
    time. Under autocast the experts compute in its dtype. The sum over a token's experts runs in
    the order of `routing.expert_TK`, as in Hugging Face's grouped implementation. `recompute`
    computes the gate and up projections again in the backward pass instead of keeping them.
    """
    kind = x_TD.device.type
    if torch.is_autocast_enabled(kind):
        x_TD = x_TD.to(torch.get_autocast_dtype(kind))
    order_S = torch.argsort(routing.expert_TK.flatten(), stable=True)
    counts = routing.tokens_E.tolist()  # the one wait for the device in a layer
    weights = [weight for expert in experts for weight in (expert.w1, expert.w2)]
    scales = [scale for expert in experts for scale in (expert.w1_scale, expert.w2_scale)]
    layout = Layout(counts, scales, recompute or not torch.is_grad_enabled())
    with torch.autocast(kind, enabled=False):
        out_TD: Tensor = SortedExperts.apply(  # type: ignore[no-untyped-call]
            x_TD, routing.weight_TK, order_S, layout, *weights
        )
    return out_TD


class Layout(NamedTuple):
    """How the experts' tokens and weights lie; nothing in it takes part in differentiation."""

    counts: list[int]  # token-slots per expert
    scales: list[Tensor | None]  # of each weight, where it is int8
    recompute: bool

    def weight(self, w: Sequence[Tensor], index: int, dtype: torch.dtype) -> Tensor:
        """Return a weight to compute with."""
        return widen(w[index], self.scales[index], dtype)


class SortedExperts(torch.autograd.Function):
    """The experts' forward and backward pass; see the module's docstring.

    Inputs: x [T, D], weight [T, K], order [S] (slots sorted by expert, slot = token * K + rank),
    the layout, then w1, w2 of every expert. Experts without tokens are skipped; if owned, their
    gradient is zero, as it is with stacked weights.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_TK: Tensor, order_S: Tensor, layout: Layout, *w: Tensor
    ) -> Tensor:
        T, D = x_TD.shape
        S, K = order_S.shape[0], weight_TK.shape[1]
        weight_S1 = weight_TK.reshape(S, 1)
        keep = not layout.recompute
        gate_up_S2F = x_TD.new_empty(S if keep else 0, w[0].shape[0])
        out_SD = x_TD.new_empty(S, D, dtype=weight_TK.dtype)  # weighted and summed as it
        for e, start, end in _slices(layout.counts):
            slots_N = order_S[start:end]
            x_ND = x_TD.index_select(0, slots_N // K)
            gate_up_N2F = gate_up_S2F[start:end] if keep else x_TD.new_empty(end - start, len(w[0]))
            torch.mm(x_ND, layout.weight(w, 2 * e, x_TD.dtype).t(), out=gate_up_N2F)
            gate_NF, up_NF = gate_up_N2F.chunk(2, dim=-1)
            w2 = layout.weight(w, 2 * e + 1, x_TD.dtype)
            y_ND = torch.mm(F.silu(gate_NF).mul_(up_NF), w2.t())
            out_SD.index_copy_(0, slots_N, y_ND * weight_S1.index_select(0, slots_N))
        ctx.save_for_backward(x_TD, weight_TK, order_S, gate_up_S2F, *w)
        ctx.layout = layout
        return out_SD.view(T, K, D).sum(dim=1).to(x_TD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_TK, order_S, gate_up_S2F, *w = ctx.saved_tensors
        layout: Layout = ctx.layout
        needed: tuple[bool, ...] = ctx.needs_input_grad[4:]
        S, K = order_S.shape[0], weight_TK.shape[1]
        weight_S1 = weight_TK.reshape(S, 1).to(x_TD.dtype)
        dx_TD = torch.zeros_like(x_TD)
        d_weight_S = torch.zeros_like(weight_S1[:, 0])
        dw = [torch.zeros_like(p) if need else None for p, need in zip(w, needed, strict=True)]
        for e, start, end in _slices(layout.counts):
            w1, w2 = (layout.weight(w, 2 * e + i, x_TD.dtype) for i in (0, 1))
            slots_N = order_S[start:end]
            tokens_N = slots_N // K
            weight_N1 = weight_S1.index_select(0, slots_N)
            dy_ND = d_out_TD.index_select(0, tokens_N)
            if layout.recompute:
                gate_up_N2F = torch.mm(x_TD.index_select(0, tokens_N), w1.t())
            else:
                gate_up_N2F = gate_up_S2F[start:end]
            gate_NF, up_NF = gate_up_N2F.chunk(2, dim=-1)
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
