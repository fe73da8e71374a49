"""How a peer holds and computes a run, chosen from the memory that it is given.

Decides between experts owned, storage of frozen experts, recomputation and micro-batch, by
arithmetic alone (`memory`). What the user fixed in peer.toml stays as it is.
"""

from dataclasses import replace

from spesd.config import RunConfig
from spesd.errors import UsageError
from spesd.memory import Device, Layout, MemoryPlan, Recompute, Storage, largest_k, plan
from spesd.peerconfig import PeerConfig

# Time of a step beside the plain one (1 thread, 41 M parameters). Storage costs no time, but int8
# costs 0.006 nats where a peer sees foreign experts, so it comes after the cheap recomputation.
_TIME: dict[Recompute, float] = {"none": 1.0, "experts": 1.12, "layers": 1.3}
_STORAGE: dict[Storage, float] = {"fp32": 1.0, "bf16": 1.0, "int8": 1.15}
_HALVING = 1.02  # each time the micro-batch is halved
# Experts that are worth slowing down for: the paper's share. More are owned where they fit anyway.
_WORTH = 4


def device_kind(device: str) -> Device:
    """Return what memory follows: cuda or cpu."""
    return "cuda" if device.startswith("cuda") else "cpu"


def memory_plan(run: RunConfig, layout: Layout, device: str) -> MemoryPlan:
    """Return what this layout takes in this run."""
    return plan(
        run.model,
        seq_len=run.data.seq_len,
        batch_size=run.data.batch_size,
        layout=layout,
        device=device_kind(device),
    )


def choose(run: RunConfig, peer: PeerConfig, budget_bytes: int, wanted: int = 0) -> Layout | None:
    """Return the fastest layout that owns enough experts; None if not even one expert fits.

    Enough is `wanted` where that is given, else a quarter of the experts. If no layout gets there,
    the one that owns most wins. Of what fits, no more than `wanted` are owned.
    """
    enough = wanted or max(1, run.model.n_experts // _WORTH)
    best: Layout | None = None
    for layout in layouts(run, peer):
        fits = largest_k(
            run.model,
            seq_len=run.data.seq_len,
            batch_size=run.data.batch_size,
            layout=layout,
            device=device_kind(peer.device),
            budget_bytes=budget_bytes,
        )
        if fits is None:
            continue
        fits = min(fits, wanted) if wanted else fits
        if fits >= enough:
            return replace(layout, k=fits)
        if best is None or fits > best.k:
            best = replace(layout, k=fits)
    return best


def refuse_too_many(run: RunConfig, own: int) -> None:
    """Refuse to own more experts than there are."""
    if own > run.model.n_experts:
        raise UsageError(
            f"--own {own} is more than the run's {run.model.n_experts} experts; lower it."
        )


def layouts(run: RunConfig, peer: PeerConfig) -> list[Layout]:
    """Return every layout that the peer's config allows, the fastest first; `k` is 1 in each."""
    storages: tuple[Storage, ...] = ("bf16", "int8") if peer.frozen == "auto" else (peer.frozen,)
    recomputes: tuple[Recompute, ...] = (
        ("none", "experts", "layers") if peer.recompute == "auto" else (peer.recompute,)
    )
    rows = [min(peer.micro_batch, run.data.batch_size)]
    if not peer.micro_batch:
        rows = [run.data.batch_size]
        while rows[-1] > 1:
            rows.append((rows[-1] + 1) // 2)
    found: list[tuple[float, int, Layout]] = []
    for storage in storages:
        for recompute in recomputes:
            for halvings, row in enumerate(rows):
                cost = _TIME[recompute] * _STORAGE[storage] * _HALVING**halvings
                layout = Layout(
                    k=1,
                    rows=row,
                    frozen=storage,
                    recompute=recompute,
                    half=computes_in_half(peer),
                    moments8=peer.moments == "int8",
                )
                found.append((cost, len(found), layout))
    return [layout for _, _, layout in sorted(found, key=lambda entry: entry[:2])]


def computes_in_half(peer: PeerConfig) -> bool:
    """Tell whether matrix products run in bf16: on a GPU unless told otherwise."""
    return peer.precision == "bf16" or (peer.precision == "auto" and peer.device != "cpu")
