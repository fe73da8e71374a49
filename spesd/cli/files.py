"""Commands that work on files: new, generate, export."""

from pathlib import Path
from typing import Any

import click

from spesd.daemon.home import write_atomically
from spesd.errors import UsageError


def write_preset(name: str, output: Path, scale: float) -> None:
    """Write a preset's run.toml; never over a file that is there."""
    from spesd.presets import preset_toml

    text = preset_toml(name, scale)
    if output.exists():
        raise UsageError(f"{output} exists; choose another name or remove it.")
    if not output.parent.is_dir():
        raise UsageError(f"there is no folder {output.parent}; create it first.")
    write_atomically(output, text.encode())


def print_sample(checkpoint: Path, prompt: str, tokens: int, **sampling: Any) -> None:
    """Stream a continuation of `prompt` to stdout."""
    import torch

    from spesd.checkpoint.load import load_model
    from spesd.model.generate import Sampling, generate

    loaded = load_model(checkpoint)
    tokenizer = _tokenizer(loaded)
    ids = tokenizer.encode(prompt) or [tokenizer.eos_id]
    draw = Sampling(
        temperature=sampling["temperature"],
        top_p=sampling["top_p"],
        max_context=loaded.run.data.seq_len,
        eos_id=tokenizer.eos_id,
    )
    generator = torch.Generator().manual_seed(sampling["seed"])
    made: list[int] = []
    shown = ""
    click.echo(prompt, nl=False)
    for token in generate(loaded.model, ids, tokens, draw, generator):
        if token >= tokenizer.vocab_size:
            continue  # the model may have more rows than the tokenizer has words
        made.append(token)
        text = tokenizer.decode(made)
        if not text.endswith("\ufffd"):  # half of a character: wait for the rest
            click.echo(text[len(shown) :], nl=False)
            shown = text
    click.echo()


def export_checkpoint(checkpoint: Path, out: Path, dtype: Any) -> Path:
    """Write a Hugging Face directory; return it."""
    from spesd.checkpoint.export import ExportedTokenizer, export_hf
    from spesd.checkpoint.load import find_checkpoint
    from spesd.data.bytes_json import END, byte_tokenizer_json
    from spesd.data.tokenizer import FileTokenizer

    found = find_checkpoint(checkpoint)
    tokenizer = _tokenizer(found)
    if isinstance(tokenizer, FileTokenizer):
        pad_word, pad_id = tokenizer.padding()
        described = ExportedTokenizer(
            file=(found.folder / "tokenizer.json").read_bytes(),
            eos_id=tokenizer.eos_id,
            eos_word=tokenizer.word(tokenizer.eos_id),
            pad_id=pad_id,
            pad_word=pad_word,
        )
    else:
        described = ExportedTokenizer(
            file=byte_tokenizer_json(), eos_id=tokenizer.eos_id, eos_word=END, plain=True
        )
    export_hf(found, out, described, dtype)
    return out


def _tokenizer(loaded: Any) -> Any:
    from spesd.data.tokenizer import load_tokenizer

    path = loaded.folder / "tokenizer.json"
    given = path if loaded.run.tokenizer.kind == "file" else None
    return load_tokenizer(loaded.run.tokenizer, given, loaded.run.model.vocab_size)
