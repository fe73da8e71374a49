"""Bundles and checkpoints: named by their bytes, whole or not at all."""

import errno
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spesd.checkpoint import bundle as bundle_module
from spesd.checkpoint.bundle import read_bundle, write_bundle
from spesd.checkpoint.manifest import Checkpoint
from spesd.checkpoint.store import Store
from spesd.errors import DamagedState, ProtocolViolation, Unavailable
from spesd.swarm.records import StatePart

SHAPES = {"w": (2, 3), "b": (3,)}


def tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((2, 3), value), "b": torch.arange(3, dtype=torch.bfloat16)}


def checkpoint(store: Store, number: int, value: float) -> Checkpoint:
    digest, size = write_bundle(store.bundles, tensors(value))
    made = Checkpoint(
        run_id="r", peer_id="a", round=number, global_tokens=number, contributors=1,
        parts=(StatePart(part="shared", round=number, term=0, digest=digest, size=size),),
        moments=(), owned=(1,), steps=number, tokens=number, stream={"at": 1},
    )  # fmt: skip
    store.commit(made)
    return made


def test_a_bundle_is_named_by_its_bytes_and_read_as_written(tmp_path: Path) -> None:
    digest, size = write_bundle(tmp_path, tensors())
    assert write_bundle(tmp_path, tensors()) == (digest, size)
    path = tmp_path / f"{digest}.safetensors"
    assert [path] == list(tmp_path.iterdir())
    read = read_bundle(path, SHAPES, digest)
    assert all(torch.equal(read[n], t) for n, t in tensors().items())
    assert write_bundle(tmp_path, tensors(2.0))[0] != digest


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ({"w": (2, 3)}, "other tensors"),
        ({"w": (3, 2), "b": (3,)}, "the shape"),
        ({"w": (2, 3), "b": (3,), "c": (1,)}, "other tensors"),
    ],
)
def test_another_part_is_refused(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], says: str
) -> None:
    digest, _ = write_bundle(tmp_path, tensors())
    with pytest.raises(ProtocolViolation, match=says):
        read_bundle(tmp_path / f"{digest}.safetensors", shapes, digest, ProtocolViolation)


def test_not_finite_and_wrong_dtypes_are_refused(tmp_path: Path) -> None:
    for bad, says in (
        ({**tensors(), "b": torch.tensor([1.0, float("inf"), 0.0])}, "not finite"),
        ({**tensors(), "b": torch.tensor([1, 2, 3])}, "dtype"),
    ):
        digest, _ = write_bundle(tmp_path, bad)
        with pytest.raises(DamagedState, match=says):
            read_bundle(tmp_path / f"{digest}.safetensors", SHAPES, digest)


def test_damage_at_any_byte_is_seen(tmp_path: Path) -> None:
    digest, size = write_bundle(tmp_path, tensors())
    path = tmp_path / f"{digest}.safetensors"
    raw = path.read_bytes()
    for at in range(0, size, 7):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        with pytest.raises(DamagedState):
            read_bundle(path, SHAPES, digest)
        path.write_bytes(raw[:at])
        with pytest.raises(DamagedState):
            read_bundle(path, SHAPES, None)


def test_the_newest_whole_checkpoint_counts_whatever_byte_the_crash_came_at(tmp_path: Path) -> None:
    store = Store(tmp_path)
    older, newer = checkpoint(store, 1, 1.0), checkpoint(store, 2, 2.0)
    assert store.newest() == (newer, [])
    path = store.path_of(newer)
    raw = path.read_bytes()
    for at in range(0, len(raw), 11):
        path.write_bytes(raw[:at])
        found, damaged = store.newest()
        assert found == older and newer.file_name in damaged[0]
    path.write_bytes(raw)
    (store.bundles / f"{newer.parts[0].digest}.safetensors").unlink()
    found, damaged = store.newest()
    assert found == older and "missing" in damaged[0]


def test_pruning_keeps_what_is_needed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    made = [checkpoint(store, n, float(n)) for n in range(5)]
    pinned, _ = write_bundle(store.bundles, tensors(99.0))
    write_bundle(store.bundles, tensors(98.0))
    store.prune(2, {pinned})
    assert [p.name for p in sorted(store.checkpoints.iterdir())] == [c.file_name for c in made[3:]]
    kept = {p.stem for p in store.bundles.iterdir()}
    assert kept == {pinned, made[3].parts[0].digest, made[4].parts[0].digest}


def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(bundle_module.os, "fsync", full)
    with pytest.raises(Unavailable, match="no space is left"):
        write_bundle(tmp_path, tensors())
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_that_the_disk_changed_is_written_again(tmp_path: Path) -> None:
    digest, size = write_bundle(tmp_path, tensors())
    path = tmp_path / f"{digest}.safetensors"
    path.write_bytes(b"\0" * size)
    assert write_bundle(tmp_path, tensors()) == (digest, size)
    read_bundle(path, SHAPES, digest)


def test_pruning_removes_what_a_crash_left_half_written(tmp_path: Path) -> None:
    store = Store(tmp_path)
    checkpoint(store, 1, 1.0)
    old = [store.bundles / ".b.1.tmp", store.checkpoints / ".round-000000002.json.1.tmp"]
    young = store.bundles / ".c.1.tmp"  # the trainer, another process, may be writing it now
    for path in (*old, young):
        path.write_bytes(b"half")
    for path in old:
        os.utime(path, (1, 1))
    store.prune(2, set())
    assert [path.exists() for path in (*old, young)] == [False, False, True]


WRITER = """
import sys
from pathlib import Path
import torch
from spesd.checkpoint.bundle import write_bundle
from spesd.checkpoint.manifest import Checkpoint
from spesd.checkpoint.store import Store
from spesd.swarm.records import StatePart
store = Store(Path(sys.argv[1]))
for n in range(1, 100000):
    digest, size = write_bundle(store.bundles, {"w": torch.full((20000,), float(n))})
    part = StatePart(part="shared", round=n, term=0, digest=digest, size=size)
    store.commit(Checkpoint(run_id="r", peer_id="a", round=n, global_tokens=n, contributors=1,
        parts=(part,), moments=(), owned=(), steps=n, tokens=n, stream={}))
    store.prune(2, set())
    print(n, flush=True)
"""


def test_what_was_committed_survives_a_kill_at_any_moment(tmp_path: Path) -> None:
    chance = random.Random(7)
    for attempt in range(3):
        root = tmp_path / str(attempt)
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(root)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        for _ in range(chance.randrange(2, 12)):
            said = int(writer.stdout.readline())
        writer.kill()
        rest = writer.communicate()[0].split()
        found, damaged = Store(root).newest()
        assert found is not None and found.round >= int(rest[-1] if rest else said)
        assert damaged == []
