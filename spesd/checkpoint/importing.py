"""A Hugging Face model as weights that a run may start from.

Decides how foreign tensors become parts, and how a dense network becomes several experts: each
starts as that network with a little noise of its own, behind a small random router. It works part
by part, so no more than one part is in memory.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from spesd.checkpoint.bundle import write_bundle
from spesd.checkpoint.source import Source
from spesd.checkpoint.weights import Weights, WeightsPart, write_manifest
from spesd.configtree import fraction, not_negative
from spesd.ids import SHARED, all_parts
from spesd.model.foreign import Foreign, upcycled
from spesd.model.partition import hf_name, part_of, part_shapes

RouterInit = Literal["scaled_normal", "normal", "zeros"]


@dataclass(frozen=True, kw_only=True)
class Upcycling:
    """How experts are made from one network; the defaults break every tie and lose little.

    With a router of zeros and equal experts all tokens would go to the same few experts.
    """

    experts: int = 8
    top_k: int = 2
    noise_std: float = 0.001  # added to `noise_fraction` of each expert's values
    noise_fraction: float = 0.5
    router_init: RouterInit = "scaled_normal"  # normal: std 1
    router_std: float = 0.02  # of scaled_normal
    seed: int = 0

    def __post_init__(self) -> None:
        not_negative("--noise-std", self.noise_std)
        not_negative("--router-std", self.router_std)
        fraction("--noise-fraction", self.noise_fraction)


def import_weights(
    source: Source, foreign: Foreign, upcycling: Upcycling | None, folder: Path
) -> Weights:
    """Write the bundles and manifest of a model into `folder`.

    Raises UsageError, before a bundle is written, unless the source has exactly the tensors of
    `foreign`; later if a value is not finite. Unavailable if the disk does not take it.
    """
    model = foreign.model
    if upcycling is not None:
        model = upcycled(foreign, upcycling.experts, upcycling.top_k)
    shapes = part_shapes(model)
    needed: dict[str, tuple[int, ...]] = {}
    for members in shapes.values():
        for name, shape in members.items():
            sources = hf_name(name, foreign.family)
            for one in sources:
                needed[one] = (shape[0] // len(sources), *shape[1:])
    # tied models may bring the same matrix twice
    source.check(needed, {"lm_head.weight"} if model.tie_embeddings else set())
    held = []
    for part in all_parts(model.n_experts):
        tensors = {}
        for name, shape in shapes[part].items():
            sources = hf_name(name, foreign.family)
            if sources:
                tensors[name] = torch.cat([source.read(one) for one in sources])
            if upcycling is not None:
                tensors[name] = _upcycle(name, shape, tensors.get(name), upcycling)
        digest, size = write_bundle(folder, tensors)
        held.append(WeightsPart(part=part, digest=digest, size=size))
    weights = Weights(model=model, parts=held)
    write_manifest(folder, weights)
    return weights


def _upcycle(
    name: str, shape: tuple[int, ...], values: Tensor | None, upcycling: Upcycling
) -> Tensor:
    """Return what an upcycled model has as `name`: the router made, experts noised, others kept.

    Random numbers depend on (seed, name) only.
    """
    if values is None:
        std = {"zeros": 0.0, "normal": 1.0, "scaled_normal": upcycling.router_std}
        generator = _generator(upcycling.seed, name)
        return torch.randn(shape, generator=generator) * std[upcycling.router_init]
    if part_of(name) == SHARED or not upcycling.noise_std or not upcycling.noise_fraction:
        return values
    generator = _generator(upcycling.seed, name)
    noise = torch.randn(shape, generator=generator).mul_(upcycling.noise_std)
    chosen = torch.rand(shape, generator=generator) < upcycling.noise_fraction
    return values.float() + noise.mul_(chosen)


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:upcycle:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
