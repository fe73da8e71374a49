"""Where p2pd's sockets lie: a private folder that shows whether its owner still lives.

hivemind leaves sockets in the temporary folder when a process is killed. Ours lie in a folder whose
lock dies with us, so a later start can tell what is left over. Never touches a folder that another
user made, or one whose lock is held.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "spesd-net-"
_MAX_BASE = 60  # characters: the path of a Unix socket may have about 100


def base_folder() -> Path:
    """Return the system's temporary folder, or /tmp if its path is too long for a socket."""
    base = Path(tempfile.gettempdir())
    return base if len(str(base)) <= _MAX_BASE else Path("/tmp")


class RuntimeFolder:
    """A folder of this process, mode 0700, removed by `remove` or by a later `sweep`."""

    def __init__(self) -> None:
        # made and locked under another name first: a sweep never sees it without its lock
        made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=base_folder()))
        self._lock = os.open(made / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = made.with_name(made.name.removeprefix("."))
        made.rename(self.path)

    def remove(self) -> None:
        """Remove the folder; it may be gone already."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep() -> int:
    """Remove the folders of processes that were killed; return how many."""
    removed = 0
    for folder in sorted(base_folder().glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                removed += 1
            finally:
                os.close(lock)
    return removed
