"""The journal: what happened in a run and why, one JSON object a line.

Append-only and bounded: at MAX_BYTES the file becomes `journal.1.jsonl` and a new one begins. A
full disk costs journal lines, never the daemon.
"""

import json
import time
from pathlib import Path
from typing import Any

MAX_BYTES = 32 * 2**20


class Journal:
    """Events with reasons."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0  # lines that could not be written

    def write(self, event: str, **fields: Any) -> None:
        """Append one event."""
        line = json.dumps({"time": round(time.time(), 3), "event": event, **fields})
        try:
            if self.path.exists() and self.path.stat().st_size > MAX_BYTES:
                self.path.replace(self.path.with_suffix(".1.jsonl"))
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError:
            self.lost += 1
