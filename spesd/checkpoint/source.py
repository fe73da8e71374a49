"""A Hugging Face model directory, read tensor by tensor.

Decides what is a model directory and whether its files hold the tensors that a model needs, from
the files' headers alone. It never knows what a tensor is for.
"""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spesd.checkpoint.bundle import MAX_MAGNITUDE
from spesd.errors import UsageError

_INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that must hold a JSON object; UsageError if it is not there or is another."""
    try:
        tree = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(
            f"there is no {path.name} in {path.parent}: give a Hugging Face model directory."
        ) from None
    except (OSError, ValueError, RecursionError):
        raise UsageError(f"{path} is not a readable JSON file; download it again.") from None
    if not isinstance(tree, dict):
        raise UsageError(f"{path} is not a JSON object; download it again.")
    return tree


class Source:
    """The tensors of a directory, by name. Use it in a `with`."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}  # by tensor
        self._stack = contextlib.ExitStack()
        try:
            for path in _files(folder):
                opened = self._stack.enter_context(_open(path))
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    if name in self._files:
                        raise UsageError(f"two files of {folder} have the tensor {name}.")
                    self._files[name] = opened
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def check(self, needed: Mapping[str, tuple[int, ...]], ignored: set[str]) -> None:
        """Raise UsageError unless these tensors, in these shapes, and no others are there."""
        for name, shape in needed.items():
            if name not in self._files:
                raise UsageError(f"the tensor {name} is missing; download the model again.")
            view = self._files[name].get_slice(name)
            if tuple(view.get_shape()) != shape:
                raise UsageError(
                    f"{name} has the shape {list(view.get_shape())} and config.json says "
                    f"{list(shape)}: they are of two models."
                )
            if view.get_dtype() not in _DTYPES:
                raise UsageError(
                    f"{name} has the dtype {view.get_dtype()}; only fp32, bf16 and fp16 weights "
                    "can be imported."
                )
        for name in sorted(self._files.keys() - needed.keys() - ignored):
            if not name.endswith("rotary_emb.inv_freq"):  # old files keep this table
                raise UsageError(
                    f"the tensor {name} has no place in the model that config.json describes."
                )

    def read(self, name: str) -> Tensor:
        """Return a tensor, fp16 widened to fp32; UsageError if it is no weight of a model."""
        try:
            tensor: Tensor = self._files[name].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UsageError(f"the tensor {name} cannot be read ({error}).") from None
        if not bool(torch.isfinite(tensor).all()):
            raise UsageError(f"{name} has values that are not finite; the model is damaged.")
        if tensor.numel() and float(tensor.abs().max()) > MAX_MAGNITUDE:
            raise UsageError(f"{name} has values over {MAX_MAGNITUDE:g}; the model is damaged.")
        return tensor.float() if tensor.dtype == torch.float16 else tensor


def _files(folder: Path) -> list[Path]:
    """Return the directory's safetensors files: those that its index names, or the single one."""
    if (folder / _INDEX).is_file():
        index = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise UsageError(f"{folder / _INDEX} has no weight_map; download it again.")
        names = sorted({str(name) for name in index.values()})
        if odd := [name for name in names if Path(name).name != name]:
            raise UsageError(f"{folder / _INDEX} names {odd[0]!r}, which is outside the folder.")
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if not single.is_file():
        raise UsageError(
            f"there is no model.safetensors in {folder}; only safetensors files are read: convert "
            "the model, or download that form of it."
        )
    return [single]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise UsageError(f"{path} is missing; download the model again.") from None
    except (SafetensorError, OSError):
        raise UsageError(
            f"{path} is cut short or not in safetensors form; download it again."
        ) from None
