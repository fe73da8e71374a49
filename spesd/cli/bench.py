"""The command bench: run a benchmark, print its table or JSON."""

import importlib
import json
from pathlib import Path
from typing import Any

import click

from spesd.errors import UsageError

_MODULES = {name: f"spesd.bench.{name}" for name in ("step", "memory", "learning")}
_QUICK: dict[str, dict[str, Any]] = {
    "step": {"steps": 2},
    "memory": {"size": "41M"},
    "learning": {"quick": True},
}


def run_bench(name: str, *, size: str | None, quick: bool, as_json: bool, out: Path | None) -> None:
    """Run one benchmark; with `out` its JSON is also written there.

    Raises UsageError for a size that it has not, Unavailable where a library is missing.
    """
    options: dict[str, Any] = dict(_QUICK[name]) if quick else {}
    if size is not None and name == "learning":
        raise UsageError("the learning benchmark has one model: leave --size out.")
    if size is not None:
        options["size"] = size
    if out is not None and not out.parent.is_dir():
        raise UsageError(f"there is no folder {out.parent} for {out.name}; make it first.")
    module = importlib.import_module(_MODULES[name])
    result = module.run(**options)
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
    click.echo(json.dumps(result) if as_json else module.table(result))
