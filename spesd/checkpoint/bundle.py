"""A bundle: one part's tensors as safetensors bytes, in a file named by its digest.

Decides when bytes are a part: the digest, then names, shapes, dtypes, then finite values, in this
order, before a tensor is given to anybody.
"""

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from spesd.digest import bytes_digest, file_digest
from spesd.errors import DamagedState, ProtocolViolation, SpesdError, Unavailable

# No weight of a model that learns is near it; below it no average of offers can overflow.
MAX_MAGNITUDE = 1e6
SUFFIX = ".safetensors"
_DTYPES = (torch.float32, torch.bfloat16)

Shapes = Mapping[str, tuple[int, ...]]


def write_bundle(folder: Path, tensors: Mapping[str, Tensor]) -> tuple[str, int]:
    """Write tensors into `folder`; return (digest, size in bytes). Nothing to do if it is there.

    Raises Unavailable when the disk does not take it; then no file is left.
    """
    raw = save({name: t.detach().cpu().contiguous() for name, t in sorted(tensors.items())})
    digest = bytes_digest(raw)
    path = folder / f"{digest}{SUFFIX}"
    if _is_whole(path, digest):  # its size says too little: a disk can change bytes in place
        return digest, len(raw)
    temp = folder / f".{digest}.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temp.open("wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        temp.replace(path)
    except OSError as error:
        temp.unlink(missing_ok=True)
        raise disk_failure(folder, error) from None
    return digest, len(raw)


def _is_whole(path: Path, digest: str) -> bool:
    try:
        return file_digest(path) == digest
    except OSError:
        return False


def disk_failure(folder: Path, error: OSError) -> Unavailable:
    """Turn a failed write into a sentence."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Unavailable(f"no space is left for {folder}; free some, or move the home.")
    return Unavailable(f"cannot write into {folder}: {error.strerror}.")


def read_bundle(
    path: Path,
    shapes: Shapes,
    digest: str | None,
    error: type[SpesdError] = DamagedState,
) -> dict[str, Tensor]:
    """Read a part that must have exactly these names and shapes.

    `digest` is checked when given; `error` is raised for whatever is wrong (DamagedState for our
    own files, ProtocolViolation for what a peer made).
    """
    tensors = read_tensors(path, digest, error)
    if tensors.keys() != shapes.keys():
        raise error(f"the bundle {path.name} has other tensors than its part")
    for name in sorted(tensors):
        tensor = tensors[name]
        if tuple(tensor.shape) != tuple(shapes[name]):
            raise error(f"{name} has the shape {tuple(tensor.shape)}, not {tuple(shapes[name])}")
        if tensor.dtype not in _DTYPES:
            raise error(f"{name} has the dtype {tensor.dtype}")
        if not bool(torch.isfinite(tensor).all()):
            raise error(f"{name} has values that are not finite")
    return tensors


def read_tensors(
    path: Path, digest: str | None, error: type[SpesdError] = DamagedState
) -> dict[str, Tensor]:
    """Read a bundle whose names and shapes the caller checks; raises `error` as read_bundle."""
    try:
        raw = path.read_bytes()
    except OSError:
        raise error(f"the bundle {path.name} cannot be read") from None
    if digest is not None and bytes_digest(raw) != digest:
        raise error(f"the bytes of the bundle {path.name} are not what its name says")
    try:
        return load(raw)
    except (SafetensorError, ValueError, KeyError):
        raise error(f"the bundle {path.name} is not in safetensors form") from None


def too_large(tensors: Mapping[str, Tensor]) -> str | None:
    """Return None, or a sentence naming the first tensor with a value over MAX_MAGNITUDE."""
    for name in sorted(tensors):
        if tensors[name].numel() and float(tensors[name].abs().max()) > MAX_MAGNITUDE:
            return f"{name} has values over {MAX_MAGNITUDE:g}"
    return None


def read_inputs(
    part: str, sources: Sequence[Mapping[str, Any]], shapes: Shapes
) -> tuple[list[tuple[int, dict[str, Tensor]]], list[dict[str, str]]]:
    """Read what peers made of a part, in the order given; a bad one is left out and named.

    `sources` are {path, digest, tokens, peer}. Returns [(tokens, tensors)] and, of those left out,
    [{peer, part, reason}].
    """
    inputs, rejected = [], []
    for source in sources:
        try:
            tensors = read_bundle(Path(source["path"]), shapes, source["digest"], ProtocolViolation)
            reason = too_large(tensors)
            if reason:
                raise ProtocolViolation(reason)
        except ProtocolViolation as error:
            rejected.append({"peer": source["peer"], "part": part, "reason": str(error)})
            continue
        inputs.append((int(source["tokens"]), tensors))
    return inputs, rejected
