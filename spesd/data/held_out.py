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
        self._batches: dict[int, dict[str, list[Batch]]] = {}
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

    def texts(self) -> dict[str, Iterator[str]]:
        """Return the held-out documents of each source, by its name."""
        pairs = zip(self._sources, self._loaded, strict=True)
        return {d.source.name: self._held(d, t) for d, t in pairs}

    def batches(self, count: int, tokenizer: Tokenizer) -> dict[str, list[Batch]]:
        """Return about `count` batches in all, by source: as many of each, the first ones more.

        Each source has at least one, even if that makes more than `count`; its held-out text is
        repeated to fill that one. A source without any held-out document is left out. They are
        kept, because every evaluation asks for the same ones again.
        """
        if count not in self._batches:
            found = {}
            for number, (name, texts) in enumerate(self.texts().items()):
                share, more = divmod(count, len(self._sources))
                if cut := self._cut(texts, max(share + (number < more), 1), tokenizer):
                    found[name] = cut
            self._batches = {count: found}
        return self._batches[count]

    def _cut(self, texts: Iterator[str], count: int, tokenizer: Tokenizer) -> list[Batch]:
        rows, length = self.config.batch_size, self.config.seq_len
        size = rows * length
        tokens: list[int] = []
        for text in texts:
            tokens += [*tokenizer.encode(text), tokenizer.eos_id]
            if len(tokens) > count * size:
                break
        while tokens and len(tokens) <= size:
            tokens += tokens
        found = []
        for at in range(0, len(tokens) - size, size):
            flat = np.asarray(tokens[at : at + size + 1], dtype=np.int64)
            found.append((flat[:-1].reshape(rows, length), flat[1:].reshape(rows, length)))
        return found[:count]
