"""What a run keeps on disk: bundles by digest, and the checkpoints that name them.

Decides which checkpoint is the newest that is whole, and which bundles nobody needs any more. A
crash at any byte leaves the checkpoints before it as they were.
"""

import contextlib
import os
import time
from collections.abc import Set
from pathlib import Path

from spesd.checkpoint.bundle import SUFFIX, disk_failure
from spesd.checkpoint.manifest import Checkpoint
from spesd.digest import file_digest
from spesd.errors import DamagedState


class Store:
    """The bundles and checkpoints of one run of one peer."""

    def __init__(self, root: Path) -> None:
        self.bundles = root / "bundles"
        self.checkpoints = root / "checkpoints"

    def path_of(self, checkpoint: Checkpoint) -> Path:
        """Where a checkpoint's manifest lies."""
        return self.checkpoints / checkpoint.file_name

    def read(self, path: Path | str) -> Checkpoint:
        """Read one manifest."""
        return Checkpoint.from_file(Path(path))

    def commit(self, checkpoint: Checkpoint) -> Path:
        """Make a checkpoint count; its bundles are on disk already."""
        path = self.path_of(checkpoint)
        temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            with temp.open("wb") as file:
                file.write(checkpoint.to_bytes())
                file.flush()
                os.fsync(file.fileno())
            _sync_folder(self.bundles)
            temp.replace(path)
            _sync_folder(self.checkpoints)
        except OSError as error:
            temp.unlink(missing_ok=True)
            raise disk_failure(self.checkpoints, error) from None
        return path

    def newest(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest checkpoint that is whole, and what is wrong with newer ones."""
        damaged = []
        for path in sorted(self.checkpoints.glob("round-*.json"), reverse=True):
            try:
                checkpoint = self.read(path)
                self._verify(checkpoint)
            except DamagedState as error:
                damaged.append(str(error))
                continue
            return checkpoint, damaged
        return None, damaged

    def _verify(self, checkpoint: Checkpoint) -> None:
        for digest in sorted(checkpoint.digests()):
            path = self.bundles / f"{digest}{SUFFIX}"
            try:
                whole = file_digest(path) == digest
            except OSError:
                whole = False
            if not whole:
                raise DamagedState(
                    f"the checkpoint {checkpoint.file_name} is damaged: its bundle {digest[:12]} "
                    "is missing or not what it was"
                )

    def prune(self, keep: int, pinned: Set[str]) -> None:
        """Keep the newest `keep` checkpoints and the pinned bundles; delete everything else."""
        paths = sorted(self.checkpoints.glob("round-*.json"))
        needed = set(pinned)
        kept = 0
        for path in reversed(paths):
            try:
                checkpoint = self.read(path)
            except DamagedState:
                path.unlink(missing_ok=True)
                continue
            if kept < keep:
                kept += 1
                needed |= checkpoint.digests()
            else:
                path.unlink(missing_ok=True)
        for folder in (self.bundles, self.checkpoints):
            for path in folder.iterdir() if folder.exists() else ():
                unused = path.suffix == SUFFIX and path.stem not in needed
                ours = f".{os.getpid()}." in path.name
                if unused or (path.suffix == ".tmp" and not ours and _is_old(path)):
                    path.unlink(missing_ok=True)


def _is_old(path: Path) -> bool:
    """Tell whether a temporary file was left by a crash: nobody writes one for an hour."""
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime > 3600
    return False


def _sync_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
