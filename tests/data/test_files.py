"""Local files: every document once however a file is cut, and errors that name the place."""

import gzip
import json
from pathlib import Path

import pytest

from spesd.data import files
from spesd.data.files import FileRange, jsonl_values, ranges, text_documents
from spesd.errors import ConfigError, Unavailable


def values(path: Path) -> list[object]:
    skipped: list[None] = []
    return [
        value
        for part in ranges([str(path)])
        for value in jsonl_values(part, "text", "the source", lambda: skipped.append(None))
    ]


@pytest.mark.parametrize("width", [1, 7, 64, 1000])
@pytest.mark.parametrize("end", ["", "\n"])
def test_every_line_is_in_one_range(
    width: int, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "RANGE_BYTES", width)
    monkeypatch.setattr(files, "MOST_RANGES", 10**6)
    texts = [f"{n} " + "ä" * (n * 7 % 50) for n in range(40)]
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(json.dumps({"text": t}, ensure_ascii=False) for t in texts) + end)
    assert len(ranges([str(path)])) >= path.stat().st_size // max(width, 1)
    assert values(path) == texts


def test_a_book_becomes_documents_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    paragraphs = [f"paragraph {n}\r\n" + "word " * 60 for n in range(400)]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(paragraphs).encode())
    documents = list(text_documents(FileRange(str(path), 0, None)))
    assert len(documents) > 10 and max(map(len, documents)) < 9000
    assert "\n\n".join(documents).split() == " ".join(paragraphs).split()
    assert documents[0].startswith("paragraph 0\nword")


def test_text_without_blank_lines_is_cut_at_lines(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text("".join(f"line {n}\n" for n in range(40_000)))
    documents = list(text_documents(FileRange(str(path), 0, None)))
    assert max(map(len, documents)) < files.TEXT_DOCUMENT_MOST + 100
    assert "\n".join(documents).split("\n") == [f"line {n}" for n in range(40_000)]


def test_compressed_files_are_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n{"text": "b"}\n'))
    assert values(path) == ["a", "b"]


def test_a_bad_line_is_named_by_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "RANGE_BYTES", 20)
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n' * 5 + "{oops\n" + '{"text": "b"}\n')
    with pytest.raises(Unavailable, match=r"line 6 of .*x\.jsonl is not a JSON object"):
        values(path)


def test_a_field_that_is_missing_from_the_start_is_wrong_use(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"body": "a", "id": 1}\n')
    with pytest.raises(ConfigError, match="'text'; its fields are body, id"):
        values(path)
    path.write_text('{"text": "a"}\n{"body": "a"}\n\n{"text": "b"}\n')
    assert values(path) == ["a", "b"]  # one stray line does not end a run


def test_what_is_no_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(b"ok\n\xff\xfe\x00")
    with pytest.raises(Unavailable, match="not UTF-8"):
        list(text_documents(FileRange(str(path), 0, None)))
    monkeypatch.setattr(files, "LONGEST_LINE", 10)
    path.write_text("much longer than ten bytes")
    with pytest.raises(Unavailable, match="has a line of more than"):
        list(text_documents(FileRange(str(path), 0, None)))
