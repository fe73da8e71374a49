"""The control socket: over a real socket, with clients that behave and clients that do not."""

import asyncio
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from spesd.daemon.control import ask, serve_control
from spesd.errors import Unavailable, UsageError


async def handler(request: dict[str, Any]) -> dict[str, Any]:
    if request["do"] == "fail":
        raise UsageError("that cannot be")
    return {"done": request["do"], "large": "x" * 300_000}


async def test_requests_are_answered_and_errors_are_sentences(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    async with serve_control(path, handler):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        reply = await asyncio.to_thread(ask, path, tmp_path, {"do": "status"})
        assert reply["done"] == "status"
        assert len(reply["large"]) == 300_000
        with pytest.raises(Unavailable, match="that cannot be"):
            await asyncio.to_thread(ask, path, tmp_path, {"do": "fail"})
    assert not path.exists()


async def test_nonsense_and_silence_harm_nobody(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    path.write_text("left over")
    async with serve_control(path, handler):
        silent = socket.socket(socket.AF_UNIX)
        silent.connect(str(path))
        for raw in (b"\xff\xfe\n", b"[]\n", b"{}\n", b"x" * 200_000 + b"\n"):
            with socket.socket(socket.AF_UNIX) as link:
                link.connect(str(path))
                await asyncio.to_thread(link.sendall, raw)
        reply = await asyncio.to_thread(ask, path, tmp_path, {"do": "status"})
        assert reply["done"] == "status"
        silent.close()


def test_nobody_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no daemon answers"):
        ask(tmp_path / "control.sock", tmp_path, {"do": "status"})
