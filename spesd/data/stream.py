"""A peer's own stream of packed batches over the run's sources.

Decides how the sources are mixed and how documents become batches. Never decides the order in one
source (`order`) or what is held out (`held_out`).

Documents are drawn from the sources by weight, so a weight is a share of documents. They are joined
by the tokenizer's end token and cut into rows of T + 1 tokens that overlap by one, so every token
is a target once. Shapes: B = batch_size, T = seq_len.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from spesd.config import DataConfig
from spesd.data.held_out import Batch, HeldOut
from spesd.data.order import Indexed, Reader, Streamed, seeded
from spesd.data.sources import Documents, open_sources
from spesd.data.tokenizer import Tokenizer
from spesd.errors import DamagedState, Unavailable

INDEXED_BYTES = 64 * 2**20  # a source up to this size is held in memory and shuffled whole
BLOCK = 256  # documents of a larger source that are shuffled together
PIECE = 16_384  # characters tokenised at once


class TextStream:
    """One peer's stream. Two peers, or two seeds, overlap by chance only."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        *,
        seed: int,
        peer_id: str,
        paths: Mapping[str, str] | None = None,
    ) -> None:
        """Open the sources (`paths`: where this machine has them, by name).

        Raises ConfigError or Unavailable, in a sentence, for whatever is wrong with a source.
        """
        self.config, self.tokenizer, self.seed = config, tokenizer, seed
        self._sources = open_sources(config, paths or {})
        loaded = [_loaded(documents) for documents in self._sources]
        self._held = HeldOut(config, seed, self._sources, loaded)
        self._readers: list[Reader] = []
        for documents, texts in zip(self._sources, loaded, strict=True):
            key = f"{seed}:{peer_id}:{documents.source.name}"
            self._readers.append(self._reader(documents, texts, key))
        self._weights = [documents.source.weight for documents in self._sources]
        self._mix = f"{seed}:{peer_id}:mix"
        self._drawn = 0  # documents drawn so far
        self._pieces: list[str] = []  # of the last document
        self._taken = 0  # of its pieces that are tokenised
        self._left: list[int] = []  # tokens not yet in a batch: the end of the last piece's

    def _reader(self, documents: Documents, texts: list[str] | None, key: str) -> Reader:
        if texts is None:
            return Streamed(documents, key, self._held.is_held_out, BLOCK)
        trained = [t for t in texts if not self._held.is_held_out(t)]
        if not trained:
            raise Unavailable(
                f"{documents.where} has no document besides the held-out ones; give more text."
            )
        return Indexed(trained, key)

    @property
    def skipped(self) -> int:
        """Documents without text that were passed over."""
        return sum(documents.skipped for documents in self._sources)

    def next_batch(self) -> Batch:
        """Return (inputs [B, T], targets [B, T]), int64; targets are the inputs shifted by one."""
        rows, length = self.config.batch_size, self.config.seq_len
        need = rows * length + 1
        while len(self._left) < need:
            if self._taken >= len(self._pieces):
                text = next(self._pick(self._drawn))
                self._pieces, self._taken = _cut(text), 0
                self._drawn += 1
            self._left += self._tokens(self._taken)
            self._taken += 1
        flat = np.asarray(self._left[:need], dtype=np.int64)
        self._left = self._left[need - 1 :]  # the last token is the next batch's first input
        return flat[:-1].reshape(rows, length), flat[1:].reshape(rows, length)

    def _pick(self, draw: int) -> Reader:
        return seeded(self._mix, draw).choices(self._readers, self._weights)[0]

    def _tokens(self, piece: int) -> list[int]:
        tokens = self.tokenizer.encode(self._pieces[piece])
        return [*tokens, self.tokenizer.eos_id] if piece == len(self._pieces) - 1 else tokens

    def held_out_batches(self, count: int) -> list[Batch]:
        """Return about `count` batches of the held-out set: the same on every peer of the run."""
        return [batch for batches in self.held_out_by_source(count).values() for batch in batches]

    def held_out_by_source(self, count: int) -> dict[str, list[Batch]]:
        """Return those batches by the name of their source; one without any is left out."""
        return self._held.batches(count, self.tokenizer)

    def held_out_texts(self) -> dict[str, Iterator[str]]:
        """Return the held-out documents of each source, by its name."""
        return self._held.texts()

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the stream as JSON: no text and no tokens, so a few hundred bytes."""
        return {
            "drawn": self._drawn,
            "taken": self._taken,
            "left": len(self._left),
            "document": _name(self._pick(self._drawn - 1).last) if self._drawn else "",
            "readers": [reader.state() for reader in self._readers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place that `state_dict` returned.

        Raises DamagedState, and stays where it is, if the sources have changed since.
        """
        before = self.state_dict()
        try:
            self._go(state)
        except (KeyError, TypeError, ValueError, IndexError):
            self._go(before)
            raise DamagedState(
                "the saved place in the data does not fit the sources: they have changed since it "
                "was saved."
            ) from None

    def _go(self, state: Mapping[str, Any]) -> None:
        for reader, place in zip(self._readers, state["readers"], strict=True):
            reader.resume(place)
        self._drawn, self._taken = int(state["drawn"]), int(state["taken"])
        left = int(state["left"])
        self._pieces, self._left = [], []
        if not self._drawn:
            return
        text = self._pick(self._drawn - 1).last
        if _name(text) != state["document"] or self._taken < 1:
            raise ValueError("another document")
        self._pieces = _cut(text)
        tokens = self._tokens(self._taken - 1)
        if not 0 < left <= len(tokens):
            raise ValueError("another place")
        self._left = tokens[len(tokens) - left :]


def _loaded(documents: Documents) -> list[str] | None:
    """Return all documents of a small source; None for one that should stay on disk."""
    if documents.source.kind == "builtin":
        return list(documents.in_order())
    if documents.local_bytes is None or documents.local_bytes > INDEXED_BYTES:
        return None
    texts, size = [], 0
    for text in documents.in_order():
        size += len(text)
        if size > INDEXED_BYTES:  # files may be compressed
            return None
        texts.append(text)
    return texts


def _cut(text: str) -> list[str]:
    """Cut a document into what is tokenised at once: at a space, where there is one."""
    pieces = []
    while len(text) > PIECE:
        at = text.rfind(" ", PIECE // 2, PIECE)
        at = at if at > 0 else PIECE
        pieces.append(text[:at])
        text = text[at:]
    return [*pieces, text]


def _name(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]
