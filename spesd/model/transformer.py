"""The language model: embeddings, layers of attention and experts, output head.

Decides the architecture (OLMoE; with `qk_norm = "per_head"` the Qwen3-MoE variant), which weights
are trained, and their first values. It never moves weights between peers and never reads a
parameter's name to learn what it is for (`partition` does).

Logits equal those of transformers' OlmoeForCausalLM and Qwen3MoeForCausalLM bit by bit, given the
same batch shape, thread count and torch build; tests hold it so.

Shapes: B sequences, T positions, D model width, V vocabulary, E experts.
"""

import hashlib
from collections.abc import Collection
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spesd.config import LossConfig, ModelConfig
from spesd.model.attention import Attention, rotary_tables
from spesd.model.layers import Linear, RMSNorm
from spesd.model.loss import LossOutput, head_loss, load_balance, router_z
from spesd.model.moe import Expert, Router, Routing, run_experts


class HiddenOutput(NamedTuple):
    """The network without its output head."""

    hidden_BTD: Tensor  # after the final norm
    routings: list[Routing]  # one per layer

    @property
    def tokens_per_expert_E(self) -> Tensor:
        """Token-slots that each expert saw, summed over layers (int64)."""
        return torch.stack([routing.tokens_E for routing in self.routings]).sum(dim=0)


class ModelOutput(NamedTuple):
    """What a forward pass gives."""

    logits_BTV: Tensor
    router_logits: list[Tensor]  # one [B * T, E] per layer
    tokens_per_expert_E: Tensor  # int64, summed over layers


class Block(nn.Module):
    """One layer: attention, then experts, each behind a norm and beside a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, config.rms_eps)
        self.attention = Attention(config)
        self.moe_norm = RMSNorm(config.d_model, config.rms_eps)
        self.router = Router(config)
        self.experts = nn.ModuleList(
            Expert(config.d_model, config.ffn) for _ in range(config.n_experts)
        )

    def forward(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Routing]:
        """Return the layer's output [B, T, D] and where its tokens went."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotary)
        flat_TD = self.moe_norm(x_BTD).flatten(0, 1)
        routing = self.router(flat_TD)
        return x_BTD + run_experts(flat_TD, routing, self.each_expert()).view_as(x_BTD), routing

    def each_expert(self) -> list[Expert]:
        """Return the layer's experts, by index."""
        return cast(list[Expert], list(self.experts))


class MoETransformer(nn.Module):
    """The model of a run. Weights are uninitialised until `init_weights` or a load.

    `frozen_dtype` is how experts that are not owned are stored (fp32, or bf16 for half the
    memory and +0.0006 nats; the owner keeps fp32, so errors do not add up).
    """

    def __init__(self, config: ModelConfig, *, frozen_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.frozen_dtype = frozen_dtype
        self.owned: frozenset[int] = frozenset(range(config.n_experts))
        self.embed = Linear(config.d_model, config.vocab_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.d_model, config.rms_eps)
        if not config.tie_embeddings:
            self.head = Linear(config.d_model, config.vocab_size)

    @property
    def head_weight(self) -> nn.Parameter:
        """The output matrix [V, D]; the embedding itself when they are tied."""
        return self.embed.weight if self.config.tie_embeddings else self.head.weight

    def blocks(self) -> list[Block]:
        """Return the layers, first to last."""
        return cast(list[Block], list(self.layers))

    def hidden(self, ids_BT: Tensor) -> HiddenOutput:
        """Run all but the output head on token ids (int64)."""
        x_BTD = F.embedding(ids_BT, self.embed.weight)
        rotary = rotary_tables(self.config, x_BTD)
        routings = []
        for block in self.blocks():
            x_BTD, routing = block(x_BTD, rotary)
            routings.append(routing)
        return HiddenOutput(self.norm(x_BTD), routings)

    def forward(self, ids_BT: Tensor) -> ModelOutput:
        """Return logits for the token after each position."""
        out = self.hidden(ids_BT)
        logits_BTV = F.linear(out.hidden_BTD, self.head_weight)
        return ModelOutput(logits_BTV, [r.logits_TE for r in out.routings], out.tokens_per_expert_E)

    def loss(self, ids_BT: Tensor, targets_BT: Tensor, weights: LossConfig) -> LossOutput:
        """Return the loss of predicting `targets_BT`: the ids shifted by one, all of them real.

        total = cross_entropy + weights.load_balance * load_balance + weights.router_z * router_z
        + weights.output_z * output_z; the formulas are in `loss`. Without gradients (evaluation)
        no gradient is computed.
        """
        out = self.hidden(ids_BT)
        total, cross_entropy, output_z = head_loss(
            out.hidden_BTD.flatten(0, 1), self.head_weight, targets_BT.flatten(), weights.output_z
        )
        balance, z = load_balance(out.routings), router_z(out.routings)
        total = total + weights.load_balance * balance + weights.router_z * z
        return LossOutput(
            total, cross_entropy, balance.detach(), z.detach(), output_z, out.tokens_per_expert_E
        )

    def set_owned(self, experts: Collection[int]) -> None:
        """Train the shared parameters and these experts; freeze the others.

        Owned experts are held in fp32, others in `frozen_dtype`; values are kept, but for the
        rounding to `frozen_dtype`. Gradients are dropped. Parameters whose dtype changes are
        replaced, so rebuild the optimizer afterwards. Raises ValueError for an index that is not
        an expert of this model.
        """
        strangers = set(experts) - set(range(self.config.n_experts))
        if strangers:
            raise ValueError(f"no such experts: {sorted(strangers)}")
        self.owned = frozenset(experts)
        self.zero_grad(set_to_none=True)
        self.requires_grad_(True)
        for block in self.blocks():
            for index, expert in enumerate(block.each_expert()):
                if index in self.owned:
                    expert.own()
                else:
                    expert.freeze(self.frozen_dtype)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Set norm gains to 1 and every matrix to normal(0, init_std).

        A matrix depends on (seed, its name) only, drawn in fp32 on the CPU: peers that build the
        model on other devices, in another order or in part get the same values.
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            parameter.copy_(values.normal_(0.0, self.config.init_std, generator=generator))

    def num_parameters(self, *, trained_only: bool = False) -> int:
        """Count parameters, tied ones once; works on the meta device."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad or not trained_only)
