"""The trainer's process: commands in as JSON lines, replies and events out, weights as files.

Trains in the main thread and takes commands between steps, so a command waits at most one step.
Ends with its parent, whatever ends that. Run as `python -m spesd.train.child`.
"""

import ctypes
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TextIO

from spesd.errors import SpesdError, UsageError
from spesd.train.allocator import return_memory
from spesd.train.protocol import (
    OUT_OF_MEMORY,
    Message,
    check_command,
    failure,
    parse_command,
    parse_setup,
    to_line,
)

REPORT_S = 1.0
BACKLOG = 64
CRASHED = 3  # exit code after a fault of the device
_PR_SET_PDEATHSIG = 1


class Child:
    """The loop around one Trainer."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._commands: queue.Queue[str | None] = queue.Queue(maxsize=BACKLOG)
        self._trainer: Any = None
        self._training = False
        self._target = 0
        self._go_on = False
        self._told = False
        self._reported_at = 0.0
        self._rate = (0.0, 0)  # (when, tokens) of the last report

    def run(self, lines: TextIO) -> int:
        """Serve until the input ends; return the exit code."""
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()
        while True:
            try:
                line = self._commands.get(block=not self._training)
            except queue.Empty:
                self._step()
                continue
            if line is None or self._obey(line) == "stop":
                return 0

    def _read(self, lines: TextIO) -> None:
        try:
            for line in lines:
                self._commands.put(line)
        finally:
            self._commands.put(None)  # the main thread must see the end, whatever ended it

    def _say(self, message: Message) -> None:
        self._out.write(to_line(message))
        self._out.flush()

    def _obey(self, line: str) -> str:
        """Carry a line out and reply; return the command's name."""
        number = None
        try:
            message = parse_command(line)
            number = message["id"]
            check_command(message, is_set_up=self._trainer is not None)
            action: Callable[[Message], Message] = getattr(self, f"_do_{message['do']}")
            reply = action(message)
        except SpesdError as error:
            self._say(failure(number, error))
            return ""
        except (MemoryError, RuntimeError) as error:
            self._say({"id": number, "ok": False, "kind": "crash", "error": str(error)[:500]})
            raise
        self._say({"id": number, "ok": True, **reply})
        return str(message["do"])

    # --- commands ---------------------------------------------------------------------------

    def _do_setup(self, message: Message) -> Message:
        import torch  # seconds of import: a mistake before it is told at once

        from spesd.train.trainer import Trainer

        given = message["setup"]
        setup = parse_setup(given)
        if given.get("threads"):
            torch.set_num_threads(int(given["threads"]))
        if given.get("nice"):
            os.nice(int(given["nice"]))
        self._trainer = Trainer(setup)
        return {
            "parameters": self._trainer.model.num_parameters(),
            "tokens_per_step": self._trainer.config.data.tokens_per_step,
        }

    def _do_initialise(self, message: Message) -> Message:
        self._trainer.initialise()
        return {}

    def _do_load_checkpoint(self, message: Message) -> Message:
        trainer = self._trainer
        trainer.load_checkpoint(trainer.store.read(message["path"]), message["owned"])
        return {"steps": trainer.steps, "tokens": trainer.tokens}

    def _do_load_state(self, message: Message) -> Message:
        self._trainer.load_state(message["parts"])
        return {}

    def _do_own(self, message: Message) -> Message:
        self._trainer.set_owned(message["experts"])
        return {}

    def _do_train(self, message: Message) -> Message:
        if not self._trainer.ready:
            raise UsageError("there is no whole state to train on; initialise or load one first.")
        self._trainer.begin_round(
            message["round"], message["global_tokens"], message["contributors"]
        )
        self._training, self._told = True, False
        self._target, self._go_on = int(message["steps"]), bool(message["go_on"])
        self._rate = (time.monotonic(), self._trainer.tokens)
        return {}

    def _do_halt(self, message: Message) -> Message:
        self._training = False
        return {}

    def _do_stop(self, message: Message) -> Message:
        return {}

    def _do_snapshot(self, message: Message) -> Message:
        self._training = False
        trainer = self._trainer
        self._report()
        offered, refused = trainer.snapshot()
        shared = next((p["tokens"] for p in offered if p["part"] == "shared"), 0)
        return {
            "parts": offered,
            "refused": refused,
            "tokens": shared,
            "loss": trainer.round_loss,
            "step_in_round": trainer.step_in_round,
        }

    def _do_merge(self, message: Message) -> Message:
        reply: Message = self._trainer.merge(message["round"], message["parts"])
        return reply

    def _do_evaluate(self, message: Message) -> Message:
        val_loss = self._trainer.evaluate()
        return {"val_loss": val_loss, "val_by_source": self._trainer.val_by_source}

    def _do_checkpoint(self, message: Message) -> Message:
        path = self._trainer.checkpoint(
            message["round"],
            message["global_tokens"],
            message["contributors"],
            message["versions"],
        )
        return {"path": str(path)}

    # --- training ---------------------------------------------------------------------------

    def _step(self) -> None:
        trainer = self._trainer
        result = trainer.step()
        if result.loss is None:
            self._say({"event": "bad_step", "round": trainer.round, "reason": result.reason})
        if time.monotonic() - self._reported_at >= REPORT_S:
            self._report()
        if trainer.step_in_round >= self._target and not self._told:
            self._told = True
            self._training = self._go_on
            self._report()
            self._say(
                {
                    "event": "steps_done",
                    "round": trainer.round,
                    "step_in_round": trainer.step_in_round,
                }
            )

    def _report(self) -> None:
        trainer, now = self._trainer, time.monotonic()
        since, tokens = self._rate
        self._reported_at = now
        self._say(
            {
                "event": "steps",
                "round": trainer.round,
                "step_in_round": trainer.step_in_round,
                "steps": trainer.steps,
                "tokens": trainer.tokens,
                "tokens_per_s": (trainer.tokens - tokens) / max(now - since, 1e-6),
                "loss": trainer.round_loss,
            }
        )


def _end_with_parent() -> None:
    """Have the kernel kill us when our parent dies; elsewhere the end of the input does it."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


def _is_out_of_memory(error: Exception) -> bool:
    """Tell it by torch's words: on the CPU its error has no type of its own."""
    words = str(error).lower()
    return isinstance(error, MemoryError) or any(
        sign in words for sign in ("out of memory", "not enough memory", "can't allocate memory")
    )


def main() -> None:
    """Take over stdout for replies alone: what anybody prints goes to stderr."""
    _end_with_parent()
    return_memory()  # before torch is there: blocks handed out earlier follow the old rule
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the daemon decides when we end
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        code = Child(out).run(sys.stdin)
    except (MemoryError, RuntimeError) as error:  # CUDA's faults are RuntimeErrors
        traceback.print_exc()
        code = OUT_OF_MEMORY if _is_out_of_memory(error) else CRASHED
    out.flush()
    os._exit(code)  # a reader thread may still wait for input


if __name__ == "__main__":
    main()
