"""A checkpoint's manifest: which bundles make the state, and everything else to go on from.

Decides the file's form and that it is whole: it carries the hash of itself.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spesd.errors import DamagedState, ProtocolViolation
from spesd.swarm.records import StateManifest, StatePart


@dataclass(frozen=True, kw_only=True)
class Moments:
    """The optimizer's state of one part."""

    part: str
    digest: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A peer's whole state after the merge of `round`."""

    run_id: str
    peer_id: str
    round: int
    global_tokens: int
    contributors: int
    parts: tuple[StatePart, ...]
    moments: tuple[Moments, ...]
    owned: tuple[int, ...]
    steps: int  # local optimizer steps in this peer's life
    tokens: int
    stream: dict[str, Any]  # the place in the data
    loss: float | None = None  # training loss, mean over the round
    val_loss: float | None = None  # of the last evaluation before it
    created: float = 0.0  # seconds since the epoch, by this machine's clock

    @property
    def file_name(self) -> str:
        """What its file is called: names sort as rounds do."""
        return f"round-{self.round:09d}.json"

    def digests(self) -> set[str]:
        """Every bundle that it needs."""
        return {p.digest for p in self.parts} | {m.digest for m in self.moments}

    def to_state(self) -> StateManifest:
        """What a joiner needs of it."""
        return StateManifest(
            run_id=self.run_id,
            peer_id=self.peer_id,
            round=self.round,
            global_tokens=self.global_tokens,
            contributors=self.contributors,
            parts=self.parts,
        )

    def to_bytes(self) -> bytes:
        """Return the file: JSON with its own hash."""
        body = dataclasses.asdict(self)
        return json.dumps({"body": body, "sha256": _hash(body)}).encode()

    @classmethod
    def from_file(cls, path: Path) -> "Checkpoint":
        """Read a manifest; DamagedState if a single byte of it is not what was written."""
        try:
            tree = json.loads(path.read_bytes())
            body = tree["body"]
            if tree["sha256"] != _hash(body):
                raise ValueError("its hash does not fit")
            values = {
                **body,
                "parts": tuple(StatePart(**p) for p in body["parts"]),
                "moments": tuple(Moments(**m) for m in body["moments"]),
                "owned": tuple(body["owned"]),
            }
            checkpoint = cls(**values)
            checkpoint.to_state().check()
        except (OSError, ValueError, KeyError, TypeError, ProtocolViolation) as error:
            raise DamagedState(f"the checkpoint {path.name} is damaged: {error}") from None
        return checkpoint


def _hash(body: dict[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(canonical).hexdigest()
