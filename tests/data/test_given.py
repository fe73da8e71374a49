"""Text from the command line: what kind of file a name means, and what is wrong with it."""

import gzip
import json
from pathlib import Path

import pytest

from spesd.data.given import given_documents
from spesd.errors import ConfigError, SpesdError, Unavailable


def test_the_name_tells_text_from_jsonl_and_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "a.txt").write_text('{"text": "as it is"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write('{"body": "three", "text": 3}\n')
    pq.write_table(pa.table({"text": ["four"]}), tmp_path / "d.parquet")

    def read(name: str, field: str = "text") -> list[str]:
        return list(given_documents(str(tmp_path / name), field).in_order())

    assert read("a.txt") == ['{"text": "as it is"}']
    assert read("b.jsonl") == ["one", "two"]
    assert read("c.jsonl.gz", "body") == ["three"]
    assert read("d.parquet") == ["four"]
    (tmp_path / "e.jsonl").write_text(json.dumps({"text": "five"}))
    assert read("[be].jsonl") == ["one", "two", "five"]


def test_what_is_wrong_with_a_name_is_a_sentence(tmp_path: Path) -> None:
    def says(name: str, kind: type[SpesdError], words: str) -> None:
        with pytest.raises(kind, match=words):
            list(given_documents(str(tmp_path / name), "text").in_order())

    says("none*.txt", Unavailable, "no file")
    (tmp_path / "a.txt").write_text("")
    says("a.txt", Unavailable, "is empty")
    (tmp_path / "b.jsonl").write_text('{"text": " "}\n')
    says("b.jsonl", Unavailable, "holds no text")
    says("*", Unavailable, "several kinds")
    (tmp_path / "b.jsonl").write_text('{"body": "x"}\n')
    says("b.jsonl", ConfigError, "--field")
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    says("a.txt", Unavailable, "not UTF-8")
    says("", Unavailable, "no file")
    says("x" * 300, Unavailable, "cannot be read")
