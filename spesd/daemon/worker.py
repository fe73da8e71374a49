"""The trainer as a supervised child process.

A CUDA crash or an out-of-memory kill takes the child and nothing else: calls in flight raise
WorkerLost and the daemon decides. Commands and events cross as JSON lines, weights as files.
"""

import asyncio
import contextlib
import itertools
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spesd.errors import DamagedState, SpesdError, Unavailable, UsageError
from spesd.train.protocol import OUT_OF_MEMORY

MAX_LINE = 4 * 2**20  # bytes; a merge of 4096 experts with several inputs each fits
_KINDS: dict[str, type[SpesdError]] = {
    "usage": UsageError,
    "unavailable": Unavailable,
    "damaged": DamagedState,
}

Reply = dict[str, Any]


class WorkerLost(Exception):
    """The trainer's process ended, or does not answer."""


class Worker:
    """One trainer process, from `start` to `stop` or its death."""

    def __init__(self, log: Path, on_event: Callable[[Reply], None]) -> None:
        self._log, self._on_event = log, on_event
        self._process: asyncio.subprocess.Process | None = None
        self._pending: dict[int, asyncio.Future[Reply]] = {}
        self._ids = itertools.count(1)
        self.lost = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """The child's process id while it lives."""
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    @property
    def out_of_memory(self) -> bool:
        """Whether the child ended because memory ran out.

        It says so itself, or the kernel kills it without a word: nobody else uses SIGKILL.
        """
        code = None if self._process is None else self._process.returncode
        return code in (OUT_OF_MEMORY, -signal.SIGKILL)

    async def start(self) -> None:
        """Start the child; `pump` must run from then on."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "spesd.train.child",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=MAX_LINE,
            )

    async def pump(self) -> None:
        """Read replies and events until the child ends; then say so to everybody who waits."""
        process = self._process
        assert process is not None and process.stdout is not None
        try:
            while line := await process.stdout.readline():
                self._take(line)
        except ValueError:  # a line over MAX_LINE: not one of ours
            process.kill()
        finally:
            self.lost.set()
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(WorkerLost("the trainer process ended"))
            self._pending.clear()
        await process.wait()

    def _take(self, line: bytes) -> None:
        message = json.loads(line)
        if "event" in message:
            self._on_event(message)
            return
        future = self._pending.pop(message["id"], None)
        if future is not None and not future.done():
            future.set_result(message)

    async def call(self, do: str, *, timeout_s: float = 600.0, **arguments: Any) -> Reply:
        """Have the trainer do something at its next step boundary; return its reply.

        Raises the SpesdError that the trainer reports, and WorkerLost if it is gone or silent.
        """
        process = self._process
        if process is None or process.stdin is None or self.lost.is_set():
            raise WorkerLost("the trainer process is not running")
        number = next(self._ids)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        line = json.dumps({"id": number, "do": do, **arguments}).encode() + b"\n"
        try:
            process.stdin.write(line)
            await process.stdin.drain()
            reply = await asyncio.wait_for(future, timeout_s)
        except (ConnectionError, TimeoutError) as error:
            raise WorkerLost(f"the trainer did not answer {do!r}: {error!r}") from None
        finally:
            self._pending.pop(number, None)
        if reply.get("ok"):
            return reply
        kind = _KINDS.get(str(reply.get("kind")))
        message = str(reply.get("error", "no reason given"))
        if kind is None:
            raise WorkerLost(f"the trainer failed at {do!r}: {message}")
        raise kind(message)

    async def stop(self, grace_s: float = 2.0) -> None:
        """End the child: by asking, then by force. It is gone when this returns."""
        process = self._process
        if process is None:
            return
        if process.returncode is None and process.stdin is not None:
            with contextlib.suppress(ConnectionError, RuntimeError):
                process.stdin.close()  # end of input: the child exits at its next step boundary
            try:
                await asyncio.wait_for(process.wait(), grace_s)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        await process.wait()
