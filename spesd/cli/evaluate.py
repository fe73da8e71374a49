"""`spesd eval`: a checkpoint's perplexity on text, or its scores on tasks."""

import contextlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from spesd.errors import Unavailable, UsageError

HEADS = (
    f"{'tokens':>12} {'bytes':>12} {'nats/token':>11} {'perplexity':>11} {'bits/byte':>10}  text"
)
Tree = dict[str, Any]


def evaluate(checkpoint: Path, *, as_json: bool, device: str, **options: Any) -> None:
    """Print how well a checkpoint predicts: `options` are those of the command."""
    _check(options)
    from spesd.checkpoint.load import load_model
    from spesd.cli.files import _tokenizer
    from spesd.train.device import choose_device

    place = choose_device(device)
    if options["tasks"] is None:
        given = _given(options["data"], options["field"])  # a wrong name is told before a long load
    loaded = load_model(checkpoint)
    tokenizer = _tokenizer(loaded)
    loaded.model.to(place)
    tree: Tree = {
        "run": {"name": loaded.run.name, "id": loaded.run.run_id},
        "round": loaded.checkpoint.round,
        "global_tokens": loaded.checkpoint.global_tokens,
        "context": loaded.run.data.seq_len,
    }
    say: Callable[[str], None] = (lambda line: None) if as_json else click.echo
    if options["tasks"] is None:
        texts = given or _held_out(loaded, tokenizer)
        say(_title(tree))
        tree["data"] = "given" if given else "held-out"
        tree |= _measured(loaded, tokenizer, texts, options["max_tokens"], say)
    else:
        tree |= _on_tasks(loaded, tokenizer, options)
        say(_title(tree))
        _show_tasks(tree["tasks"], say)
    if as_json:
        click.echo(json.dumps(tree, allow_nan=False))


def _title(tree: Tree) -> str:
    run = tree["run"]
    return (
        f"run {run['name']} ({run['id'][:8]})  round {tree['round']}  tokens "
        f"{tree['global_tokens']:,}  context {tree['context']:,}"
    )


def _check(options: Tree) -> None:
    if options["tasks"] is None:
        for name in ("limit", "task_path"):
            if options[name] is not None:
                raise UsageError(f"--{name.replace('_', '-')} goes with --tasks.")
        return
    if options["data"] or options["max_tokens"] is not None:
        raise UsageError("--tasks bring their own text: leave --data and --max-tokens out.")
    if importlib.util.find_spec("lm_eval") is None:
        raise Unavailable(
            'tasks need the lm-evaluation-harness; install it with pip install "spesd[eval]".'
        )


def _given(paths: tuple[str, ...], field: str) -> dict[str, Iterable[str]]:
    from spesd.data.given import given_documents

    return {path: given_documents(path, field).in_order() for path in paths}


def _held_out(loaded: Any, tokenizer: Any) -> dict[str, Iterator[str]]:
    """Return the run's held-out documents by source, from where this machine has the sources."""
    from spesd.data.stream import TextStream
    from spesd.peerconfig import peer_config

    home = loaded.folder.parent.parent  # HOME/runs/ID
    run = loaded.run
    stream = TextStream(
        run.data, tokenizer, seed=run.seed, peer_id="eval", paths=peer_config(home, None, {}).data
    )
    return stream.held_out_texts()


def _measured(
    loaded: Any,
    tokenizer: Any,
    texts: dict[str, Any],
    max_tokens: int | None,
    say: Callable[[str], None],
) -> Tree:
    from spesd.train.perplexity import Tally, measure

    say(HEADS)
    total = Tally()
    sources = {}
    for name, documents in texts.items():
        tally = measure(
            loaded.model,
            tokenizer,
            documents,
            context=loaded.run.data.seq_len,
            max_tokens=max_tokens,
        )
        if tally.tokens:
            total += tally
            sources[name] = tally.to_json()
            say(_line(sources[name], name))
    if not total.tokens:
        raise Unavailable(f"there is no text in {', '.join(texts)}.")
    if len(sources) > 1:
        say(_line(total.to_json(), "in all"))
    return {"sources": sources, "total": total.to_json()}


def _line(counts: Tree, name: str) -> str:
    loss, perplexity = f"{counts['nats_per_token']:.4f}", _number(counts["perplexity"], ".3f")
    bits = _number(counts["bits_per_byte"], ".4f")
    return (
        f"{counts['tokens']:>12,} {counts['bytes']:>12,} {loss:>11} {perplexity:>11} {bits:>10}  "
        f"{name}"
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _on_tasks(loaded: Any, tokenizer: Any, options: Tree) -> Tree:
    with contextlib.redirect_stdout(sys.stderr):  # stdout is the answer, and nothing else
        from spesd.train.harness import HarnessModel, run_tasks

        model = HarnessModel(loaded.model, tokenizer, loaded.run.data.seq_len)
        names = [name.strip() for name in options["tasks"].split(",") if name.strip()]
        return run_tasks(model, names, options["limit"], options["task_path"])


def _show_tasks(tasks: Tree, say: Callable[[str], None]) -> None:
    say(f"{'value':>10} {'stderr':>10}  {'metric':24} task")
    for task, scores in tasks.items():
        for metric, score in scores.items():
            value, error = (_number(score[key], ".4f") for key in ("value", "stderr"))
            say(f"{value:>10} {error:>10}  {metric:24} {task}")
