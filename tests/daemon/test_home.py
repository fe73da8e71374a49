"""The home: one daemon at a time, atomic writes, clear refusals."""

import errno
import json
import os
from pathlib import Path

import pytest

from spesd.daemon import home as home_module
from spesd.daemon.home import MAX_SOCKET_PATH, Home, write_atomically
from spesd.daemon.journal import Journal
from spesd.errors import Unavailable, UsageError


def test_a_second_daemon_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    with Home(tmp_path / "h"), pytest.raises(Unavailable, match=rf"pid {os.getpid()}"):
        Home(tmp_path / "h").__enter__()
    with Home(tmp_path / "h"):
        pass  # the lock ends with its holder


def test_a_home_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--home"):
        Home(tmp_path / "file" / "h").__enter__()


def test_what_is_remembered_survives_and_damage_costs_only_itself(tmp_path: Path) -> None:
    with Home(tmp_path) as home:
        home.remember(addresses=["/ip4/1.2.3.4/tcp/1/p2p/x", 7])
        home.remember(run_id="abc")
    with Home(tmp_path) as home:
        assert home.remembered()["run_id"] == "abc"
        assert home.cached_addresses() == ["/ip4/1.2.3.4/tcp/1/p2p/x"]
        (tmp_path / "state.json").write_text('{"run_id": "a')
        assert home.remembered() == {}


def test_a_full_disk_leaves_the_old_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    write_atomically(path, b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(home_module.os, "fsync", full)
    with pytest.raises(Unavailable, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_deep_home_gets_a_socket_elsewhere(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 120)
    assert Home(tmp_path / "h").socket == tmp_path / "h" / "control.sock"
    assert len(os.fsencode(Home(deep).socket)) <= MAX_SOCKET_PATH
    assert Home(deep).socket != Home(deep / "other").socket


def test_the_journal_is_bounded_and_survives_a_lost_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spesd.daemon.journal.MAX_BYTES", 200)
    journal = Journal(tmp_path / "journal.jsonl")
    for number in range(30):
        journal.write("round", number=number)
    files = sorted(p.name for p in tmp_path.iterdir())
    assert files == ["journal.1.jsonl", "journal.jsonl"]
    assert all(p.stat().st_size < 400 for p in tmp_path.iterdir())
    last = (tmp_path / "journal.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["number"] == 29
    gone = Journal(tmp_path / "none" / "journal.jsonl")
    gone.write("x")
    assert gone.lost == 1
