"""Order and hygiene for all tests: the fast tier first, and no process left behind."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# tests share two cores: one thread each keeps timings and sums the same from run to run
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run end-to-end tests last, and those that read the source first.

    After a recursion limit was met, `ast.parse` of Python 3.11 may fail in that process.
    """
    items.sort(
        key=lambda item: (
            item.get_closest_marker("e2e") is not None,
            item.path.name != "test_architecture.py",
        )
    )


def descendants(root: int) -> dict[int, str]:
    """Return the command lines of all living processes below `root`, by pid."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, IndexError):
            continue
        if fields[0] != "Z":
            parents[int(folder.name)] = int(fields[1])
            names[int(folder.name)] = command
    found: dict[int, str] = {}
    frontier = {root}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier} - found.keys()
        found.update({pid: names[pid] for pid in frontier})
    return found


@pytest.fixture(autouse=True)
def no_process_is_left_behind() -> Iterator[None]:
    """Fail a test that leaves a daemon, a trainer or a p2pd running."""
    before = set(descendants(os.getpid()))
    yield
    import time

    deadline = time.monotonic() + 10
    while True:
        left = {
            pid: name
            for pid, name in descendants(os.getpid()).items()
            if pid not in before and ("p2pd" in name or "spesd" in name)
        }
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.05)  # a p2pd may take a moment to notice that its parent is gone
    assert not left, f"processes left behind: {left}"
