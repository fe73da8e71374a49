"""Our training step beside transformers' on the same shape, in one process, step by step in turn.

Decides nothing about training: it times `Trainer.step`, data included, and one step of
OlmoeForCausalLM. The best of the steps of each counts, as load of the machine only ever adds.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from spesd.bench.models import Step, hf_step, our_step, run_of
from spesd.memory import Layout

OWNED = (16, 4, 1)


def run(*, size: str = "41M", steps: int = 7, device: str = "cpu") -> dict[str, Any]:
    """Return milliseconds and ratios for every share owned, in fp32 and bf16, on one thread."""
    torch.set_num_threads(1)
    config = run_of(size)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for half in (False, True):
            contenders = {"transformers": hf_step(config, Path(folder), half=half, device=device)}
            for k in OWNED:
                layout = Layout(k=k, rows=0, frozen="fp32", half=half)
                contenders[f"ours, k = {k}"] = our_step(config, layout, Path(folder), device)
            rows += _rows(contenders, steps, "bf16" if half else "fp32")
    return {"benchmark": "step", "size": size, "threads": 1, "device": device, "rows": rows}


def _rows(contenders: dict[str, Step], steps: int, precision: str) -> list[dict[str, Any]]:
    times = _in_turn(contenders, steps)
    base = min(times["transformers"])
    return [
        {
            "precision": precision,
            "what": name,
            "best_ms": 1e3 * min(taken),
            "median_ms": 1e3 * statistics.median(taken),
            "speedup": base / min(taken),
        }
        for name, taken in times.items()
    ]


def _in_turn(contenders: dict[str, Step], steps: int) -> dict[str, Sequence[float]]:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(steps + 1):
        for name, step in contenders.items():
            began = time.perf_counter()
            step()
            if number:  # the first step of each warms up
                times[name].append(time.perf_counter() - began)
    return dict(times)


def table(result: dict[str, Any]) -> str:
    """Return the result as a Markdown table."""
    lines = [
        f"{result['size']} parameters, 8 rows of 256 tokens, {result['threads']} thread, "
        f"{result['device']}; best of interleaved steps",
        "",
        "| precision | step | ms | speed beside transformers |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {r['precision']} | {r['what']} | {r['best_ms']:.0f} | {r['speedup']:.2f}x |"
        for r in result["rows"]
    ]
    return "\n".join(lines)
