"""Weights that a run may start from: one bundle for each part, and a manifest that names them.

Decides the files' form and the digest by which a run's config names them. It does not know where
the weights come from (`importing` does) nor what is done with them.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spesd.checkpoint.bundle import SUFFIX, disk_failure, read_bundle, too_large
from spesd.config import ModelConfig
from spesd.configtree import from_tree
from spesd.errors import ConfigError, DamagedState, Unavailable
from spesd.ids import all_parts, is_digest
from spesd.model.partition import part_shapes
from spesd.swarm.records import StatePart

MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class WeightsPart:
    """One part: the digest and the size in bytes of its bundle."""

    part: str
    digest: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A whole model on disk: its shape, and a bundle for each part in `all_parts` order."""

    model: ModelConfig
    parts: Sequence[WeightsPart]

    def to_bytes(self) -> bytes:
        """Return the manifest, in its one form."""
        tree = {
            "model": dataclasses.asdict(self.model),
            "parts": [dataclasses.asdict(part) for part in self.parts],
        }
        return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()

    @property
    def digest(self) -> str:
        """The name of these weights: 64 hex digits over the shape and every bundle's name."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def state_parts(self) -> tuple[StatePart, ...]:
        """Return the parts as those of a state that no round has changed."""
        return tuple(
            StatePart(part=p.part, round=0, term=0, digest=p.digest, size=p.size)
            for p in self.parts
        )


def bundle_file(folder: Path, digest: str) -> Path:
    """Where the bundle of this name lies in a folder of weights."""
    return folder / f"{digest}{SUFFIX}"


def write_manifest(folder: Path, weights: Weights) -> None:
    """Finish a folder of weights, whose bundles are there."""
    try:
        (folder / MANIFEST).write_bytes(weights.to_bytes())
    except OSError as error:
        raise disk_failure(folder, error) from None


def read_manifest(folder: Path) -> Weights:
    """Read what a folder of weights says of itself; nothing is said of its bundles yet.

    Raises Unavailable if there is no manifest, DamagedState if it is not one.
    """
    path = folder / MANIFEST
    try:
        raw = path.read_bytes()
    except OSError:
        raise Unavailable(
            f"there are no weights in {folder}; `spesd import` writes some, and start.path in "
            "run.toml says where they are."
        ) from None
    try:
        tree = json.loads(raw)
        weights = Weights(
            model=from_tree(ModelConfig, tree["model"]),
            parts=[WeightsPart(**part) for part in tree["parts"]],
        )
        names = [p.part for p in weights.parts]
        whole = names == all_parts(weights.model.n_experts)
        if not whole or not all(is_digest(p.digest) for p in weights.parts):
            raise ValueError("it does not name every part")
        if raw != weights.to_bytes():
            raise ValueError("it is not in the form in which it was written")
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        raise DamagedState(f"{path} is damaged ({error}); import the weights again.") from None
    return weights


def verify(folder: Path, model: ModelConfig, digest: str) -> Weights:
    """Return the weights in `folder`, after reading every byte of them.

    Raises ConfigError if they are of another shape or have another digest than a run's config
    says, Unavailable or DamagedState if a bundle is missing, altered or not finite.
    """
    weights = read_manifest(folder)
    if weights.model != model:
        names = [f.name for f in dataclasses.fields(ModelConfig)]
        odd = next(n for n in names if getattr(weights.model, n) != getattr(model, n))
        raise ConfigError(
            f"the weights in {folder} have model.{odd} = {getattr(weights.model, odd)!r}, and the "
            f"run {getattr(model, odd)!r}: [model] must be as `spesd import` wrote it."
        )
    if digest not in ("", weights.digest):
        raise ConfigError(
            f"the weights in {folder} are not those that start.digest names; remove the digest or "
            "give the right folder as start.path."
        )
    shapes = part_shapes(model)
    for part in weights.parts:
        path = bundle_file(folder, part.digest)
        tensors = read_bundle(path, shapes[part.part], part.digest)
        reason = too_large(tensors)
        if reason or path.stat().st_size != part.size:
            raise DamagedState(f"{path.name}: {reason or 'its size is another'}.")
    return weights
