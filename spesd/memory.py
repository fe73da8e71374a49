"""What a peer needs in memory, before anything is downloaded or built.

Decides by arithmetic alone: it never imports torch, so that `spesd plan` and a peer's first choice
of how many experts to own cost nothing. The terms mirror `model` (what its autograd functions
keep) and `train.optimizer`; tests hold them to what those were measured to take.
"""

from dataclasses import dataclass
from typing import Literal

from spesd.config import ModelConfig

Storage = Literal["fp32", "bf16"]
Device = Literal["cpu", "cuda"]

_STORAGE_BYTES = {"fp32": 4, "bf16": 2}
# What the framework itself takes beside the tensors: code and buffers on the CPU (92 MiB measured,
# torch 2.13), context and allocator slack on a GPU.
_OVERHEAD = {"cpu": 92 * 2**20, "cuda": 800_000_000}


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
    adam: int  # two moments in fp32
    gradients: int
    activations: int  # kept from the forward for the backward pass
    logits: int  # one chunk of logits, twice, and the output matrix's early gradient
    overhead: int  # what the framework takes without any model

    @property
    def peak(self) -> int:
        """Bytes at the worst moment of a step.

        Activations are freed as gradients come into being, so the worst is either the end of the
        forward pass or the end of the backward pass.
        """
        lasting = self.frozen_weights + self.trained_weights + self.adam + self.overhead
        return lasting + max(self.activations + self.logits, self.gradients)


def plan(
    model: ModelConfig, *, tokens_per_step: int, k: int, frozen: Storage, device: Device
) -> MemoryPlan:
    """Return what a peer needs that owns `k` experts and trains on `tokens_per_step` at once.

    `tokens_per_step` is `DataConfig.tokens_per_step`: sequence length times batch size.
    Activations count as fp32. Raises ValueError unless 0 <= k <= n_experts.
    """
    if not 0 <= k <= model.n_experts:
        raise ValueError(f"a peer cannot own {k} of {model.n_experts} experts")
    count = count_parameters(model)
    trained = count.shared + k * count.expert
    chunk = min(head_chunk_rows(model.vocab_size), tokens_per_step)
    return MemoryPlan(
        frozen_weights=_STORAGE_BYTES[frozen] * (model.n_experts - k) * count.expert,
        trained_weights=4 * trained,
        adam=8 * trained,
        gradients=4 * trained,
        activations=4 * tokens_per_step * _kept_per_token(model),
        logits=4 * model.vocab_size * (2 * chunk + model.d_model),
        overhead=_OVERHEAD[device],
    )


def largest_k(
    model: ModelConfig,
    *,
    tokens_per_step: int,
    frozen: Storage,
    device: Device,
    budget_bytes: int,
) -> int | None:
    """Return the most experts that fit into `budget_bytes`; None if not even one does."""
    for k in range(model.n_experts, 0, -1):
        needed = plan(model, tokens_per_step=tokens_per_step, k=k, frozen=frozen, device=device)
        if needed.peak <= budget_bytes:
            return k
    return None


def _kept_per_token(model: ModelConfig) -> int:
    """Return how many numbers the forward pass keeps for each token."""
    d, d_q = model.d_model, model.n_heads * model.head_dim
    d_kv = model.n_kv_heads * model.head_dim
    norms = 4 * d  # input and output of the two norms
    attention = 2 * d_q + 2 * d_kv + model.n_heads  # q, k, v and the output, with its logsumexp
    projections = 0 if model.qk_norm == "none" else d_q + d_kv  # what the QK-norms took
    experts = model.top_k * 2 * model.ffn  # gate and up
    router = 3 * model.n_experts + 8 * model.top_k  # logits, two softmaxes; indices and order
    per_layer = norms + attention + projections + experts + router
    return model.n_layers * per_layer + 2 * d  # the last norm's input, the output's gradient
