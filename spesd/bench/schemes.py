"""The ways of learning that the benchmark compares, and how one of them is measured.

Decides each way's ownership, storage, round length and merging; the run itself (model, tokens,
schedule) is the same for all. What a peer must hold follows from `spesd.memory`.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from spesd.bench.texts import write_domains
from spesd.bench.virtual import Cast, VirtualSwarm, spread
from spesd.config import RunConfig, SourceConfig
from spesd.configtree import from_tree
from spesd.memory import Layout, Storage, plan

_ALONE_AT_MOST = 2  # peers that train alone on mixed data: they are alike


@dataclass(frozen=True, kw_only=True)
class World:
    """One setting in which ways are compared."""

    text: str = "shipped"
    peers: int = 4
    mixed: bool = True  # every peer reads every domain; else peer i reads only domain i
    seed: int = 0
    steps: int = 300


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One way of learning together.

    `share`: experts owned, in those of the reference (n_experts / peers); "all" owns every
    expert, "fit" as many as fit into the reference's bytes.
    """

    name: str
    kind: Literal["alone", "central", "swarm"] = "swarm"
    share: float | Literal["all", "fit"] = 1.0
    frozen: Storage = "bf16"
    moments8: bool = False
    wire: Literal["bf16", "fp32"] = "bf16"
    local_steps: int = 5
    alpha: float = 0.0
    merge_every: int = 1  # rounds
    owned_balance: float = 1.0


ALONE = Scheme(name="alone", kind="alone", share="all")
CENTRAL = Scheme(name="central", kind="central", share="all")
FEDAVG = Scheme(name="FedAvg", share="all", wire="fp32", local_steps=25)
REFERENCE = Scheme(
    name="SPES, as the reference", frozen="fp32", wire="fp32", local_steps=25, alpha=0.1,
    owned_balance=0.7,
)  # fmt: skip
OURS = Scheme(name="ours", share="fit", frozen="int8", moments8=True)


def run_config(world: World, sources: Sequence[SourceConfig], scheme: Scheme) -> RunConfig:
    """Return the run: 0.9 million parameters, 16 experts, bytes, 512 tokens a step and peer."""
    data = {"seq_len": 64, "batch_size": 8, "eval_batches": 32, "held_out": 0.03}
    total = world.steps * data["seq_len"] * data["batch_size"] * world.peers
    tree: dict[str, Any] = {
        "seed": world.seed,
        "model": {"d_model": 64, "n_layers": 2, "ffn": 128, "n_experts": 16, "top_k": 2},
        "optimizer": {"lr": 3e-3},
        "schedule": {"warmup_tokens": total // 15, "total_tokens": total},
        "round": {"local_steps": scheme.local_steps, "wire": scheme.wire},
        "merging": {
            "interval_rounds": scheme.merge_every if scheme.alpha else 0,
            "alpha": scheme.alpha,
            "decay_tokens": total // 2,
        },
        "loss": {"owned_balance": scheme.owned_balance, "owned_balance_tokens": total // 5},
        "data": data,
    }
    config = from_tree(RunConfig, tree)
    return replace(config, data=replace(config.data, sources=tuple(sources)))


def state_bytes(run: RunConfig, layout: Layout) -> int:
    """Return what a peer holds between steps and in their worst moment, activations apart."""
    needed = plan(run.model, seq_len=64, batch_size=8, layout=layout, device="cpu")
    return needed.frozen_weights + needed.trained_weights + needed.moments + needed.gradients


def layout_of(scheme: Scheme, run: RunConfig, peers: int) -> Layout:
    """Return how many experts a peer owns and how it holds the rest."""
    experts = run.model.n_experts
    layout = Layout(k=experts, rows=8, frozen=scheme.frozen, moments8=scheme.moments8)
    if scheme.share == "all":
        return layout
    if scheme.share != "fit":
        return replace(layout, k=min(experts, round(scheme.share * experts / peers)))
    allowed = state_bytes(run, Layout(k=experts // peers, rows=8, frozen="fp32"))
    fits = [k for k in range(1, experts + 1)
            if state_bytes(run, replace(layout, k=k)) <= allowed]  # fmt: skip
    return replace(layout, k=max(fits, default=1))


def make(scheme: Scheme, world: World, folder: Path, swarm: type[VirtualSwarm]) -> VirtualSwarm:
    """Build the swarm that learns in this way."""
    sources = write_domains(world.text, world.peers, folder)
    run = run_config(world, sources, scheme)
    layout = layout_of(scheme, run, world.peers)
    domains: list[Sequence[SourceConfig]] = (
        [sources] * world.peers if world.mixed else [(s,) for s in sources]
    )
    everything = tuple(range(run.model.n_experts))
    if scheme.kind == "central":
        rows = run.data.batch_size * world.peers
        return swarm(
            Cast(run=run, domains=[sources], owned=[everything], layout=layout, rows=rows), folder
        )
    if scheme.kind == "alone":
        domains = domains[:_ALONE_AT_MOST] if world.mixed else domains
        owned = [everything] * len(domains)
        alone = Cast(run=run, domains=domains, owned=owned, layout=layout, contributors=world.peers)
        return swarm(alone, folder)
    owned = spread(world.peers, run.model.n_experts, layout.k)
    return swarm(Cast(run=run, domains=domains, owned=owned, layout=layout), folder)


def measure(
    scheme: Scheme, world: World, swarm: type[VirtualSwarm] = VirtualSwarm
) -> dict[str, Any]:
    """Train in one way in one setting; return its held-out loss and what it cost a peer."""
    torch.set_num_threads(1)
    began = time.monotonic()
    fast = Path("/dev/shm")  # bundles are written with fsync, which a memory disk makes free
    with tempfile.TemporaryDirectory(dir=fast if fast.is_dir() else None) as folder:
        made = make(scheme, world, Path(folder), swarm)
        left = world.steps
        while left:
            steps = min(left, scheme.local_steps)
            made.run_round(steps)
            left -= steps
        loss = made.held_out_loss(_judged(scheme, world))
        layout = made.cast.layout
        return {
            "scheme": scheme.name,
            "loss": loss,
            "k": layout.k,
            "state_bytes": state_bytes(made.config, layout),
            "up_per_step": made.sent_bytes / world.steps,
            "down_per_step": made.fetched_bytes / world.steps,
            "seconds": time.monotonic() - began,
        }


def _judged(scheme: Scheme, world: World) -> int | None:
    """Peers that are evaluated: after a merge all are nearly one, alone none are."""
    return None if scheme.kind == "alone" and not world.mixed else 2
