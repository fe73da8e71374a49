"""What this machine gives to a run: device, memory, disk, and the layout that they allow.

Decides with `fit`; measures what is free where the user named no figure. Everything is refused
before a byte is downloaded.
"""

import dataclasses
import os
import shutil
from pathlib import Path

from spesd.config import RunConfig, check_coverable
from spesd.errors import Unavailable, UsageError
from spesd.fit import choose, layouts, memory_plan, refuse_too_many
from spesd.memory import Layout, count_parameters
from spesd.peerconfig import PeerConfig, parse_bytes

MEMORY_SHARE = 0.5  # of a machine's free memory: a volunteer's machine is not ours
LESS = 0.8  # of what was planned, after memory ran out


def with_device(config: PeerConfig) -> PeerConfig:
    """Return the config with "auto" resolved: the first CUDA device, or the CPU."""
    if config.device != "auto":
        return config
    import torch

    return dataclasses.replace(config, device="cuda:0" if torch.cuda.is_available() else "cpu")


def pick_layout(run: RunConfig, config: PeerConfig) -> tuple[Layout, int]:
    """Return how this peer holds the run, and the bytes that it was planned into.

    With --own but no --vram the experts asked for are owned in the leanest layout even where the
    plan doubts it: memory measured on a machine in use is only an estimate.
    """
    if config.own:
        check_own(run, config.own)
    budget = parse_bytes(config.vram) if config.vram else _free_memory(config.device)
    wanted = config.own or run.swarm.experts_per_peer
    layout = choose(run, config, budget, wanted)
    short = config.own and (layout is None or layout.k < config.own)
    if short and config.vram:
        least = min(_peak(run, one, config) for one in _with_k(run, config, config.own))
        raise UsageError(
            f"--own {config.own} needs {least / 1e9:.2f} GB and does not fit into "
            f"{budget / 1e9:.2f} GB; lower it, or give more with --vram."
        )
    if short:
        leanest = min(_with_k(run, config, config.own), key=lambda one: _peak(run, one, config))
        return leanest, budget
    if layout is None:
        raise Unavailable(
            f"this run does not fit: not even one expert fits into {budget / 1e9:.2f} GB; give "
            "more with --vram, or choose a smaller run."
        )
    return layout, budget


def plan_again(
    run: RunConfig, config: PeerConfig, layout: Layout, budget: int
) -> tuple[Layout, int]:
    """Return a leaner layout after memory ran out, and the bytes that it was planned into."""
    fixed = memory_plan(run, layout, config.device).overhead
    less = fixed + int(LESS * (min(budget, _peak(run, layout, config)) - fixed))
    found = choose(run, config, less, min(config.own or run.swarm.experts_per_peer, layout.k))
    leanest = min(_with_k(run, config, 1), key=lambda one: _peak(run, one, config))
    return found or leanest, less


def _with_k(run: RunConfig, config: PeerConfig, k: int) -> list[Layout]:
    return [dataclasses.replace(layout, k=k) for layout in layouts(run, config)]


def _peak(run: RunConfig, layout: Layout, config: PeerConfig) -> int:
    return memory_plan(run, layout, config.device).peak


def check_disk(run: RunConfig, layout: Layout, folder: Path) -> None:
    """Refuse to start where the run's files will not fit: before anything is downloaded."""
    count = count_parameters(run.model)
    trained = count.shared + layout.k * count.expert
    frozen = (count.total - trained) * 4  # at most: adopted experts are kept as they travelled
    checkpoint = frozen + 12 * trained  # fp32 and two moments of what we train
    wire = count.total * (2 if run.round.wire == "bf16" else 4)
    need = 3 * checkpoint + 2 * wire  # two kept and one being written; offers of two rounds
    held = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    free = shutil.disk_usage(folder).free
    if free + held < need:
        raise Unavailable(
            f"no space is left for this run: it needs about {need / 1e6:.0f} MB in {folder}, and "
            f"{free / 1e6:.0f} MB are free; free some, or choose another --home."
        )


def check_own(run: RunConfig, own: int) -> None:
    """Refuse an --own that the run cannot use."""
    refuse_too_many(run, own)
    if run.swarm.min_peers == 1:
        return
    check_coverable(run, own)


def _free_memory(device: str) -> int:
    if device.startswith("cuda"):
        import torch

        if not torch.cuda.is_available():
            raise Unavailable(
                f"there is no device {device} here: torch sees no CUDA device; use "
                "--device cpu, or mend the driver."
            )
        free, _ = torch.cuda.mem_get_info(torch.device(device))
        return int(free)
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(pages * MEMORY_SHARE)
