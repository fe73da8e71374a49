"""A checkpoint as a Hugging Face model directory, written with safetensors alone.

Decides the files and their names; what the tensors are called is `model.partition`'s and what the
config says is `model.hf`'s. The directory appears whole or not at all, and is written part by part:
no more than one file's tensors are in memory.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from spesd.checkpoint.bundle import read_bundle
from spesd.checkpoint.folder import new_folder
from spesd.checkpoint.load import Found
from spesd.model.hf import family_of, generation_config, hf_config
from spesd.model.partition import part_shapes, part_to_hf

FILE_BYTES = 2_000_000_000  # a file is closed when it would become larger
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class ExportedTokenizer:
    """What the directory says of the tokenizer; ids outside the model's vocabulary are None."""

    file: bytes  # tokenizer.json
    eos_id: int | None
    eos_word: str | None
    pad_id: int | None = None
    pad_word: str | None = None
    plain: bool = False  # special words in a text are text, as our byte tokenizer has it

    def config(self, max_length: int) -> dict[str, Any]:
        """Return tokenizer_config.json."""
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_length,
            "clean_up_tokenization_spaces": False,
            "bos_token": None,
            "eos_token": self.eos_word,
            "pad_token": self.pad_word or self.eos_word,
            "split_special_tokens": self.plain,
        }


def export_hf(found: Found, out: Path, tokenizer: ExportedTokenizer, dtype: Precision) -> None:
    """Write the checkpoint `found` to the new directory `out`.

    Raises UsageError if `out` exists and is not empty or the model has no stock class,
    DamagedState if a bundle is not what it was, Unavailable if the disk does not take it.
    """
    run = found.run
    described = hf_config(
        run.model,
        max_positions=run.data.seq_len,
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
        dtype=str(DTYPES[dtype]).removeprefix("torch."),
    )
    with new_folder(out) as temp:
        _write_tensors(found, temp, DTYPES[dtype])
        _write_json(temp / "config.json", described)
        ends = generation_config(eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id)
        _write_json(temp / "generation_config.json", ends)
        (temp / "tokenizer.json").write_bytes(tokenizer.file)
        _write_json(temp / "tokenizer_config.json", tokenizer.config(run.data.seq_len))


def _write_tensors(found: Found, folder: Path, dtype: torch.dtype) -> None:
    """Write model.safetensors, or several files and their index."""
    files: list[tuple[Path, list[str]]] = []
    total = 0
    for tensors in _grouped(found, dtype):
        path = folder / f"part-{len(files)}"
        save_file(tensors, path, metadata={"format": "pt"})
        files.append((path, list(tensors)))
        total += sum(t.numel() * t.element_size() for t in tensors.values())
    if len(files) == 1:
        files[0][0].rename(folder / "model.safetensors")
        return
    where: dict[str, str] = {}
    for number, (path, names) in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        path.rename(folder / name)
        where |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    _write_json(folder / "model.safetensors.index.json", index)


def _grouped(found: Found, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each file: whole parts, as many as FILE_BYTES hold."""
    shapes, family = part_shapes(found.run.model), family_of(found.run.model)
    group: dict[str, Tensor] = {}
    size = 0
    for part in found.checkpoint.parts:
        tensors = read_bundle(found.bundle(part.digest), shapes[part.part], part.digest)
        cast = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        del tensors
        more = sum(t.numel() * t.element_size() for t in cast.values())
        if group and size + more > FILE_BYTES:
            yield group
            group, size = {}, 0
        group |= dict(part_to_hf(cast, family))
        size += more
    yield group


def _write_json(path: Path, tree: dict[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
