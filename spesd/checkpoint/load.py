"""A checkpoint as a model in memory, for those who only read it: generate, export, eval.

Decides which checkpoint a path means. Never writes, and never loads a part whose bytes are not
what the manifest says.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from spesd.checkpoint.bundle import SUFFIX, read_bundle
from spesd.checkpoint.manifest import Checkpoint
from spesd.checkpoint.store import Store
from spesd.checkpoint.weights import read_manifest
from spesd.config import RunConfig, run_config_from_canonical, run_config_from_toml
from spesd.errors import DamagedState, SpesdError, UsageError
from spesd.model.partition import load_part, part_shapes
from spesd.model.transformer import MoETransformer

WEIGHTS = "weights"  # the folder of bundles beside an imported run.toml


@dataclass(frozen=True, kw_only=True)
class Found:
    """A checkpoint on disk, of which nothing but the manifest has been read."""

    run: RunConfig
    checkpoint: Checkpoint
    folder: Path  # the run's folder, or that of imported weights
    bundles: Path

    def bundle(self, digest: str) -> Path:
        """Where the bundle of this name lies."""
        return self.bundles / f"{digest}{SUFFIX}"


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
        "its checkpoints/round-*.json, or a folder that `spesd import` wrote."
    )


def find_checkpoint(path: Path) -> Found:
    """Return the checkpoint that `path` means; imported weights are one of round 0.

    Raises UsageError for a path that is no checkpoint, DamagedState if nothing there is whole.
    """
    if (path / "run.toml").is_file() and (path / WEIGHTS).is_dir():
        return _imported(path)
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
    return Found(run=run, checkpoint=checkpoint, folder=folder, bundles=store.bundles)


def _imported(folder: Path) -> Found:
    run = run_config_from_toml(folder / "run.toml")
    weights = read_manifest(folder / WEIGHTS)
    if weights.model != run.model:
        raise UsageError(f"[model] in {folder / 'run.toml'} is not the shape of its weights.")
    checkpoint = Checkpoint(
        run_id=run.run_id,
        peer_id="",
        round=0,
        global_tokens=0,
        contributors=0,
        parts=weights.state_parts(),
        moments=(),
        owned=(),
        steps=0,
        tokens=0,
        stream={},
    )
    return Found(run=run, checkpoint=checkpoint, folder=folder, bundles=folder / WEIGHTS)


def load_model(path: Path) -> LoadedModel:
    """Load the checkpoint that `path` means, in fp32 on the CPU, ready to evaluate.

    Raises as `find_checkpoint`.
    """
    found = find_checkpoint(path)
    model = MoETransformer(found.run.model)
    shapes = part_shapes(found.run.model)
    for part in found.checkpoint.parts:
        bundle = found.bundle(part.digest)
        load_part(model, part.part, read_bundle(bundle, shapes[part.part], part.digest))
    return LoadedModel(
        model=model.eval(), run=found.run, checkpoint=found.checkpoint, folder=found.folder
    )


def _run(folder: Path) -> RunConfig:
    try:
        raw = (folder / "run.json").read_bytes()
        json.loads(raw)
        return run_config_from_canonical(raw, folder.name)
    except (OSError, ValueError, SpesdError) as error:
        raise DamagedState(f"{folder / 'run.json'} is damaged: {error}.") from None
