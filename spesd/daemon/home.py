"""A peer's home folder: who may use it, and where each thing lies in it.

One daemon at a time holds the home's lock. Everything that must survive a restart is here: the
identity, the runs with their bundles and checkpoints, and the addresses of peers seen before.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from spesd.errors import Unavailable, UsageError

MAX_CACHED_ADDRESSES = 64
MAX_SOCKET_PATH = 100  # bytes; the kernel's limit is 108


def default_home() -> Path:
    """Return SPESD_HOME, or ~/.spesd: the only environment variable that spesd reads."""
    return Path(os.environ.get("SPESD_HOME") or "~/.spesd").expanduser()


def write_atomically(path: Path, raw: bytes) -> None:
    """Write a file so that a crash at any byte leaves the old one or the new one."""
    temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temp.open("wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        temp.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        temp.unlink(missing_ok=True)
        raise Unavailable(
            f"cannot write {path}: {error.strerror}; free some space or choose another --home."
        ) from None


class Home:
    """The folder, locked for this process between `with` and its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    @property
    def identity(self) -> Path:
        """The key file that makes this peer itself."""
        return self.path / "identity.key"

    def run_folder(self, run_id: str) -> Path:
        """Where a run's bundles, checkpoints, config and journal lie."""
        return self.path / "runs" / run_id

    @property
    def socket(self) -> Path:
        """The control socket; elsewhere if the home's path is too long for a socket."""
        inside = self.path / "control.sock"
        if len(os.fsencode(inside)) <= MAX_SOCKET_PATH:
            return inside
        name = hashlib.sha256(os.fsencode(self.path.resolve())).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"spesd-{os.getuid()}-{name}.sock"

    def __enter__(self) -> "Home":
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            (self.path / "runs").mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"cannot use {self.path} as a home: {error.strerror}; choose a writable folder "
                "with --home or SPESD_HOME."
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pid = os.pread(self._lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._lock)
            self._lock = None
            raise Unavailable(
                f"the home {self.path} is in use by the daemon with pid {pid}; `spesd leave "
                f"--home {self.path}` stops it, or choose another --home."
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):
            self.socket.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # --- what is remembered between starts --------------------------------------------------

    def remember(self, **values: Any) -> None:
        """Keep these values in state.json beside what is there."""
        state = {**self.remembered(), **values}
        write_atomically(self.path / "state.json", json.dumps(state, indent=1).encode())

    def remembered(self) -> dict[str, Any]:
        """Return what `remember` kept; nothing if the file is missing or damaged."""
        try:
            state = json.loads((self.path / "state.json").read_bytes())
        except (OSError, ValueError):
            return {}
        return state if isinstance(state, dict) else {}

    def cached_addresses(self) -> list[str]:
        """Return the addresses of peers seen before, so that a run outlives its first node."""
        cached = self.remembered().get("addresses", [])
        return [a for a in cached if isinstance(a, str)][:MAX_CACHED_ADDRESSES]
