"""The documents that nobody trains on, and the batches that every peer evaluates on.

A document is held out by the hash of its text, so every peer that has it decides alike, wherever
its file lies and whoever else takes part. Never trains, never shuffles by peer.
"""

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from spesd.config import DataConfig
from spesd.data.sources import Documents
from spesd.data.tokenizer import Tokenizer
from spesd.errors import Unavailable

SEARCHED = 20_000  # documents of a large source in which held-out ones are looked for

Batch = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


class HeldOut:
    """The held-out set of a run's sources.

    `loaded[i]` has the texts of `sources[i]` where they are in memory, else None. If no document's
    hash falls under the share, the one with the smallest hash is held out.
    """

    def __init__(
        self,
        config: DataConfig,
        seed: int,
        sources: list[Documents],
        loaded: list[list[str] | None],
    ) -> None:
        self.config, self._seed = config, seed
        self._sources, self._loaded = sources, loaded
        self._only: str | None = None
        self._batches: dict[int, list[Batch]] = {}
        if not any(self._below(t) for t in self._searched()):
            self._only = min(self._searched(), key=self._hash, default=None)
            if self._only is None:
                raise Unavailable("the data sources hold no text; give other paths.")

    def _searched(self) -> Iterator[str]:
        for documents, texts in zip(self._sources, self._loaded, strict=True):
            yield from self._texts_of(documents, texts)

    @staticmethod
    def _texts_of(documents: Documents, texts: list[str] | None) -> Iterator[str]:
        if texts is not None:
            yield from texts
            return
        for number, text in enumerate(documents.in_order()):
            if number >= SEARCHED:
                return
            yield text

    def _hash(self, text: str) -> int:
        digest = hashlib.sha256(f"{self._seed}:held-out:{text}".encode("utf-8", "replace")).digest()
        return int.from_bytes(digest[:8], "big")

    def _below(self, text: str) -> bool:
        return self._hash(text) < self.config.held_out * 2**64

    def is_held_out(self, text: str) -> bool:
        """Tell whether nobody may train on this document."""
        return self._below(text) if self._only is None else text == self._only

    def _held(self, documents: Documents, texts: list[str] | None) -> Iterator[str]:
        found = (t for t in self._texts_of(documents, texts) if self.is_held_out(t))
        # by hash, a short set is drawn from the whole source and not from its beginning
        return found if texts is None else iter(sorted(set(found), key=self._hash))

    def _in_turn(self) -> Iterator[str]:
        """Yield held-out documents, one from each source in turn."""
        waiting = [self._held(d, t) for d, t in zip(self._sources, self._loaded, strict=True)]
        while waiting:
            for held in list(waiting):
                text = next(held, None)
                if text is None:
                    waiting.remove(held)
                else:
                    yield text

    def batches(self, count: int, tokenizer: Tokenizer) -> list[Batch]:
        """Return at least one batch and at most `count`; a short set is repeated to fill one.

        They are kept, because every evaluation asks for the same ones again.
        """
        if count not in self._batches:
            self._batches = {count: self._cut(max(count, 1), tokenizer)}
        return self._batches[count]

    def _cut(self, count: int, tokenizer: Tokenizer) -> list[Batch]:
        rows, length = self.config.batch_size, self.config.seq_len
        size = rows * length
        tokens: list[int] = []
        for text in self._in_turn():
            tokens += [*tokenizer.encode(text), tokenizer.eos_id]
            if len(tokens) > count * size:
                break
        while len(tokens) <= size:
            tokens += tokens
        found = []
        for at in range(0, len(tokens) - size, size):
            flat = np.asarray(tokens[at : at + size + 1], dtype=np.int64)
            found.append((flat[:-1].reshape(rows, length), flat[1:].reshape(rows, length)))
        return found[:count]
