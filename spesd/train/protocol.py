"""What crosses the pipe between the daemon and its trainer: commands in, replies out.

Decides which commands there are and what each must bring, and that every value is one that JSON has
a word for. It never carries a command out, and never imports torch.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spesd.config import RunConfig
from spesd.configtree import from_tree
from spesd.errors import DamagedState, SpesdError, UsageError
from spesd.memory import Layout

Message = dict[str, Any]

# Each command and the arguments that it must bring; `id` and `do` besides.
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "setup": ("setup",),
    "initialise": (),
    "load_checkpoint": ("path", "owned"),
    "load_state": ("parts",),
    "own": ("experts",),
    "train": ("round", "steps", "go_on", "global_tokens", "contributors"),
    "halt": (),
    "snapshot": ("round",),
    "merge": ("round", "parts"),
    "evaluate": (),
    "checkpoint": ("round", "global_tokens", "contributors", "versions"),
    "stop": (),
}
OUT_OF_MEMORY = 4  # the trainer's exit code
BEFORE_SETUP = ("setup", "halt", "stop")  # these need no trainer
_SETUP = ("config", "peer_id", "store", "device", "owned", "data", "layout")


PLAIN = Layout(k=0, rows=0, frozen="fp32")  # 0 rows: the whole batch at once


@dataclass(frozen=True, kw_only=True)
class TrainerSetup:
    """What a trainer must know of its run and its machine."""

    config: RunConfig
    peer_id: str
    store: Path  # the run's folder
    device: str = "cpu"
    owned: tuple[int, ...] = ()
    data: Mapping[str, str] = field(default_factory=dict)
    tokenizer: Path | None = None
    layout: Layout = PLAIN


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One step: its loss (None if the step was skipped) and the tokens it trained on."""

    loss: float | None
    tokens: int
    reason: str = ""


def parse_command(line: str) -> Message:
    """Read a line; a UsageError comes with no `id`, for there may be none in it."""
    try:
        message = json.loads(line)
    except ValueError:
        raise UsageError("a command is not a line of JSON.") from None
    if not isinstance(message, dict) or "id" not in message:
        raise UsageError("a command is not a JSON object with an id.")
    return message


def check_command(message: Message, *, is_set_up: bool) -> None:
    """Raise UsageError unless this can be carried out, as far as its form tells."""
    name = message.get("do")
    if not isinstance(name, str) or name not in COMMANDS:
        raise UsageError(f"there is no command {name!r}; there are {', '.join(COMMANDS)}.")
    missing = [argument for argument in COMMANDS[name] if argument not in message]
    if missing:
        raise UsageError(f"the command {name!r} lacks {', '.join(missing)}.")
    if not is_set_up and name not in BEFORE_SETUP:
        raise UsageError(f"the command {name!r} came before 'setup'.")


def parse_setup(given: Mapping[str, Any]) -> TrainerSetup:
    """Read the setup that the daemon sends; ConfigError or UsageError if it cannot be."""
    missing = [name for name in _SETUP if name not in given]
    if missing:
        raise UsageError(f"the setup lacks {', '.join(missing)}.")
    return TrainerSetup(
        config=from_tree(RunConfig, json.loads(given["config"])),
        peer_id=given["peer_id"],
        store=Path(given["store"]),
        device=given["device"],
        owned=tuple(given["owned"]),
        data=given["data"],
        tokenizer=Path(given["tokenizer"]) if given.get("tokenizer") else None,
        layout=from_tree(Layout, given["layout"]),
    )


def failure(number: Any, error: SpesdError) -> Message:
    """Say that a command failed and the trainer lives."""
    kind = "usage" if isinstance(error, UsageError) else "unavailable"
    kind = "damaged" if isinstance(error, DamagedState) else kind
    return {"id": number, "ok": False, "kind": kind, "error": str(error)}


def to_line(message: Message) -> str:
    """Write a reply or an event; what is not finite becomes null."""
    return json.dumps(_finite(message), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value
