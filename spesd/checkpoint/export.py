"""A checkpoint as a Hugging Face model directory, written with safetensors alone.

Decides the files and their names; what the tensors are called is `model.partition`'s and what the
config says is `model.hf`'s. The directory appears whole or not at all.
"""

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

from spesd.checkpoint.load import LoadedModel
from spesd.errors import Unavailable, UsageError
from spesd.model.hf import hf_config
from spesd.model.partition import to_hf


def export_hf(
    loaded: LoadedModel, out: Path, *, eos_id: int | None, tokenizer: Path | None
) -> None:
    """Write `loaded` to the new directory `out` in fp32.

    Raises UsageError if `out` exists and is not empty, or the model has no stock class.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not an empty folder; name another one.")
    run = loaded.run
    config = hf_config(
        run.model, max_positions=run.data.seq_len, eos_id=eos_id, pad_id=None, dtype="float32"
    )
    state = {name: p.detach() for name, p in loaded.model.named_parameters()}
    temp = out.with_name(f".{out.name}.tmp")
    try:
        shutil.rmtree(temp, ignore_errors=True)
        temp.mkdir(parents=True)
        save_file(to_hf(state, run.model), temp / "model.safetensors", metadata={"format": "pt"})
        (temp / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if tokenizer is not None:
            shutil.copyfile(tokenizer, temp / "tokenizer.json")
        if out.exists():
            out.rmdir()
        temp.replace(out)
    except OSError as error:
        shutil.rmtree(temp, ignore_errors=True)
        raise Unavailable(f"cannot write {out}: {error.strerror}.") from None
