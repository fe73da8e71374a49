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
from torch.utils.checkpoint import checkpoint

from spesd.config import LossConfig, ModelConfig
from spesd.memory import Recompute
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

    def forward(
        self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor], recompute: bool = False
    ) -> tuple[Tensor, Routing]:
        """Return the layer's output [B, T, D] and where its tokens went."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotary)
        flat_TD = self.moe_norm(x_BTD).flatten(0, 1)
        routing = self.router(flat_TD)
        y_TD = run_experts(flat_TD, routing, self.each_expert(), recompute=recompute)
        return x_BTD + y_TD.view_as(x_BTD), routing

    def each_expert(self) -> list[Expert]:
        """Return the layer's experts, by index."""
        return cast(list[Expert], list(self.experts))


class MoETransformer(nn.Module):
    """The model of a run. Weights are uninitialised until `init_weights` or a load.

    `frozen_dtype` is how experts that are not owned are stored: fp32, or bf16 for half the memory
    and +0.0006 nats, or int8 for a quarter and +0.006 (the owner keeps fp32, so errors do not add
    up). `recompute` says what the backward pass computes again instead of keeping: nothing, the
    experts' projections (about +12 % time), or whole layers (about +30 %).
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        frozen_dtype: torch.dtype = torch.float32,
        recompute: Recompute = "none",
    ) -> None:
        super().__init__()
        self.config = config
        self.frozen_dtype = frozen_dtype
        self.recompute = recompute
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
            if self.recompute == "layers" and torch.is_grad_enabled():
                x_BTD, routing = checkpoint(
                    block, x_BTD, rotary, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x_BTD, routing = block(x_BTD, rotary, self.recompute == "experts")
            routings.append(routing)
        return HiddenOutput(self.norm(x_BTD), routings)

    def forward(self, ids_BT: Tensor) -> ModelOutput:
        """Return logits for the token after each position."""
        out = self.hidden(ids_BT)
        logits_BTV = F.linear(out.hidden_BTD, self.head_weight)
        return ModelOutput(logits_BTV, [r.logits_TE for r in out.routings], out.tokens_per_expert_E)

    def loss(
        self,
        ids_BT: Tensor,
        targets_BT: Tensor,
        weights: LossConfig,
        *,
        owned_balance: float = 1.0,
    ) -> LossOutput:
        """Return the loss of predicting `targets_BT`: the ids shifted by one, all of them real.

        total = cross_entropy + weights.load_balance * load_balance + weights.router_z * router_z
        + weights.output_z * output_z; the formulas are in `loss`. `owned_balance` scales what
        owned experts add to the balance (1: like all others). Without gradients (evaluation) no
        gradient is computed.
        """
        out = self.hidden(ids_BT)
        total, cross_entropy, output_z = head_loss(
            out.hidden_BTD.flatten(0, 1), self.head_weight, targets_BT.flatten(), weights.output_z
        )
        favoured = self.owned if owned_balance != 1.0 else ()
        balance = load_balance(out.routings, favoured, owned_balance)
        z = router_z(out.routings)
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
        for parameter in self.parameters():
            if parameter.is_floating_point():  # int8 is for frozen experts alone
                parameter.requires_grad_(True)
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
            values.normal_(0.0, self.config.init_std, generator=generator)
            self.put(name, values)

    def put(self, name: str, values: Tensor) -> None:
        """Set a parameter, rounded to the form in which it is held."""
        owner, _, own_name = name.rpartition(".")
        module = self.get_submodule(owner)
        if isinstance(module, Expert):
            module.put(own_name, values)
        else:
            with torch.no_grad():
                module.get_parameter(own_name).copy_(values)

    def dense(self, name: str) -> Tensor:
        """Return a parameter's values, detached, as floating point numbers."""
        owner, _, own_name = name.rpartition(".")
        module = self.get_submodule(owner)
        if isinstance(module, Expert):
            return module.dense(own_name).detach()
        return module.get_parameter(own_name).detach()

    def num_parameters(self, *, trained_only: bool = False) -> int:
        """Count parameters, tied ones once; works on the meta device."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad or not trained_only)
