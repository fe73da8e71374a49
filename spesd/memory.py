"""What a peer needs in memory, before anything is downloaded or built.

Decides by arithmetic alone: it never imports torch, so that `spesd plan` and a peer's first choice
of how many experts to own cost nothing. The terms mirror `model` (what its autograd functions
keep) and `train.optimizer`; tests hold them to what those were measured to take.
"""

from dataclasses import dataclass, replace
from typing import Literal

from spesd.config import ModelConfig

Storage = Literal["fp32", "bf16", "int8"]
Recompute = Literal["none", "experts", "layers"]
Device = Literal["cpu", "cuda"]

_STORAGE_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
# What the framework itself takes beside the tensors: on the CPU a trainer of a model of no size
# (torch 2.13: 222 MB after the imports, 344 MB after two steps), on a GPU context and slack.
_OVERHEAD = {"cpu": 340_000_000, "cuda": 800_000_000}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a peer holds and computes what it must: everything that trades memory for time."""

    k: int  # experts owned
    rows: int  # sequences that pass through the model at once (the micro-batch)
    frozen: Storage = "bf16"
    recompute: Recompute = "none"
    half: bool = False  # activations and matrix products in bf16 (autocast)
    moments8: bool = False  # AdamW's moments in 8 bits


def head_chunk_rows(vocab_size: int) -> int:
    """Return how many rows' logits the output layer holds at once.

    8 MiB in fp32, which stays in a core's cache (2,048 x 4,096 logits with d = 256: 178 ms
    against 199 ms in one piece), but at least 128 rows, as a thinner matrix product wastes the
    machine.
    """
    return max(128, 2**21 // vocab_size)


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Numbers of parameters."""

    shared: int
    expert: int  # one expert, all layers
    total: int
    active: int  # used for one token


def count_parameters(model: ModelConfig) -> ParameterCount:
    """Count the parameters of a model of this shape; tied embeddings once."""
    d, d_q = model.d_model, model.n_heads * model.head_dim
    d_kv = model.n_kv_heads * model.head_dim
    qk_norm = {"full": d_q + d_kv, "per_head": 2 * model.head_dim, "none": 0}[model.qk_norm]
    attention = 2 * d * d_q + 2 * d * d_kv + qk_norm
    layer = attention + 2 * d + d * model.n_experts  # two norms and the router
    embeddings = model.vocab_size * d * (1 if model.tie_embeddings else 2)
    shared = model.n_layers * layer + d + embeddings
    expert = model.n_layers * 3 * d * model.ffn
    return ParameterCount(
        shared=shared,
        expert=expert,
        total=shared + model.n_experts * expert,
        active=shared + model.top_k * expert,
    )


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes by component, for one peer that trains."""

    frozen_weights: int  # experts of others
    trained_weights: int  # shared parameters and own experts, fp32
    moments: int  # AdamW's two
    gradients: int
    activations: int  # kept from the forward for the backward pass
    working: int  # what one layer's pass holds for a moment
    logits: int  # one chunk of logits, twice, and the output matrix's early gradient
    overhead: int  # what the framework takes without any model
    accumulates: bool  # gradients live while the next micro-batch passes through

    @property
    def peak(self) -> int:
        """Bytes at the worst moment of a step.

        With one micro-batch activations are freed as gradients come into being, so the worst is
        either the end of the forward pass or the end of the backward pass. With several, the
        gradients of the first are there while the second passes through.
        """
        lasting = self.frozen_weights + self.trained_weights + self.moments + self.overhead
        passing = self.activations + self.working + self.logits
        if self.accumulates:
            return lasting + self.gradients + passing
        return lasting + max(passing, self.gradients)


def plan(
    model: ModelConfig, *, seq_len: int, batch_size: int, layout: Layout, device: Device
) -> MemoryPlan:
    """Return what a peer needs that trains on `batch_size` rows of `seq_len` a step.

    Raises ValueError unless 0 <= k <= n_experts and there is at least one row.
    """
    k, rows = layout.k, min(layout.rows, batch_size)
    if not 0 <= k <= model.n_experts:
        raise ValueError(f"a peer cannot own {k} of {model.n_experts} experts")
    if rows < 1:
        raise ValueError("a micro-batch has at least one row")
    count = count_parameters(model)
    trained = count.shared + k * count.expert
    tokens = rows * seq_len
    chunk = min(head_chunk_rows(model.vocab_size), tokens)
    number = 2 if layout.half else 4
    foreign = model.n_experts - k
    # an int8 row has one scale; its matrices have 2F + D rows in each layer
    scales = 4 * model.n_layers * (2 * model.ffn + model.d_model) * foreign
    return MemoryPlan(
        frozen_weights=_STORAGE_BYTES[layout.frozen] * foreign * count.expert
        + (scales if layout.frozen == "int8" else 0),
        trained_weights=4 * trained,
        moments=(2 if layout.moments8 else 8) * trained,
        gradients=4 * trained,
        activations=number * tokens * _kept_per_token(model, layout.recompute),
        working=number * tokens * _working_per_token(model),
        logits=4 * model.vocab_size * (2 * chunk + model.d_model),
        overhead=_OVERHEAD[device],
        accumulates=rows < batch_size,
    )


def largest_k(
    model: ModelConfig,
    *,
    seq_len: int,
    batch_size: int,
    layout: Layout,
    device: Device,
    budget_bytes: int,
) -> int | None:
    """Return the most experts that fit into `budget_bytes`; None if not even one does.

    The layout's own `k` does not count.
    """
    for k in range(model.n_experts, 0, -1):
        tried = replace(layout, k=k)
        needed = plan(
            model, seq_len=seq_len, batch_size=batch_size, layout=tried, device=device
        )  # fmt: skip
        if needed.peak <= budget_bytes:
            return k
    return None


def _working_per_token(model: ModelConfig) -> int:
    """Return how many numbers of each token one layer holds only while it runs.

    The worst is a layer's backward pass: the residual stream, its gradient and the norms' fp32
    copies (6 D), the experts' output by slot (K D), and queries, keys, values and output with
    their gradients, before and after the rotation.
    """
    d_q, d_kv = (n * model.head_dim for n in (model.n_heads, model.n_kv_heads))
    return (6 + model.top_k) * model.d_model + 4 * d_q + 4 * d_kv


def _kept_per_token(model: ModelConfig, recompute: Recompute) -> int:
    """Return how many numbers the forward pass keeps for each token."""
    d, d_q = model.d_model, model.n_heads * model.head_dim
    d_kv = model.n_kv_heads * model.head_dim
    norms = 4 * d  # input and output of the two norms
    attention = 2 * d_q + 2 * d_kv + model.n_heads  # q, k, v and the output, with its logsumexp
    projections = 0 if model.qk_norm == "none" else d_q + d_kv  # what the QK-norms took
    experts = model.top_k * 2 * model.ffn  # gate and up
    router = 3 * model.n_experts + 8 * model.top_k  # logits, two softmaxes; indices and order
    per_layer = norms + attention + projections + router
    if recompute != "experts":
        per_layer += experts
    if recompute == "layers":
        # each layer's input and router stay (the losses read it); one layer's inside comes back
        return model.n_layers * (d + router) + per_layer + 2 * d
    return model.n_layers * per_layer + 2 * d  # the last norm's input, the output's gradient
