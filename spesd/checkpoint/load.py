"""A checkpoint as a model in memory, for those who only read it: generate, export, eval.

Decides which checkpoint a path means. Never writes, and never loads a part whose bytes are not
what the manifest says.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from spesd.checkpoint.bundle import read_bundle
from spesd.checkpoint.manifest import Checkpoint
from spesd.checkpoint.store import Store
from spesd.config import RunConfig, run_config_from_canonical
from spesd.errors import DamagedState, SpesdError, UsageError
from spesd.model.partition import load_part, part_shapes
from spesd.model.transformer import MoETransformer


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A whole model with where it came from."""

    model: MoETransformer
    run: RunConfig
    checkpoint: Checkpoint
    folder: Path  # the run's folder


def run_folder(path: Path) -> Path:
    """Return the run's folder that `path` means: itself, a home with one run, or a manifest.

    Raises UsageError if it is none of these.
    """
    if path.is_file() and path.parent.name == "checkpoints":
        return path.parent.parent
    if (path / "run.json").is_file():
        return path
    runs = sorted(p.parent for p in path.glob("runs/*/run.json"))
    if len(runs) == 1:
        return runs[0]
    if runs:
        listed = ", ".join(str(r) for r in runs)
        raise UsageError(f"{path} holds several runs; name one of {listed}.")
    raise UsageError(
        f"{path} is no checkpoint: give a peer's home, a run's folder (HOME/runs/ID), or one of "
        "its checkpoints/round-*.json."
    )


def load_model(path: Path) -> LoadedModel:
    """Load the checkpoint that `path` means, in fp32 on the CPU, ready to evaluate.

    Raises UsageError for a path that is no checkpoint, DamagedState if nothing there is whole.
    """
    folder = run_folder(path)
    run = _run(folder)
    store = Store(folder)
    if path.is_file():
        checkpoint = store.read(path)
    else:
        newest, damaged = store.newest()
        if newest is None:
            reasons = "; ".join(damaged) or "no round has been saved yet"
            raise DamagedState(f"{folder} holds no whole checkpoint: {reasons}.")
        checkpoint = newest
    model = MoETransformer(run.model)
    shapes = part_shapes(run.model)
    for part in checkpoint.parts:
        bundle = store.bundles / f"{part.digest}.safetensors"
        load_part(model, part.part, read_bundle(bundle, shapes[part.part], part.digest))
    return LoadedModel(model=model.eval(), run=run, checkpoint=checkpoint, folder=folder)


def _run(folder: Path) -> RunConfig:
    try:
        raw = (folder / "run.json").read_bytes()
        json.loads(raw)
        return run_config_from_canonical(raw, folder.name)
    except (OSError, ValueError, SpesdError) as error:
        raise DamagedState(f"{folder / 'run.json'} is damaged: {error}.") from None
