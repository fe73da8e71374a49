"""The trainer's process: its protocol, and that it never outlives its parent."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.swarm import wait_for
from helpers.tiny import tiny_config

from spesd.train.protocol import OUT_OF_MEMORY

COMMAND = [sys.executable, "-m", "spesd.train.child"]


class Talk:
    """Commands in, replies and events out, over real pipes."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.events: list[dict[str, Any]] = []
        self._number = 0

    def send(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self._number += 1
        self.process.stdin.write(json.dumps({"id": self._number, "do": do, **arguments}) + "\n")
        self.process.stdin.flush()
        while "event" in (message := self.read()):
            self.events.append(message)
        assert message["id"] == self._number
        return message

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read() if self.process.stderr else ""
        return json.loads(line)

    def until(self, event: str) -> dict[str, Any]:
        while (message := self.read()).get("event") != event:
            self.events.append(message)
        return message


@contextlib.contextmanager
def talking(*patches: str) -> Iterator[Talk]:
    """A child, with its own code patched where a fault must come from inside it."""
    code = "\n".join(("from spesd.train import child", *patches, "child.main()"))
    talk = Talk([sys.executable, "-c", code] if patches else COMMAND)
    try:
        yield talk
    finally:
        close(talk)


@pytest.fixture
def talk() -> Iterator[Talk]:
    with talking() as talk:
        yield talk


def close(talk: Talk) -> None:
    talk.process.kill()
    talk.process.wait()
    for pipe in (talk.process.stdin, talk.process.stdout, talk.process.stderr):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


def setup(store: Path, device: str = "cpu") -> dict[str, Any]:
    return {
        "config": tiny_config().canonical().decode(), "peer_id": "a", "device": device,
        "owned": [0, 1, 2, 3], "store": str(store), "data": {}, "tokenizer": "",
        "layout": {"k": 4, "rows": 0, "frozen": "fp32"},
        "threads": 1, "nice": 0,
    }  # fmt: skip


def test_a_round_over_the_pipes(talk: Talk, tmp_path: Path) -> None:
    reply = talk.send("setup", setup=setup(tmp_path))
    assert reply["ok"] and reply["tokens_per_step"] == 128
    assert talk.send("initialise")["ok"]
    assert talk.send("train", round=1, steps=3, go_on=False, global_tokens=0, contributors=1)["ok"]
    assert talk.until("steps_done")["step_in_round"] == 3
    snapshot = talk.send("snapshot", round=1)
    assert snapshot["tokens"] == 3 * 128
    assert [p["part"] for p in snapshot["parts"]] == ["shared", *(f"expert-{e}" for e in range(4))]
    routed = sum(p["tokens"] for p in snapshot["parts"][1:])
    assert routed == 3 * 128 * 2 * 2  # two layers, two experts a token
    assert talk.send("merge", round=1, parts=[])["rejected"] == []
    evaluated = talk.send("evaluate")
    assert 0 < evaluated["val_loss"] < 6
    assert evaluated["val_by_source"] == {"builtin": evaluated["val_loss"]}
    saved = talk.send("checkpoint", round=1, global_tokens=384, contributors=1, versions={})
    assert Path(saved["path"]).exists()
    assert talk.send("load_checkpoint", path=saved["path"], owned=[0, 1, 2, 3])["steps"] == 3
    broken = talk.send("load_checkpoint", path=str(tmp_path / "none.json"), owned=[])
    assert (broken["ok"], broken["kind"]) == (False, "damaged")
    assert talk.process.stdin is not None
    talk.process.stdin.close()
    assert talk.process.wait(10) == 0


def test_it_trains_on_after_its_steps_if_told_so(talk: Talk, tmp_path: Path) -> None:
    talk.send("setup", setup=setup(tmp_path))
    talk.send("initialise")
    talk.send("train", round=1, steps=2, go_on=True, global_tokens=0, contributors=1)
    talk.until("steps_done")
    later = talk.until("steps")  # one report a second
    assert later["step_in_round"] > 2
    assert talk.send("halt")["ok"]


def test_a_missing_device_is_one_sentence(talk: Talk, tmp_path: Path) -> None:
    reply = talk.send("setup", setup=setup(tmp_path, device="cuda:7"))
    assert (reply["ok"], reply["kind"]) == (False, "unavailable")
    assert "cuda:7" in reply["error"] and "--device cpu" in reply["error"]


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen({COMMAND!r}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        'p.stdin.write(b\'{"id": 1, "do": "halt"}\\n\'); p.stdin.flush()\n'
        "p.stdout.readline(); print(p.pid, flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()

    def gone() -> bool:
        try:
            return "Z" in Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True

    wait_for("the child's end", gone, 5)


def halt_as(body: str) -> str:
    """A patch: what `halt` does instead."""
    return f"def halt(self, message):\n    {body}\n    return {{}}\nchild.Child._do_halt = halt"


@pytest.mark.parametrize(
    ("do", "arguments", "says"),
    [
        ("dance", {}, "no command 'dance'"),
        ("evaluate", {}, "before 'setup'"),
        ("setup", {}, "lacks setup"),
        ("setup", {"setup": {"device": "cpu"}}, "the setup lacks config"),
    ],
)
def test_a_wrong_command_is_told_so_and_the_child_lives(
    talk: Talk, do: str, arguments: dict[str, Any], says: str
) -> None:
    reply = talk.send(do, **arguments)
    assert (reply["ok"], reply["kind"]) == (False, "usage") and says in reply["error"]
    assert talk.send("halt")["ok"]


def test_a_line_that_is_no_command_does_not_stop_it(talk: Talk) -> None:
    assert talk.process.stdin is not None
    for line in ("{nope", "3", '{"do": "halt"}'):
        talk.process.stdin.write(line + "\n")
        talk.process.stdin.flush()
        reply = talk.read()
        assert (reply["id"], reply["ok"], reply["kind"]) == (None, False, "usage")
    assert talk.send("stop")["ok"]
    assert talk.process.wait(10) == 0


def test_nothing_trains_before_there_is_a_state(talk: Talk, tmp_path: Path) -> None:
    talk.send("setup", setup=setup(tmp_path))
    start = {"round": 1, "steps": 1, "go_on": False, "global_tokens": 0, "contributors": 1}
    reply = talk.send("train", **start)
    assert (reply["ok"], reply["kind"]) == (False, "usage")
    assert talk.send("load_checkpoint", path=str(tmp_path / "none"), owned=[])["kind"] == "damaged"
    assert talk.send("train", **start)["ok"] is False
    talk.send("initialise")
    assert talk.send("train", **start)["ok"]


def test_what_is_printed_inside_does_not_reach_the_pipe() -> None:
    noise = halt_as('print("stray"); import os; os.write(1, b"raw\\n")')
    with talking(noise) as talk:
        assert talk.send("halt") == {"id": 1, "ok": True}


def test_values_without_a_word_in_json_become_null() -> None:
    patch = "child.Child._do_halt = lambda s, m: {'x': float('nan'), 'y': [float('inf')]}"
    with talking(patch) as talk:
        assert talk.send("halt") == {"id": 1, "ok": True, "x": None, "y": [None]}


def test_a_full_disk_is_told_and_the_child_lives(tmp_path: Path) -> None:
    patch = (
        "import errno, os\ndef full(_):\n    raise OSError(errno.ENOSPC, 'full')\nos.fsync = full"
    )
    with talking(patch) as talk:
        talk.send("setup", setup=setup(tmp_path))
        talk.send("initialise")
        for do in ("snapshot", "checkpoint"):
            reply = talk.send(do, round=1, global_tokens=0, contributors=1, versions={})
            assert (reply["ok"], reply["kind"]) == (False, "unavailable")
            assert "no space is left" in reply["error"]
        assert talk.send("evaluate")["val_loss"] > 0


@pytest.mark.parametrize(
    "fault", ["MemoryError('no memory')", "RuntimeError('CUDA out of memory')"]
)
def test_out_of_memory_ends_it_with_its_own_exit_code(fault: str) -> None:
    with talking(halt_as(f"raise {fault}")) as talk:
        reply = talk.send("halt")
        assert (reply["ok"], reply["kind"]) == (False, "crash") and "memory" in reply["error"]
        assert talk.process.wait(10) == OUT_OF_MEMORY


def test_out_of_memory_in_a_step_ends_it_so_too(tmp_path: Path) -> None:
    patch = "def bad(self):\n    raise RuntimeError('out of memory')\nchild.Child._step = bad"
    with talking(patch) as talk:
        talk.send("setup", setup=setup(tmp_path))
        talk.send("initialise")
        talk.send("train", round=1, steps=9, go_on=True, global_tokens=0, contributors=1)
        assert talk.process.wait(10) == OUT_OF_MEMORY


def test_an_interrupt_from_the_keyboard_is_the_daemons_affair(talk: Talk) -> None:
    assert talk.send("halt")["ok"]
    talk.process.send_signal(signal.SIGINT)
    assert talk.send("halt")["ok"]
