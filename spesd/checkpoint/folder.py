"""A new folder that appears whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from spesd.checkpoint.bundle import disk_failure
from spesd.errors import UsageError


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Give a folder to write into that becomes `out` at the end; after a failure it is gone.

    Raises UsageError if `out` exists and is not an empty folder, Unavailable if the disk refuses.
    """
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise UsageError(f"{out} exists and is not an empty folder; name another one.")
    if not out.parent.is_dir():
        raise UsageError(f"there is no folder {out.parent}; create it first.")
    temp = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temp.mkdir()
        yield temp
        temp.replace(out)  # over an empty folder too
    except OSError as error:
        raise disk_failure(out, error) from None
    finally:
        shutil.rmtree(temp, ignore_errors=True)
