"""The order in which one peer reads one source: its own, never twice the same document an epoch.

Decides that order from a key (run seed, peer id, source) alone, so no list of peers is needed, and
the place in it is a few numbers. Never tokenises, and never yields a held-out document.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Protocol

from spesd.data.sources import Documents
from spesd.errors import Unavailable

BLOCK_CHARS = 2**22  # a block ends at these characters, if its documents are not enough before
FEW_PARTS = 16  # a source of fewer parts is begun somewhere inside its first part
FARTHEST_BEGIN = 8192  # documents


def seeded(*words: object) -> random.Random:
    """Return a generator that depends on these words only."""
    digest = hashlib.sha256(":".join(map(str, words)).encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))


class Reader(Protocol):
    """An endless, resumable order of documents."""

    @property
    def last(self) -> str:
        """The document that `next` returned last."""

    def __next__(self) -> str:
        """Return the next document; an epoch's end is followed by another order."""

    def state(self) -> dict[str, Any]:
        """Return the place as JSON, a few hundred bytes at most."""

    def resume(self, place: Mapping[str, Any]) -> None:
        """Go to a place that `state` returned; KeyError, TypeError or ValueError if it is none."""


class Indexed:
    """Documents that are held in memory, in a new order each epoch."""

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
        if place["of"] != len(self._texts) or not 0 <= place["at"] <= place["of"]:
            raise ValueError("the source has changed")
        self._go(int(place["epoch"]), int(place["at"]))


class Streamed:
    """A source too large for memory: parts in the peer's order, shuffled block by block.

    A place names the part and how many of its documents lie before the block, so a resumed reader
    reads the same block again and shuffles it alike; no text is saved.
    """

    def __init__(
        self, documents: Documents, key: str, held_out: Callable[[str], bool], block: int
    ) -> None:
        self._documents, self._key, self._held_out = documents, key, held_out
        self._block_size = block
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        self._epoch, self._kept = epoch, 0
        rng = seeded(self._key, epoch)
        order = list(range(self._documents.parts))
        rng.shuffle(order)
        self._plan: list[tuple[int, int, int | None]] = [(part, 0, None) for part in order]
        if len(order) < FEW_PARTS:  # else peers that share a file would read it side by side
            begin, first = rng.randrange(FARTHEST_BEGIN), order[0]
            self._plan[0] = (first, begin, None)
            self._plan.append((first, 0, begin))
        self._open(0, 0)

    def _open(self, entry: int, before: int) -> None:
        """Go to the document `before` of a plan's entry."""
        self._entry, self._before, self._read = entry, before, before
        self._block: list[str] = []
        self._at = 0
        self._texts: Iterator[str] = iter(())
        if entry < len(self._plan):
            part, begin, end = self._plan[entry]
            self._texts = islice(self._documents.read(part), begin + before, end)

    def _read_block(self) -> bool:
        """Read and shuffle the entry's next block; False at the entry's end."""
        self._before = self._read
        block: list[str] = []
        size = 0
        for text in self._texts:
            block.append(text)
            size += len(text)
            if len(block) >= self._block_size or size >= BLOCK_CHARS:
                break
        self._read += len(block)
        self._block, self._at = [t for t in block if not self._held_out(t)], 0
        seeded(self._key, self._epoch, self._entry, self._before).shuffle(self._block)
        self._kept += len(self._block)
        return bool(block)

    def __next__(self) -> str:
        barren = 0
        while self._at >= len(self._block):
            if self._read_block():
                continue
            if self._entry + 1 < len(self._plan):
                self._open(self._entry + 1, 0)
                continue
            barren = 0 if self._kept else barren + 1
            if barren > 1:  # a resumed epoch may be barren at its end, a whole one may not
                raise Unavailable(
                    f"{self._documents.where} has no document besides the held-out ones; give "
                    "more text."
                )
            self._begin(self._epoch + 1)
        self._at += 1
        return self.last

    @property
    def last(self) -> str:
        return self._block[self._at - 1]

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "entry": self._entry,
            "before": self._before,
            "at": self._at,
            "parts": self._documents.parts,
        }

    def resume(self, place: Mapping[str, Any]) -> None:
        entry, before, at = int(place["entry"]), int(place["before"]), int(place["at"])
        if place["parts"] != self._documents.parts or min(entry, before, at) < 0:
            raise ValueError("the source has changed")
        self._begin(int(place["epoch"]))
        if entry >= len(self._plan):
            raise ValueError("the source has changed")
        self._open(entry, before)
        if at:
            self._read_block()
            if at > len(self._block):
                raise ValueError("the source has changed")
            self._at = at
