"""What a peer of a run will need: memory, traffic and time, before anything is downloaded.

Decides by arithmetic alone: `memory` counts bytes, `fit` chooses the layout, and this adds what
travels in a round. Nothing here imports torch.
"""

from dataclasses import dataclass, replace
from typing import Any

from spesd.config import RunConfig
from spesd.errors import UsageError
from spesd.fit import choose, device_kind, layouts, memory_plan, refuse_too_many
from spesd.memory import Layout, count_parameters
from spesd.peerconfig import PeerConfig

_WIRE_BYTES = {"fp32": 4, "bf16": 2}
# Floating point operations a second that a training step gets out of a machine: a consumer card in
# bf16, two CPU cores in fp32. Only for a first idea; --speed gives one's own tokens a second.
_SPEED = {"cuda": 2e13, "cpu": 1e11}
_PASSES = 6  # operations per active parameter and token: two forward, four backward


@dataclass(frozen=True, kw_only=True)
class Link:
    """A peer's link in bits a second; 0 where it is not known."""

    up: int = 0
    down: int = 0


@dataclass(frozen=True, kw_only=True)
class Swarm:
    """What is assumed of the others: as many experts and as fast as this peer."""

    peers: int
    tokens_per_s: float = 0.0  # of one peer; 0: estimated from its device


def traffic(run: RunConfig, k: int, peers: int) -> dict[str, int]:
    """Return the bytes that one peer receives and sends in a round with all peers there.

    Shared parameters come from every partner; each owner's bundle of every expert comes once to
    everybody else. All peers are taken to own `k` experts, so what is sent is what is received.
    """
    count = count_parameters(run.model)
    others = peers - 1
    partners = min(run.round.gossip_fanout or others, others)
    experts = run.model.n_experts
    owners = max(1.0, peers * k / experts)
    foreign = (experts - k) * owners if others else 0.0
    co_owned = k * min(owners - 1, partners)
    parts = partners * count.shared + (foreign + co_owned) * count.expert
    size = round(_WIRE_BYTES[run.round.wire] * parts)
    return {"down": size, "up": size}


def peer_plan(
    run: RunConfig, peer: PeerConfig, budget_bytes: int | None, link: Link, swarm: Swarm
) -> dict[str, Any]:
    """Return the whole plan as a dict for JSON; `budget_bytes` None: as much as it takes.

    Raises UsageError if not even one expert fits.
    """
    refuse_too_many(run, peer.own)
    wanted = peer.own or run.swarm.experts_per_peer
    budget = budget_bytes or 2**62
    layout = choose(run, peer, budget, wanted)
    if layout is None or (peer.own and layout.k < peer.own):
        raise UsageError(_does_not_fit(run, peer, budget, layout))
    most = choose(run, peer, budget, run.model.n_experts)
    memory = memory_plan(run, layout, peer.device)
    count = count_parameters(run.model)
    tokens = run.round.local_steps * run.data.tokens_per_step
    assumed = _SPEED[device_kind(peer.device)] / (_PASSES * count.active)
    speed = swarm.tokens_per_s or assumed
    moved = traffic(run, layout.k, swarm.peers)
    seconds = {
        name: 8 * moved[name] / rate if rate else None
        for name, rate in (("down", link.down), ("up", link.up))
    }
    known = [s for s in seconds.values() if s is not None]
    training_s = tokens / speed
    return {
        "run": {"name": run.name, "id": run.run_id},
        "model": {
            "total": count.total,
            "active": count.active,
            "shared": count.shared,
            "expert": count.expert,
            "experts": run.model.n_experts,
        },
        "layout": {
            "own": layout.k,
            "largest_own": most.k if most else layout.k,
            "frozen": layout.frozen,
            "recompute": layout.recompute,
            "rows": layout.rows,
            "half": layout.half,
            "moments8": layout.moments8,
        },
        "memory": {
            "frozen_weights": memory.frozen_weights,
            "trained_weights": memory.trained_weights,
            "moments": memory.moments,
            "gradients": memory.gradients,
            "activations": memory.activations,
            "working": memory.working,
            "logits": memory.logits,
            "overhead": memory.overhead,
            "peak": memory.peak,
            "budget": budget_bytes,
        },
        "round": {
            "peers": swarm.peers,
            "tokens": tokens,
            "tokens_per_s": speed,
            "speed_is_assumed": not swarm.tokens_per_s,
            "training_s": training_s,
            "bytes": moved,
            "link_s": seconds,
            "share_of_training": max(known) / training_s if known else None,
        },
    }


def _does_not_fit(run: RunConfig, peer: PeerConfig, budget: int, layout: Layout | None) -> str:
    wanted = peer.own or 1
    smallest = min(
        memory_plan(run, replace(one, k=wanted), peer.device).peak for one in layouts(run, peer)
    )
    what = f"{wanted} experts" if wanted > 1 else "even one expert"
    owned = f" ({layout.k} would)" if layout else ""
    return (
        f"{what} of this run needs {smallest / 1e9:.2f} GB and does not fit into "
        f"{budget / 1e9:.2f} GB{owned}; give more with --vram, own fewer, "
        'hold AdamW\'s moments in 8 bits (moments = "int8" in peer.toml), or choose a smaller run.'
    )
