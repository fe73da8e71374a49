"""Documents in local text and JSONL files, read range by range in bounded memory.

Decides what one document of such a file is, and cuts every file into byte ranges that can be read
in any order; a range starts at a line. Never decides who reads which range (`order` does).
"""

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from spesd.errors import ConfigError, Unavailable

RANGE_BYTES = 2**20  # the smallest range
MOST_RANGES = 256  # of one file: a larger file has larger ranges
LONGEST_LINE = 2**26  # bytes; a longer line is refused before it fills the memory
TEXT_DOCUMENT = 8_000  # bytes; a text file ends a document at the first blank line after these,
TEXT_DOCUMENT_MOST = 64_000  # or at the first end of a line after these


@dataclass(frozen=True)
class FileRange:
    """The lines of a file that begin at `begin` or later and before `end`."""

    path: str
    begin: int
    end: int | None  # None: to the file's end


def ranges(files: list[str]) -> list[FileRange]:
    """Cut files into ranges by their sizes alone, so that every peer cuts them alike."""
    found = []
    for path in files:
        size = Path(path).stat().st_size
        if path.endswith(".gz"):  # no way to begin in the middle
            found.append(FileRange(path, 0, None))
            continue
        width = max(RANGE_BYTES, -(-size // MOST_RANGES))
        starts = range(0, size, width)
        found += [FileRange(path, at, at + width) for at in starts[:-1]]
        found += [FileRange(path, at, None) for at in starts[-1:]]
    return found


def text_documents(part: FileRange) -> Iterator[str]:
    """Yield the documents of a range of plain text, cut at blank lines."""
    lines: list[bytes] = []
    size = 0
    for at, line in _lines(part):
        lines.append(line)
        size += len(line)
        blank = not line.strip()
        if (blank and size >= TEXT_DOCUMENT) or size >= TEXT_DOCUMENT_MOST:
            yield _decoded(b"".join(lines), part, at)
            lines, size = [], 0
    if lines:
        yield _decoded(b"".join(lines), part, at)


def jsonl_values(
    part: FileRange, field: str, where: str, skip: Callable[[], None]
) -> Iterator[Any]:
    """Yield one field of each line of a range; a line without it is skipped.

    Raises ConfigError if the file's first line lacks the field, Unavailable for a line that is not
    a JSON object.
    """
    for at, line in _lines(part):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise Unavailable(
                f"{where} cannot be read: line {_line_number(part, at)} of {part.path} is not a "
                "JSON object; correct or remove it."
            )
        if field in row:
            yield row[field]
        elif at == 0:
            raise no_field(where, field, list(row))
        else:
            skip()


def no_field(where: str, field: str, fields: list[str]) -> ConfigError:
    """Return the refusal of a source whose documents have no such field."""
    return ConfigError(
        f"{where} has no field {field!r}; its fields are {', '.join(sorted(fields))}: set "
        "data.sources.field, or --field of spesd eval."
    )


def _open(path: str) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.endswith(".gz") else Path(path).open("rb")


def _lines(part: FileRange) -> Iterator[tuple[int, bytes]]:
    """Yield (byte offset, line) for every line that begins in the range."""
    with _open(part.path) as file:
        at = part.begin
        if at:
            file.seek(at - 1)
            at += len(_line(file, part)) - 1  # the line that began before belongs to that range
        while part.end is None or at < part.end:
            line = _line(file, part)
            if not line:
                return
            yield at, line.removeprefix(b"\xef\xbb\xbf") if at == 0 else line
            at += len(line)


def _line(file: BinaryIO, part: FileRange) -> bytes:
    line = file.readline(LONGEST_LINE + 1)
    if len(line) > LONGEST_LINE:
        raise Unavailable(
            f"{part.path} has a line of more than {LONGEST_LINE >> 20} MiB; cut it into shorter "
            "documents."
        )
    return line


def _decoded(raw: bytes, part: FileRange, at: int) -> str:
    try:
        return raw.decode("utf-8").replace("\r\n", "\n").strip("\n")
    except UnicodeDecodeError:
        raise Unavailable(
            f"{part.path} is not UTF-8 text (before byte {at + len(raw)}); convert it, or correct "
            "the path."
        ) from None


def _line_number(part: FileRange, at: int) -> int:
    with _open(part.path) as file:
        number, left = 1, at
        while left and (chunk := file.read(min(left, 2**20))):
            number += chunk.count(b"\n")
            left -= len(chunk)
    return number
