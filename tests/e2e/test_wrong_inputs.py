"""Everything a user can get wrong: one clear sentence, exit code 2 or 1, no traceback."""

import os
import socket
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.swarm import LISTEN, PeerProcess, run_toml, spesd, wait_for

pytestmark = pytest.mark.e2e

PEER_ID = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def refused(*arguments: str | Path, code: int, says: list[str]) -> None:
    answer = spesd(*arguments)
    assert answer.returncode == code, (answer.returncode, answer.stderr)
    assert "Traceback" not in answer.stderr + answer.stdout
    for words in says:
        assert words in answer.stderr, answer.stderr
    assert len(answer.stderr.strip().splitlines()) <= 3, answer.stderr


def edited(path: Path, *changes: tuple[str, str]) -> Path:
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def test_run_toml_is_refused_by_key(tmp_path: Path) -> None:
    home = ("--home", tmp_path / "home")
    path = run_toml(tmp_path)
    refused("start", tmp_path / "none.toml", *home, code=2, says=["none.toml", "spesd new"])
    edited(path, ("seed = 7", "seed = 7\nsede = 8"))
    refused("start", path, *home, code=2, says=["unknown key", "sede"])
    edited(run_toml(tmp_path), ("n_experts = 4", "n_experts = 4\ntop_k = 5"))
    refused("start", path, *home, code=2, says=["top_k", "n_experts"])
    run_toml(tmp_path, min_peers=2, own=1)
    refused("start", path, *home, code=2, says=["cannot be covered", "min_peers"])
    run_toml(tmp_path)
    refused("start", path, *home, "--own", "5", code=2, says=["--own 5", "4"])
    refused("start", path, *home, "--profile", "toaster", code=2, says=["toaster", "cpu"])


def test_addresses_are_refused(tmp_path: Path, peers: Callable[..., PeerProcess]) -> None:
    home = ("--home", tmp_path / "home")
    refused("join", *home, code=2, says=["--bootstrap"])
    refused("join", "--bootstrap", "example:4001", *home, code=2, says=["example:4001", "/ip4/"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dead = f"/ip4/127.0.0.1/tcp/{port}/p2p/{PEER_ID}"
    refused("join", "--bootstrap", dead, *home, code=1, says=[str(port)])
    meeting = peers("meeting", "bootstrap")
    address = meeting.address()
    wrong = address.rsplit("/", 1)[0] + "/" + PEER_ID
    refused("join", "--bootstrap", wrong, *home, code=1, says=[PEER_ID])
    refused(
        "join", "--bootstrap", address, "--run", "other", *home, code=1, says=["other", "no run"]
    )
    taken = address.split("/p2p/")[0]
    path = run_toml(tmp_path)
    refused("start", path, "--listen", taken, *home, code=1, says=["in use", taken.split("/")[4]])
    assert meeting.end() == 0


def test_homes_are_refused(tmp_path: Path, peers: Callable[..., PeerProcess]) -> None:
    path = run_toml(tmp_path)
    blocked = tmp_path / "file"
    blocked.write_text("")
    refused("start", path, "--home", blocked / "home", code=2, says=["home", "--home"])
    peer = peers("taken", "start", path)
    peer.address()
    refused("start", path, "--home", peer.home, code=1, says=["in use", str(peer.process.pid)])
    refused("status", "--home", tmp_path / "nobody", code=1, says=["no daemon"])
    assert peer.end() == 0
    if os.geteuid() != 0:
        locked = tmp_path / "locked"
        locked.mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
        refused("start", path, "--home", locked / "home", code=2, says=["writable"])


def test_data_tokenizer_and_device_are_refused(tmp_path: Path) -> None:
    home = ("--home", tmp_path / "home", "--listen", LISTEN)
    path = run_toml(tmp_path)
    source = '[[data.sources]]\nkind = "text"\nname = "books"\npath = "{}"\n'
    edited(path, ("eval_batches = 2", "eval_batches = 2\n" + source.format(tmp_path / "none.txt")))
    refused("start", path, *home, code=1, says=["none.txt"])
    (tmp_path / "none.txt").write_text("")
    refused("start", path, *home, code=1, says=["none.txt"])
    tokenizer = '\n[tokenizer]\nkind = "file"\npath = "missing.json"\n'
    path = run_toml(tmp_path)
    path.write_text(path.read_text() + tokenizer)
    refused("start", path, *home, code=1, says=["missing.json"])
    edited(run_toml(tmp_path), ("[model]", "[model]\nvocab_size = 100"))
    refused("start", path, *home, code=2, says=["100", "257"])
    run_toml(tmp_path)
    refused("start", path, *home, "--device", "cuda:0", code=1, says=["cuda:0", "cpu"])


def test_a_damaged_checkpoint_gives_way_to_the_older_one(
    tmp_path: Path, peers: Callable[..., PeerProcess]
) -> None:
    peer = peers("home", "start", run_toml(tmp_path))
    peer.address()
    wait_for("four rounds", lambda: len(peer.merged()) >= 4)
    peer.end(9)
    newest = sorted(peer.home.glob("runs/*/checkpoints/round-*.json"))[-1]
    newest.write_text(newest.read_text()[:-40])
    again = peers("home", "start", tmp_path / "run.toml")
    again.address()
    events = wait_for("a start", lambda: [e for e in again.journal() if e["event"] == "damaged"])
    assert newest.name in events[-1]["reason"]
    wait_for("training", lambda: again.journal()[-1]["event"] == "merged")
    assert again.end() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(small)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("this machine does not let us mount")
    try:
        home = small / "home"
        refused(
            "start", run_toml(tmp_path), "--home", home, "--listen", LISTEN, code=1,
            says=["no space is left", "MB"],
        )  # fmt: skip
        assert list(home.glob("runs/*/bundles/*")) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)
