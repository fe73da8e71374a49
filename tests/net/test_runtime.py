"""Sockets: in a folder of ours, gone with us, swept up after a kill."""

import os
import stat
from pathlib import Path

import pytest
from helpers.nodes import Start

from spesd.net import runtime
from spesd.net.runtime import PREFIX, RuntimeFolder, base_folder, sweep


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(runtime, "base_folder", lambda: tmp_path)
    return tmp_path


def test_a_sweep_takes_what_the_dead_left_and_nothing_else(elsewhere: Path) -> None:
    mine = RuntimeFolder()
    assert stat.S_IMODE(mine.path.stat().st_mode) == 0o700
    dead = elsewhere / f"{PREFIX}dead"
    dead.mkdir()
    (dead / "lock").touch()
    (dead / "p2pd-x.sock").touch()
    strange = elsewhere / f"{PREFIX}without-lock"
    strange.mkdir()
    (elsewhere / f"{PREFIX}link").symlink_to(strange)
    assert sweep() == 1
    assert not dead.exists()
    assert mine.path.exists()
    assert strange.exists()
    mine.remove()
    mine.remove()
    assert not mine.path.exists()


def test_the_path_of_a_socket_is_never_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.tempfile, "gettempdir", lambda: "/tmp/" + "x" * 90)
    assert base_folder() == Path("/tmp")


async def test_a_node_keeps_its_sockets_to_itself(start: Start) -> None:
    before = {p.name for p in Path("/tmp").glob("hivemind-*")}
    a, _ = await start("a")
    folder = a._p2pd._folder.path
    assert sum(p.suffix == ".sock" for p in folder.iterdir()) == 2
    assert folder.stat().st_uid == os.getuid()
    sweep()
    assert folder.exists()
    assert {p.name for p in Path("/tmp").glob("hivemind-*")} == before
