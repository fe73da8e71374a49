"""A whole swarm on one machine: one meeting point, four peers, real text, in a few minutes.

Run by `make demo`. Starts real processes with homes of their own, shows their progress, checks what
they promise, draws the loss, prints a sample, and stops everything.
"""

import argparse
import json
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PEERS = 4
ROUNDS = 12
LISTEN = "/ip4/127.0.0.1/tcp/0"
STOP_S = 15.0
START_S = 60.0  # until a daemon says where it is
POLL_S = 2.5


class Failed(Exception):
    """The demo did not keep what it promises."""


class Swarm:
    """The processes of the demo."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.processes: list[subprocess.Popen[str]] = []
        self.homes: list[Path] = []

    def start(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a daemon in a home of its own."""
        home = self.out / name
        home.mkdir(parents=True)
        (home / "peer.toml").write_text('threads = 1\nnice = 0\ndevice = "cpu"\n')
        command = [sys.executable, "-m", "spesd.cli.main", *arguments]
        log = (home / "stderr.txt").open("w")
        process = subprocess.Popen(
            [*command, "--home", str(home), "--listen", LISTEN],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        log.close()
        self.processes.append(process)
        return process

    def address(self, process: subprocess.Popen[str]) -> str:
        """Wait for the line that a volunteer types."""
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], START_S)
        line = process.stdout.readline() if ready else ""
        if not line.startswith("spesd join --bootstrap "):
            raise Failed(f"a daemon did not start; see {self.out}/*/stderr.txt")
        return line.split()[-1]

    def stop(self) -> None:
        """Have everybody leave, as with Ctrl-C, and see that they and their children do."""
        family = descendants([process.pid for process in self.processes])
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        late = []
        deadline = time.monotonic() + STOP_S
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.append(process.pid)
                process.kill()
                process.wait()
        while (left := family & living().keys()) and time.monotonic() < deadline:
            time.sleep(0.1)
        if late or left:
            raise Failed(f"did not end within {STOP_S:.0f} s: {sorted({*late, *left})}")


def living() -> dict[int, int]:
    """Return the parent of every process that has not ended, by pid; nothing without a /proc."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # it ended meanwhile
        if state != "Z":
            found[int(path.parent.name)] = int(parent)
    return found


def descendants(roots: list[int]) -> set[int]:
    """Return the pids of all living processes below these."""
    parents = living()
    found: set[int] = set()
    frontier = set(roots)
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


def events(home: Path, *kinds: str) -> list[dict[str, Any]]:
    """Return a peer's journaled events of these kinds."""
    found = []
    for path in home.glob("runs/*/journal.jsonl"):
        whole = path.read_text().rpartition("\n")[0]  # the last line may be half written
        found += [e for e in map(json.loads, whole.splitlines()) if e["event"] in kinds]
    return found


def progress(homes: list[Path], began: float) -> int:
    """Print one line about the swarm; return the round that everybody has merged."""
    last = [(events(h, "merged") or [None])[-1] for h in homes]
    done = [e["round"] if e else 0 for e in last]
    tree = observe("--home", str(homes[0]))
    rate = sum(p["tokens_per_s"] for p in tree["peers"])
    owners = sum(len(e["owners"]) for e in tree["experts"]) / max(len(tree["experts"]), 1)
    losses = [e["loss"] for e in last if e and e["loss"] is not None]
    held = [e["val_loss"] for e in last if e and e["val_loss"] is not None]
    print(
        f"{time.monotonic() - began:5.0f} s  round {min(done):3d}  "
        f"peers {len(tree['peers'])}  loss {mean(losses)}  held-out {mean(held)}  "
        f"{rate:7.0f} tokens/s  owners per expert {owners:.1f}  coverage {tree['coverage']:.0%}",
        flush=True,
    )
    return min(done)


def mean(values: list[float]) -> str:
    """Return the mean as text."""
    return f"{sum(values) / len(values):.3f}" if values else "  -  "


def observe(*where: str) -> dict[str, Any]:
    """Ask a daemon, or the swarm as a mere observer; nobody there is an empty swarm."""
    raw = run("status", *where, "--json", check=False)
    return dict(json.loads(raw)) if raw.strip() else {"peers": [], "experts": [], "coverage": 0.0}


