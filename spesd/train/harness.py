"""A model of ours behind the interface of the lm-evaluation-harness (the extra `eval`).

Decides how the harness's text becomes tokens and its wishes for sampling ours. Which tasks there
are and how they are scored is the harness's matter. Nothing but `spesd eval --tasks` imports this.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from spesd.data.tokenizer import Tokenizer
from spesd.errors import Unavailable, UsageError
from spesd.model.generate import Sampling, generate
from spesd.model.transformer import MoETransformer
from spesd.train.perplexity import Window, score

MOST_TOKENS = 256  # generated where a task does not say how many
SEED = 0


class HarnessModel(TemplateLM):
    """One model with its tokenizer; contexts longer than the run's lose their beginning."""

    def __init__(self, model: MoETransformer, tokenizer: Tokenizer, context: int) -> None:
        super().__init__()
        self.model, self._words, self._context = model, tokenizer, context
        self.asked = False  # a request has come: what fails from now on is no task's loading

    @property
    def eot_token_id(self) -> int:
        """What ends a document, and comes before the first."""
        return self._words.eos_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the ids of a text; we add no special tokens."""
        return self._words.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        self.asked = True
        end = [self.eot_token_id]
        wanted = []
        for _, before, after in requests:
            before = before or end
            wanted.append(Window(before + after, len(before)))
        return [(s.logprob, s.greedy) for s in score(self.model, wanted, self._context)]

    def loglikelihood_rolling(self, requests: Sequence[Any], **kwargs: Any) -> list[float]:
        """Return the log-probability of whole texts, each token predicted once."""
        self.asked = True
        texts = (request.args[0] for request in requests)
        wanted = [Window([self.eot_token_id, *self._words.encode(text)], 1) for text in texts]
        return [s.logprob for s in score(self.model, wanted, self._context)]

    def generate_until(self, requests: Sequence[Any], **kwargs: Any) -> list[str]:
        """Continue each prompt up to the first of its stop words; likeliest tokens by default."""
        self.asked = True
        return [self._continue(*request.args) for request in requests]

    def _continue(self, prompt: str, wishes: Mapping[str, Any]) -> str:
        stops = wishes.get("until") or []
        stops = [stops] if isinstance(stops, str) else [s for s in stops if s]
        drawn = bool(wishes.get("do_sample", float(wishes.get("temperature") or 0) > 0))
        sampling = Sampling(
            temperature=float(wishes.get("temperature") or 1.0) if drawn else 0.0,
            top_p=float(wishes.get("top_p") or 1.0),
            max_context=self._context,
            eos_id=self.eot_token_id,
        )
        most = int(wishes.get("max_gen_toks") or wishes.get("max_new_tokens") or MOST_TOKENS)
        ids = self._words.encode(prompt) or [self.eot_token_id]
        generator = torch.Generator().manual_seed(SEED)
        text = ""
        for text in self._growing(generate(self.model, ids, most, sampling, generator)):
            found = [text.index(stop) for stop in stops if stop in text]
            if found:
                return text[: min(found)]
        return text

    def _growing(self, tokens: Iterator[int]) -> Iterator[str]:
        made: list[int] = []
        for token in tokens:
            if token < self._words.vocab_size:  # the model may have more rows than there are words
                made.append(token)
                yield self._words.decode(made)


def run_tasks(
    model: HarnessModel, names: Sequence[str], limit: int | None, folder: Path | None
) -> dict[str, Any]:
    """Return {harness, limit, tasks: {task: {metric: {value, stderr, higher_is_better}}}}.

    `folder` has the user's own tasks as YAML files. Raises UsageError for a task that there is
    not, Unavailable for one whose data cannot be had.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if folder is not None and not folder.is_dir():
        raise UsageError(f"there is no folder {folder} of tasks.")
    manager = TaskManager(include_path=None if folder is None else str(folder))
    known = set(manager.all_tasks)
    for name in names:
        if name not in known:
            raise UsageError(
                f"the harness has no task {name!r}; `lm_eval ls tasks` lists them, and --task-path "
                "names a folder of your own."
            )
    if not names:
        raise UsageError("--tasks names no task.")
    try:
        found = simple_evaluate(
            model, tasks=list(names), limit=limit, task_manager=manager, log_samples=False,
            bootstrap_iters=1000,
        )  # fmt: skip
    except Exception as error:  # the harness and its datasets raise what they like
        if model.asked:
            raise
        first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".")
        raise Unavailable(
            f"the tasks {', '.join(names)} cannot be loaded: {first}; those of the harness need a "
            "network for their data."
        ) from None
    better = found.get("higher_is_better") or {}
    tasks = {name: _scores(row, better.get(name) or {}) for name, row in found["results"].items()}
    return {"harness": version("lm_eval"), "limit": limit, "tasks": tasks}


def _scores(row: Mapping[str, Any], better: Mapping[str, Any]) -> dict[str, Any]:
    """Turn {"acc,none": 0.5, "acc_stderr,none": 0.1} into {"acc": {value, stderr, ...}}."""
    scores = {}
    for key, value in row.items():
        metric, comma, kind = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        name = metric if kind == "none" else f"{metric},{kind}"
        scores[name] = {
            "value": _finite(value),
            "stderr": _finite(row.get(f"{metric}_stderr,{kind}")),
            "higher_is_better": better.get(metric),
        }
    return scores


def _finite(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if is_number else None
