"""How well a model predicts text: nats per token, perplexity, bits per byte.

Decides which context each token is predicted from, and what is divided by what. Never holds more
than one batch of text, and never trains.

Text is scored as it is trained on: documents joined by the tokenizer's end token and cut into
windows of T tokens, so each token, ends included, is a target once. Bits per byte divide the same
nats by the bytes of the text, so models with other tokenizers compare.

Shapes: B windows, T positions, D model width, N targets of a batch, C of a chunk, V vocabulary.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spesd.config import DataConfig
from spesd.data.tokenizer import Tokenizer
from spesd.memory import head_chunk_rows
from spesd.model.transformer import MoETransformer

BATCH_TOKENS = 8192  # positions scored at once, but always one window
PIECE = 16_384  # characters tokenised at once


class Window(NamedTuple):
    """Tokens of which those from `first` on are targets, each predicted from all before it."""

    ids: list[int]
    first: int


class Score(NamedTuple):
    """What a model says about some targets."""

    logprob: float  # nats, at most 0
    greedy: bool  # each of them was the likeliest token


@dataclass
class Tally:
    """Counts of what was scored; they add up."""

    tokens: int = 0
    bytes: float = 0.0  # of UTF-8
    nats: float = 0.0

    def __add__(self, other: "Tally") -> "Tally":
        """Return both together."""
        return Tally(self.tokens + other.tokens, self.bytes + other.bytes, self.nats + other.nats)

    def to_json(self) -> dict[str, float | int | None]:
        """Return the counts and their ratios; null where nothing was scored, or it overflows."""
        loss = self.nats / self.tokens if self.tokens else None
        bits = self.nats / math.log(2) / self.bytes if self.bytes else None
        return {
            "tokens": self.tokens,
            "bytes": round(self.bytes),
            "nats_per_token": loss,
            "perplexity": None if loss is None or loss > 700 else math.exp(loss),
            "bits_per_byte": bits,
        }


def weighted_mean(loss_by_source: Mapping[str, float], config: DataConfig) -> float:
    """Return the mean over those sources by their weights: the mixture that is trained on."""
    weights = [s.weight for s in config.sources if s.name in loss_by_source]
    losses = [loss_by_source[s.name] for s in config.sources if s.name in loss_by_source]
    if len(losses) == 1:
        return losses[0]  # not w * loss / w, which rounds
    return sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)


def measure(
    model: MoETransformer,
    tokenizer: Tokenizer,
    texts: Iterable[str],
    *,
    context: int,
    max_tokens: int | None = None,
) -> Tally:
    """Score documents, at most `max_tokens` of their tokens.

    Bytes of a text that `max_tokens` cuts are counted by the share of its tokens.
    """
    tally = Tally()
    waiting: list[Window] = []
    for window in _packed(tokenizer, texts, tally, context=context, max_tokens=max_tokens):
        waiting.append(window)
        if len(waiting) * context >= BATCH_TOKENS:
            tally.nats -= sum(s.logprob for s in _score_batch(model, waiting))
            waiting = []
    if waiting:
        tally.nats -= sum(s.logprob for s in _score_batch(model, waiting))
    return tally


def _packed(
    tokenizer: Tokenizer,
    texts: Iterable[str],
    tally: Tally,
    *,
    context: int,
    max_tokens: int | None,
) -> Iterator[Window]:
    """Yield the windows of joined documents, and count in `tally` what is in them."""
    left = [tokenizer.eos_id]  # the first token of all follows an end, as any other document's
    for ids, size in _pieces(tokenizer, texts):
        room = len(ids) if max_tokens is None else min(len(ids), max_tokens - tally.tokens)
        tally.tokens += room
        tally.bytes += size if room == len(ids) else size * room / len(ids)
        left += ids[:room]
        at = 0
        while len(left) - at > context:
            yield Window(left[at : at + context + 1], 1)
            at += context  # the last token is the next window's first input
        left = left[at:]
        if tally.tokens == max_tokens:
            break
    if len(left) > 1:
        yield Window(left, 1)


def _pieces(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[tuple[list[int], int]]:
    """Yield (tokens, bytes) of the documents, piece by piece, each document with its end."""
    for text in texts:
        for at in range(0, len(text), PIECE):
            piece = text[at : at + PIECE]
            ids = tokenizer.encode(piece)
            end = [tokenizer.eos_id] if at + PIECE >= len(text) else []
            yield ids + end, len(piece.encode("utf-8", "replace"))


def score(model: MoETransformer, wanted: Sequence[Window], context: int) -> list[Score]:
    """Score targets of any number, each from up to `context` tokens before it.

    More targets than fit are scored in several windows, the last of which is filled with context.
    """
    cut: list[tuple[int, Window]] = []
    for number, (ids, first) in enumerate(wanted):
        for begin in range(first, len(ids), context):
            end = min(begin + context, len(ids))
            start = max(0, end - 1 - context)
            cut.append((number, Window(ids[start:end], begin - start)))
    cut.sort(key=lambda item: len(item[1].ids), reverse=True)  # alike lengths waste no padding
    found = [Score(0.0, True)] * len(wanted)
    while cut:
        rows = max(BATCH_TOKENS // max(len(cut[0][1].ids) - 1, 1), 1)
        batch, cut = cut[:rows], cut[rows:]
        scores = _score_batch(model, [window for _, window in batch])
        for (number, _), (logprob, greedy) in zip(batch, scores, strict=True):
            before = found[number]
            found[number] = Score(before.logprob + logprob, before.greedy and greedy)
    return found


@torch.no_grad()
def _score_batch(model: MoETransformer, windows: Sequence[Window]) -> list[Score]:
    """Score windows together: they are filled up at the end, which no target sees."""
    device = model.embed.weight.device
    longest = max(len(w.ids) for w in windows) - 1
    inputs_BT = torch.tensor([w.ids[:-1] + [0] * (longest + 1 - len(w.ids)) for w in windows])
    rows: list[int] = []
    places: list[int] = []
    targets: list[int] = []
    for row, (ids, first) in enumerate(windows):
        rows += [row] * (len(ids) - first)
        places += range(first - 1, len(ids) - 1)
        targets += ids[first:]
    hidden_ND = model.hidden(inputs_BT.to(device)).hidden_BTD[rows, places]
    logprob_N, greedy_N = _head(model, hidden_ND, torch.tensor(targets, device=device))
    counts = [len(ids) - first for ids, first in windows]
    pairs = zip(torch.split(logprob_N, counts), torch.split(greedy_N, counts), strict=True)
    return [Score(float(lp.sum()), bool(greedy.all())) for lp, greedy in pairs]


def _head(model: MoETransformer, hidden_ND: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return (logprob fp64, is the likeliest) of each target; logits are there chunk by chunk."""
    logprobs, greedy = [], []
    C = head_chunk_rows(model.config.vocab_size)
    for h_CD, target_C in zip(torch.split(hidden_ND, C), torch.split(target_N, C), strict=True):
        logits_CV = F.linear(h_CD, model.head_weight).float()
        picked_C = logits_CV.gather(1, target_C[:, None])[:, 0]
        logprobs.append((picked_C - logits_CV.logsumexp(-1)).double().cpu())
        greedy.append((logits_CV.argmax(-1) == target_C).cpu())
    return torch.cat(logprobs), torch.cat(greedy)
