"""The peak memory of one training process beside transformers' and beside the plan.

Decides nothing: each row is a process of its own that makes a few steps and tells the largest
resident size that the kernel has seen of it (VmHWM). Linux only.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from spesd.errors import Unavailable
from spesd.fit import memory_plan
from spesd.memory import Layout, Recompute, Storage

STEPS = 3
ROWS: tuple[tuple[int, Storage, Recompute], ...] = (
    (16, "fp32", "none"),
    (4, "fp32", "none"),
    (1, "fp32", "none"),
    (4, "bf16", "none"),
    (1, "bf16", "none"),
    (1, "int8", "none"),
    (1, "int8", "experts"),
    (1, "int8", "layers"),
)


def run(*, size: str = "158M") -> dict[str, Any]:
    """Return measured and planned bytes for every row."""
    base = _measure({"size": size, "hf": True})
    rows: list[dict[str, Any]] = [
        {"what": "transformers", "peak": base, "planned": None, "share": 1.0}
    ]
    from spesd.bench.models import run_of

    for k, frozen, recompute in ROWS:
        asked = {"k": k, "frozen": frozen, "recompute": recompute}
        peak = _measure({"size": size, **asked})
        layout = Layout(k=k, rows=8, frozen=frozen, recompute=recompute)
        rows.append(
            {
                "what": f"ours, k = {k}, {frozen}, recompute {recompute}",
                "peak": peak,
                "planned": memory_plan(run_of(size), layout, "cpu").peak,
                "share": peak / base,
            }
        )
    return {"benchmark": "memory", "size": size, "steps": STEPS, "rows": rows}


def _measure(row: dict[str, Any]) -> int:
    command = [sys.executable, "-m", "spesd.bench.memory", json.dumps(row)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise Unavailable(f"a row of the memory benchmark failed: {last}")
    return int(done.stdout.split()[-1])


def measure_here(row: dict[str, Any]) -> int:
    """Make a few steps in this process; return its largest resident size in bytes."""
    from spesd.train.allocator import return_memory

    return_memory()
    import torch

    from spesd.bench.models import hf_step, our_step, run_of

    torch.set_num_threads(1)
    config = run_of(row["size"])
    with tempfile.TemporaryDirectory() as folder:
        if row.get("hf"):
            step = hf_step(config, Path(folder), half=False)
        else:
            layout = Layout(k=row["k"], rows=0, frozen=row["frozen"], recompute=row["recompute"])
            step = our_step(config, layout, Path(folder))
        for _ in range(STEPS):
            step()
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def table(result: dict[str, Any]) -> str:
    """Return the result as a Markdown table."""
    lines = [
        f"{result['size']} parameters, 8 rows of 256 tokens, fp32, 1 thread; peak resident size of "
        "a process",
        "",
        "| step | peak MB | beside transformers | plan / measured |",
        "|---|---|---|---|",
    ]
    for row in result["rows"]:
        planned = f"{row['planned'] / row['peak']:.3f}" if row["planned"] else ""
        lines.append(
            f"| {row['what']} | {row['peak'] / 1e6:.0f} | {row['share']:.2f}x | {planned} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(measure_here(json.loads(sys.argv[1])))
