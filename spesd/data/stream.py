"""A peer's own stream of packed batches, and the held-out set that nobody trains on.

Each peer reads every source in an order of its own, derived from (run seed, peer id, epoch), so no
list of peers is needed and any two overlap by chance only. Decides order, mixing and packing; the
place in the stream is a small JSON tree from which it resumes exactly.

Documents are joined by the tokenizer's end token and cut into rows of T + 1 tokens that overlap by
one, so every token is a target once. Shapes: B = batch_size, T = seq_len.
"""

import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from spesd.config import DataConfig
from spesd.data.sources import Documents, open_sources
from spesd.data.tokenizer import Tokenizer
from spesd.errors import DamagedState, Unavailable

INDEXED_BYTES = 256 * 2**20  # a source up to this size is held in memory and shuffled whole
BLOCK = 256  # documents of a larger source that are shuffled together
PIECE = 16_384  # characters tokenised at once: bounds what the saved place must hold
LOOK_FOR_HELD_OUT = 20_000  # documents searched for the held-out set

Batch = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


def seeded(*words: object) -> random.Random:
    """Return a generator that depends on these words only."""
    digest = hashlib.sha256(":".join(map(str, words)).encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))


class TextStream:
    """One peer's stream over the run's sources."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        *,
        seed: int,
        peer_id: str,
        paths: Mapping[str, str] | None = None,
    ) -> None:
        self.config, self.tokenizer, self.seed = config, tokenizer, seed
        sources = open_sources(config, paths or {})
        self._held = HeldOut(config, tokenizer, seed, sources)
        self._readers = [
            _reader(d, f"{seed}:{peer_id}:{d.source.name}", self._held.is_held_out) for d in sources
        ]
        self._weights = [d.source.weight for d in sources]
        self._mix = f"{seed}:{peer_id}:mix"
        self._drawn = 0  # documents drawn so far
        self._left: list[int] = []  # tokens of documents not yet in a batch
        self._pieces: list[str] = []  # of the document being tokenised

    def next_batch(self) -> Batch:
        """Return (inputs [B, T], targets [B, T]); targets are the inputs shifted by one."""
        rows, length = self.config.batch_size, self.config.seq_len
        need = rows * length + 1
        while len(self._left) < need:
            self._take_piece()
        flat = np.asarray(self._left[:need], dtype=np.int64)
        self._left = self._left[need - 1 :]  # the last token is the next batch's first input
        return flat[:-1].reshape(rows, length), flat[1:].reshape(rows, length)

    def _take_piece(self) -> None:
        if not self._pieces:
            rng = seeded(self._mix, self._drawn)
            reader = rng.choices(self._readers, self._weights)[0]
            text = next(reader)
            self._drawn += 1
            self._pieces = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
        self._left += self.tokenizer.encode(self._pieces.pop(0))
        if not self._pieces:
            self._left.append(self.tokenizer.eos_id)

    def held_out_batches(self, count: int) -> list[Batch]:
        """Return up to `count` batches of the held-out set: the same on every peer."""
        return self._held.batches(count)

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the stream as a JSON tree."""
        return {
            "drawn": self._drawn,
            "left": list(self._left),
            "pieces": len(self._pieces),
            "readers": [reader.state() for reader in self._readers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place that `state_dict` returned; DamagedState if the sources have changed."""
        try:
            for reader, place in zip(self._readers, state["readers"], strict=True):
                reader.resume(place)
            self._drawn, self._left = int(state["drawn"]), [int(t) for t in state["left"]]
            pieces = int(state["pieces"])
        except (KeyError, TypeError, ValueError):
            raise DamagedState("the saved place in the data does not fit the sources.") from None
        self._pieces = []
        if pieces:
            rng = seeded(self._mix, self._drawn - 1)
            text = rng.choices(self._readers, self._weights)[0].last
            cut = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
            self._pieces = cut[len(cut) - pieces :]


class HeldOut:
    """The documents that nobody trains on: by the hash of their text, the same everywhere."""

    def __init__(
        self, config: DataConfig, tokenizer: Tokenizer, seed: int, sources: list[Documents]
    ) -> None:
        self.config, self.tokenizer, self.seed, self._sources = config, tokenizer, seed, sources
        self._first: str | None = None
        self._made: dict[int, list[Batch]] = {}  # a hub source is not read again each evaluation
        if not any(self._chosen(t) for t in self._some()):
            self._first = next(self._some(), None)
            if self._first is None:
                raise Unavailable("the data sources hold no text; give other paths.")

    def _some(self) -> Iterator[str]:
        for documents in self._sources:
            for number, text in enumerate(documents.in_order()):
                if number >= LOOK_FOR_HELD_OUT:
                    break
                yield text

    def _chosen(self, text: str) -> bool:
        digest = hashlib.sha256(f"{self.seed}:held-out:{text}".encode("utf-8", "replace")).digest()
        return int.from_bytes(digest[:8], "big") < self.config.held_out * 2**64

    def is_held_out(self, text: str) -> bool:
        """Tell whether nobody may train on this document."""
        return self._chosen(text) if self._first is None else text == self._first

    def batches(self, count: int) -> list[Batch]:
        """Return at least one batch and at most `count`; a short set is repeated to fill one."""
        if count not in self._made:
            self._made[count] = self._make(count)
        return self._made[count]

    def _make(self, count: int) -> list[Batch]:
        rows, length = self.config.batch_size, self.config.seq_len
        tokens: list[int] = []
        for text in self._some():
            if self.is_held_out(text):
                tokens += [*self.tokenizer.encode(text), self.tokenizer.eos_id]
                if len(tokens) > count * rows * length:
                    break
        while len(tokens) <= rows * length:
            tokens += tokens
        found = []
        for at in range(0, len(tokens) - rows * length, rows * length):
            flat = np.asarray(tokens[at : at + rows * length + 1], dtype=np.int64)
            found.append((flat[:-1].reshape(rows, length), flat[1:].reshape(rows, length)))
        return found[:count]


class _Indexed:
    """A source that fits in memory, in a new order each epoch."""

    def __init__(self, texts: list[str], key: str) -> None:
        self._texts, self._key = texts, key
        self._go(0, 0)

    def _go(self, epoch: int, at: int) -> None:
        self._epoch, self._at = epoch, at
        self._order = list(range(len(self._texts)))
        seeded(self._key, epoch).shuffle(self._order)

    def __next__(self) -> str:
        if self._at >= len(self._order):
            self._go(self._epoch + 1, 0)
        self._at += 1
        return self.last

    @property
    def last(self) -> str:
        return self._texts[self._order[self._at - 1]]

    def state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "at": self._at, "of": len(self._order)}

    def resume(self, place: Mapping[str, Any]) -> None:
        if place["of"] != len(self._texts):
            raise ValueError("the source has changed")
        self._go(int(place["epoch"]), int(place["at"]))


class _Blocks:
    """A source too large for memory: files in another order each epoch, blocks shuffled.

    The library does not restore its shuffle buffer on resume, so we keep the place at which the
    block began and read that block again.
    """

    def __init__(self, documents: Documents, key: str, held_out: Any) -> None:
        self._documents, self._key, self._held_out = documents, key, held_out
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        self._epoch, self._number = epoch, 0
        seed = seeded(self._key, epoch).getrandbits(32)
        self._shards = self._documents.shuffled_shards(seed)
        self._start: dict[str, Any] = self._shards.state()
        self._texts = self._shards.texts()
        self._block: list[str] = []
        self._at = 0

    def _read_block(self) -> None:
        self._start = self._shards.state()
        block: list[str] = []
        for text in self._texts:
            block.append(text)
            if len(block) == BLOCK:
                break
        self._ended = len(block) < BLOCK
        kept = [t for t in block if not self._held_out(t)]
        seeded(self._key, self._epoch, self._number, "block").shuffle(kept)
        self._block, self._at, self._number = kept, 0, self._number + 1

    def __next__(self) -> str:
        empty_epochs = 0
        while self._at >= len(self._block):
            if self._number and self._ended:
                empty_epochs += self._number == 1 and not self._block
                if empty_epochs > 1:
                    raise Unavailable(f"{self._documents.path}: no text to train on.")
                self._begin(self._epoch + 1)
            self._read_block()
        self._at += 1
        return self.last

    @property
    def last(self) -> str:
        return self._block[self._at - 1]

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "number": self._number,
            "at": self._at,
            "start": self._start,
        }

    def resume(self, place: Mapping[str, Any]) -> None:
        self._begin(int(place["epoch"]))
        if int(place["number"]) == 0:
            return
        self._shards.resume(dict(place["start"]))
        self._texts = self._shards.texts()
        self._number = int(place["number"]) - 1
        self._read_block()
        self._start = dict(place["start"])
        self._at = int(place["at"])


def _reader(documents: Documents, key: str, held_out: Any) -> _Indexed | _Blocks:
    size = documents.local_bytes
    if documents.source.kind != "builtin" and (size is None or size > INDEXED_BYTES):
        return _Blocks(documents, key, held_out)
    texts = [t for t in documents.in_order() if not held_out(t)]
    if not texts:
        raise Unavailable(
            f"the data source {documents.source.name!r} has no document besides the held-out one; "
            "give more text."
        )
    return _Indexed(texts, key)
