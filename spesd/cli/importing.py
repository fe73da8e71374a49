"""`spesd import`: a Hugging Face model as a run.toml with weights to start from."""

import re
from pathlib import Path
from typing import Any

import click

from spesd.errors import ConfigError, UsageError

SEQ_LEN = 2048  # at most; a shorter model's own length
UPCYCLE = ("experts", "top_k", "noise_std", "noise_fraction", "router_init", "router_std", "seed")


def import_model(model: Path, out: Path, *, upcycle: bool, **options: Any) -> None:
    """Write `out`/run.toml, `out`/weights and, if there is one, `out`/tokenizer.json."""
    given = {name: options[name] for name in UPCYCLE if options[name] is not None}
    if given and not upcycle:
        raise UsageError(f"--{next(iter(given)).replace('_', '-')} goes with --upcycle.")
    from spesd.checkpoint.folder import new_folder
    from spesd.checkpoint.importing import Upcycling, import_weights
    from spesd.checkpoint.load import WEIGHTS
    from spesd.checkpoint.source import Source
    from spesd.model.foreign import upcycled

    foreign = _described(model, upcycle)
    upcycling = Upcycling(**given) if upcycle else None
    shape = foreign.model
    if upcycling is not None:
        shape = upcycled(foreign, upcycling.experts, upcycling.top_k)
    tokenizer = _tokenizer(model, shape.vocab_size)
    with new_folder(out) as temp:
        with Source(model) as source:
            weights = import_weights(source, foreign, upcycling, temp / WEIGHTS)
        if tokenizer is not None:
            (temp / "tokenizer.json").write_bytes(tokenizer)
        text = _run_toml(model, min(foreign.max_positions, SEQ_LEN), weights, tokenizer)
        (temp / "run.toml").write_text(text, encoding="utf-8")
    if tokenizer is None:
        click.echo(
            f"spesd: {model} has no tokenizer.json; put the model's own into {out} before you "
            "start the run.",
            err=True,
        )
    click.echo(f"spesd start {out / 'run.toml'}")


def _described(model: Path, upcycle: bool) -> Any:
    """Read config.json; UsageError if it is no model of ours or --upcycle does not suit it."""
    from spesd.checkpoint.source import read_json
    from spesd.model.foreign import read_config

    if not model.is_dir():
        raise UsageError(f"{model} is not a folder: give a Hugging Face model directory.")
    try:
        foreign = read_config(read_json(model / "config.json"))
    except ConfigError as error:
        raise UsageError(f"{model} cannot be imported: {error}") from None
    dense = foreign.family == "dense"
    if dense and not upcycle:
        raise UsageError(f"{model} is a dense model; --upcycle makes experts of it.")
    if upcycle and not dense:
        raise UsageError(f"{model} has experts already; leave --upcycle out.")
    return foreign


def _tokenizer(model: Path, vocab_size: int) -> bytes | None:
    """Return the bytes of the model's tokenizer.json, after checking that it is the model's."""
    from spesd.data.tokenizer import FileTokenizer

    path = model / "tokenizer.json"
    if not path.exists():
        return None
    size = FileTokenizer(path).vocab_size
    if size > vocab_size:
        raise UsageError(
            f"{path} has {size} tokens and the model's embeddings {vocab_size} rows: they do not "
            "belong together; give the model its own tokenizer.json."
        )
    return path.read_bytes()


def _run_toml(model: Path, seq_len: int, weights: Any, tokenizer: bytes | None) -> str:
    import dataclasses

    from spesd.data.bytes_json import byte_tokenizer_json
    from spesd.presets import imported_toml

    name = re.sub(r"[^A-Za-z0-9._-]+", "-", model.resolve().name)[:64].strip("-") or "imported"
    by_bytes = tokenizer == byte_tokenizer_json()
    chosen = {
        "model": dataclasses.asdict(weights.model),
        "data": {"seq_len": seq_len},
        "tokenizer": {} if by_bytes else {"kind": "file", "path": "tokenizer.json"},
        "start": {"kind": "weights", "path": "weights", "digest": weights.digest},
    }
    return imported_toml(name, chosen)
