"""The local socket behind `spesd status --home`, `leave`, `pause` and `resume`.

One JSON object a line, both ways. Only the user who owns the home can reach it (mode 0600).
"""

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from spesd.errors import SpesdError, Unavailable

MAX_REQUEST = 64 * 1024
IDLE_S = 10.0

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


@contextlib.asynccontextmanager
async def serve_control(path: Path, handler: Handler) -> Any:
    """Serve requests on `path` for as long as the context lasts."""

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await asyncio.wait_for(reader.readline(), IDLE_S)
            try:
                request = json.loads(line)
                known = isinstance(request, dict) and isinstance(request.get("do"), str)
                reply = await handler(request) if known else {"error": "a request is {do: NAME}."}
            except SpesdError as error:
                reply = {"error": str(error)}
            writer.write(json.dumps(reply).encode() + b"\n")
            await asyncio.wait_for(writer.drain(), IDLE_S)
        except (OSError, ValueError, TimeoutError):
            pass  # a client that went away or spoke nonsense is its own problem
        finally:
            writer.close()

    path.unlink(missing_ok=True)  # the home's lock is ours, so a socket there is a leftover
    server = await asyncio.start_unix_server(one, path=str(path), limit=MAX_REQUEST)
    path.chmod(0o600)
    try:
        yield
    finally:
        server.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108 - server.close() may have removed it already


def ask(path: Path, home: Path, request: dict[str, Any], timeout_s: float = 10.0) -> dict[str, Any]:
    """Ask the daemon of `home` something; blocking, for the command line."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(timeout_s)
            link.connect(str(path))
            link.sendall(json.dumps(request).encode() + b"\n")
            raw = b"".join(iter(lambda: link.recv(65536), b""))
        reply = json.loads(raw)
    except (OSError, ValueError) as error:
        raise Unavailable(
            f"no daemon answers in the home {home} ({error}); start one with `spesd join`, or "
            "name the right one with --home."
        ) from None
    if "error" in reply:
        raise Unavailable(str(reply["error"]))
    return dict(reply)
