"""Messages on a raw libp2p stream, each with a limit and a deadline.

hivemind's own streams read whatever length the other side names, and wait for ever for a reader
that has stopped reading; these do neither. A message is four bytes of length (big endian), then
protobuf. Never decides what a message means.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError, Message

from spesd.errors import ProtocolViolation

PIECE_BYTES = 64 * 1024
_HEADER = 4


async def read_message(
    reader: asyncio.StreamReader, kind: Any, limit: int, moved: Callable[[], None]
) -> Any:
    """Return the next message, or None where the stream ends; `moved` is called as bytes arrive.

    Raises ProtocolViolation for a message that is too long or none at all, EOFError for half a one.
    """
    header = await reader.read(_HEADER)
    if not header:
        return None
    if len(header) < _HEADER:
        header += await reader.readexactly(_HEADER - len(header))
    left = int.from_bytes(header, "big")
    if left > limit:
        raise ProtocolViolation(f"it sent a message of {left} bytes")
    raw = bytearray()
    while left:
        piece = await reader.read(min(left, PIECE_BYTES))
        if not piece:
            raise EOFError("the stream ended within a message")
        moved()
        raw += piece
        left -= len(piece)
    try:
        return kind.FromString(bytes(raw))
    except DecodeError:
        raise ProtocolViolation("it sent a message that cannot be decoded") from None


async def write_message(writer: asyncio.StreamWriter, message: Message, stall_s: float) -> None:
    """Send a message; TimeoutError if its reader takes nothing for `stall_s`."""
    raw = message.SerializeToString()
    data = memoryview(len(raw).to_bytes(_HEADER, "big") + raw)
    for at in range(0, len(data), PIECE_BYTES):
        writer.write(data[at : at + PIECE_BYTES])
        async with asyncio.timeout(stall_s):
            await writer.drain()
