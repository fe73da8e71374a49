"""How much of what a central run gains over training alone each way of learning together closes.

Decides the grid (texts, numbers of peers, mixed or one domain each, seeds) and how its cells become
a table. Every cell is a process's work of its own, two at a time; `schemes` has the ways.
"""

import multiprocessing
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from spesd.bench.schemes import (
    ALONE,
    CENTRAL,
    FEDAVG,
    OURS,
    REFERENCE,
    Scheme,
    World,
    measure,
)

SCHEMES = (
    ALONE,
    CENTRAL,
    FEDAVG,
    REFERENCE,
    replace(REFERENCE, name="SPES, as the reference, every 5 steps", local_steps=5),
    replace(OURS, name="ours, every 25 steps", local_steps=25),
    OURS,
)
WORKERS = 2
_STEPS = 160

Cell = tuple[Scheme, World]


@dataclass(frozen=True)
class Setting:
    """One block of the table."""

    text: str
    peers: int
    mixed: bool

    @property
    def title(self) -> str:
        """How the table calls it."""
        data = "mixed data" if self.mixed else "one domain per peer"
        return f"{self.text}, {self.peers} peers, {data}"


SETTINGS = (
    *(Setting("shipped", peers, mixed) for peers in (4, 8) for mixed in (True, False)),
    *(Setting("sources", 4, mixed) for mixed in (True, False)),
)


def run(*, quick: bool = False) -> dict[str, Any]:
    """Train every cell; return losses, shares of the gap and costs by setting and scheme.

    `quick` is one seed, one setting and few steps: it shows that all of it runs, no more.
    """
    settings = SETTINGS[:1] if quick else SETTINGS
    seeds = (0,) if quick else (0, 1, 2)
    steps = 25 if quick else _STEPS
    began = time.monotonic()
    found = _all(_cells(settings, seeds, steps))
    blocks = [
        {"setting": s.title, "rows": _rows([_of_seed(found, s, seed, steps) for seed in seeds])}
        for s in settings
    ]
    return {
        "benchmark": "learning",
        "steps": steps,
        "seeds": list(seeds),
        "minutes": (time.monotonic() - began) / 60,
        "blocks": blocks,
    }


def _world(setting: Setting, scheme: Scheme, seed: int, steps: int) -> World:
    # a central run reads all domains, whoever else would have had which
    mixed = setting.mixed or scheme.kind == "central"
    return World(text=setting.text, peers=setting.peers, mixed=mixed, seed=seed, steps=steps)


def _cells(settings: Sequence[Setting], seeds: Sequence[int], steps: int) -> list[Cell]:
    cells = {
        (scheme, _world(setting, scheme, seed, steps))
        for setting in settings
        for seed in seeds
        for scheme in SCHEMES
    }
    # the long ones first, so that no worker is left with one at the end
    return sorted(cells, key=lambda c: (-c[1].peers, c[0].local_steps, c[0].name, repr(c[1])))


def _all(cells: Sequence[Cell]) -> dict[Cell, dict[str, Any]]:
    # spawned: a fork would inherit torch's threads, which hang
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=spawn) as pool:
        return dict(zip(cells, pool.map(_measure, cells), strict=True))


def _measure(cell: Cell) -> dict[str, Any]:
    return measure(*cell)


def _of_seed(
    found: dict[Cell, dict[str, Any]], setting: Setting, seed: int, steps: int
) -> list[dict[str, Any]]:
    """Return the results of one seed by scheme, with the share of its own gap that each closes."""
    results = [dict(found[s, _world(setting, s, seed, steps)]) for s in SCHEMES]
    alone, central = (results[SCHEMES.index(s)]["loss"] for s in (ALONE, CENTRAL))
    for result in results:
        result["closed"] = (alone - result["loss"]) / (alone - central)
    return results


def _rows(by_seed: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    rows = []
    for results in zip(*by_seed, strict=True):
        first = results[0]
        row = {k: first[k] for k in ("scheme", "k", "state_bytes", "up_per_step", "down_per_step")}
        for key in ("loss", "closed"):
            values = [r[key] for r in results]
            row[key] = statistics.fmean(values)
            row[f"{key}_spread"] = statistics.stdev(values) if len(values) > 1 else 0.0
        rows.append(row)
    reference = next(r for r in rows if r["scheme"] == REFERENCE.name)["closed"]
    for row in rows:
        row["of_reference"] = row["closed"] / reference
    return rows


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown tables, one for each setting."""
    lines = [
        f"{result['steps']} steps of 512 bytes on every peer, {len(result['seeds'])} seed(s), mean "
        f"± standard deviation; {result['minutes']:.0f} minutes. Gap closed: 0 % is a peer alone, "
        "100 % one central run on everybody's tokens.",
    ]
    for block in result["blocks"]:
        lines += [
            "",
            f"**{block['setting']}**",
            "",
            "| way | experts owned | held-out loss, nats/byte | gap closed | of the reference's | "
            "state, MB | kB a step up / down |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [_line(row) for row in block["rows"]]
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    return (
        f"| {row['scheme']} | {row['k']} | {row['loss']:.4f} ± {row['loss_spread']:.4f} "
        f"| {row['closed']:.0%} ± {row['closed_spread']:.0%} | {row['of_reference']:.2f}x "
        f"| {row['state_bytes'] / 1e6:.2f} "
        f"| {row['up_per_step'] / 1e3:.0f} / {row['down_per_step'] / 1e3:.0f} |"
    )