def run(*arguments: str, check: bool = True) -> str:
    """Run a spesd command; return what it prints."""
    command = [sys.executable, "-m", "spesd.cli.main", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        raise Failed(f"spesd {arguments[0]} did not answer within 60 s") from None
    if check and done.returncode:
        raise Failed(f"spesd {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout


def draw(homes: list[Path], path: Path) -> None:
    """Draw training and held-out loss over the swarm's tokens, a line for each peer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for number, home in enumerate(homes, 1):
        merged = events(home, "merged")
        tokens = [e["global_tokens"] for e in merged]
        axes.plot(tokens, [e["loss"] for e in merged], alpha=0.5, label=f"peer {number}, training")
        held = [e for e in events(home, "evaluated", "merged") if e["val_loss"] is not None]
        axes.plot(
            [e["global_tokens"] for e in held],
            [e["val_loss"] for e in held],
            marker=".",
            label=f"peer {number}, held-out",
        )
    axes.set_xlabel("tokens trained by the swarm")
    axes.set_ylabel("loss, nats per byte")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def check(homes: list[Path], tree: dict[str, Any]) -> None:
    """Hold the swarm to what the demo promises."""
    final = [events(h, "merged")[-1] for h in homes]
    first = [events(h, "evaluated")[0]["val_loss"] for h in homes]
    held = [e["val_loss"] for e in final]
    promises = [
        (min(e["round"] for e in final) >= 8, "at least 8 rounds"),
        (tree["coverage"] == 1.0, "every expert has an owner"),
        (len(tree["peers"]) == PEERS, f"{PEERS} peers in the status"),
        (max(held) <= 0.75 * min(first), "held-out loss fell by 25 % or more"),
        (max(held) <= 1.02 * min(held), "the peers agree within 2 %"),
    ]
    for kept, promise in promises:
        print(f"  {'ok  ' if kept else 'FAIL'} {promise}")
    if not all(kept for kept, _ in promises):
        raise Failed(f"held-out losses: first {first}, last {held}")


def main() -> None:
    """Run the demo; exit 1 with a sentence if it does not keep a promise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder to fill")
    parser.add_argument("--minutes-limit", type=float, default=3.5, help="give up after these")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    swarm = Swarm(options.out)
    began = time.monotonic()
    try:
        play(swarm, began, 60 * options.minutes_limit)
    except Failed as failure:
        print(f"demo: {failure}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        print("demo: interrupted; everybody leaves", file=sys.stderr)
        code = 130
    else:
        code = 0
    try:
        swarm.stop()
    except Failed as failure:
        print(f"demo: {failure}", file=sys.stderr)
        code = 1
    if code == 0:
        print(
            f"The demo kept its promises; no process is left; {time.monotonic() - began:.0f} s in "
            "all."
        )
    sys.exit(code)


def play(swarm: Swarm, began: float, limit_s: float) -> None:
    """Start everybody, watch, check, show."""
    config = str(Path(__file__).with_name("demo.toml"))
    address = swarm.address(swarm.start("bootstrap", "bootstrap"))
    print(f"meeting point: {address}", flush=True)
    founder = swarm.start("peer1", "start", config, "--bootstrap", address)
    joiners = [swarm.start(f"peer{n}", "join", "--bootstrap", address) for n in range(2, PEERS + 1)]
    homes = [swarm.out / f"peer{n}" for n in range(1, PEERS + 1)]
    for process in (founder, *joiners):
        swarm.address(process)
    while progress(homes, began) < ROUNDS:
        if time.monotonic() - began > limit_s:
            raise Failed(f"not {ROUNDS} rounds within {limit_s:.0f} s; see {swarm.out}/*/")
        if any(p.poll() is not None for p in swarm.processes):
            raise Failed(f"a daemon ended by itself; see {swarm.out}/*/stderr.txt")
        time.sleep(POLL_S)
    print("\n" + run("status", "--bootstrap", address))
    check(homes, observe("--bootstrap", address))
    swarm.stop()
    draw(homes, swarm.out / "loss.png")
    print(f"\nloss over tokens: {swarm.out / 'loss.png'}")
    print("\na sample of what the model writes:\n")
    print(run("generate", str(homes[0]), "--prompt", "KING. ", "--tokens", "240"))


if __name__ == "__main__":
    main()
