"""Real peers in real processes, for the end-to-end tests."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spesd.daemon.control import ask
from spesd.daemon.home import Home
from spesd.errors import SpesdError

LISTEN = "/ip4/127.0.0.1/tcp/0"
START_S = 60.0

TINY = """
name = "e2e"
seed = 7
[model]
d_model = 32
n_layers = 2
n_heads = 2
n_kv_heads = 2
head_dim = 16
ffn = 32
n_experts = 4
[optimizer]
lr = 3e-3
[schedule]
warmup_tokens = 1000
[round]
local_steps = {local_steps}
quorum = {quorum}
wire = "{wire}"
deadline_s = {deadline_s}
[swarm]
min_peers = {min_peers}
experts_per_peer = {own}
[data]
seq_len = 64
batch_size = 4
eval_batches = 2
"""


def run_toml(folder: Path, **values: Any) -> Path:
    """Write a run that a test can afford."""
    settings = {
        "local_steps": 8, "quorum": 0.5, "wire": "fp32", "deadline_s": 15.0, "min_peers": 1,
        "own": 0, **values,
    }  # fmt: skip
    path = folder / "run.toml"
    path.write_text(TINY.format(**settings))
    return path


def spesd(*arguments: str | Path, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run a spesd command to its end."""
    command = [sys.executable, "-m", "spesd.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


class PeerProcess:
    """A daemon in a process of its own."""

    def __init__(self, home: Path, *arguments: str | Path, peer_toml: str = "") -> None:
        self.home = home
        home.mkdir(parents=True, exist_ok=True)
        (home / "peer.toml").write_text("threads = 1\nnice = 0\n" + peer_toml)
        words = [*map(str, arguments), "--home", str(home)]
        if "--listen" not in words:
            words += ["--listen", LISTEN]
        self.errors = home / "stderr.txt"
        with self.errors.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "spesd.cli.main", *words],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def address(self, timeout_s: float = START_S) -> str:
        """Wait for the line that a volunteer types; return the address in it."""
        line = self._lines.get(timeout=timeout_s)
        words = line.split()
        assert words[:3] == ["spesd", "join", "--bootstrap"], (line, self.errors.read_text())
        return words[3]

    def status(self) -> dict[str, Any]:
        """Ask the daemon over its socket; {} if it does not answer now."""
        try:
            return ask(Home(self.home).socket, self.home, {"do": "status"}, timeout_s=5.0)
        except SpesdError:
            return {}

    def journal(self) -> list[dict[str, Any]]:
        """Read every event of every run of this home."""
        events = []
        for path in sorted(self.home.glob("runs/*/journal.jsonl")):
            events += [json.loads(line) for line in path.read_text().splitlines()]
        return events

    def merged(self) -> list[dict[str, Any]]:
        """The rounds that this peer has merged, oldest first."""
        return [e for e in self.journal() if e["event"] == "merged"]

    def send(self, number: int) -> None:
        """Send a signal to the daemon alone."""
        self.process.send_signal(number)

    def end(self, number: int = signal.SIGTERM, timeout_s: float = 15.0) -> int:
        """End the daemon and wait for it."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(
                f"the daemon in {self.home} did not end within {timeout_s} s"
            ) from None
        finally:
            if self.process.stdout is not None:
                self.process.stdout.close()


def wait_for(what: str, test: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """Ask again and again until `test` gives something true; return that."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = test()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.1)
