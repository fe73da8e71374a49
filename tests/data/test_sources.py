"""Sources: what is skipped, cut and refused, and that a local one leaves no trace elsewhere."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spesd.config import DataConfig, SourceConfig
from spesd.configtree import from_tree
from spesd.data import sources as sources_module
from spesd.data import stream as stream_module
from spesd.data.sources import Documents, check_sources
from spesd.data.stream import TextStream
from spesd.data.tokenizer import ByteTokenizer
from spesd.errors import ConfigError, Unavailable


def source(kind: str, path: Path | str, name: str = "mine") -> SourceConfig:
    return from_tree(SourceConfig, {"kind": kind, "path": str(path), "name": name})


def documents(kind: str, path: Path) -> Documents:
    return Documents(source(kind, path), str(path))


def lines(path: Path, rows: list[object]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_what_is_no_text_is_skipped_and_counted(tmp_path: Path) -> None:
    rows = [{"text": t} for t in ("a", 5, None, "", "  \n", ["b"], "c")]
    found = documents("jsonl", lines(tmp_path / "x.jsonl", [*rows, {"other": "d"}]))
    assert list(found.in_order()) == ["a", "c"]
    assert found.skipped == 6


def test_a_long_document_becomes_several_and_loses_nothing(tmp_path: Path) -> None:
    text = "".join(f"{n:07} " for n in range(400_000))
    found = list(documents("jsonl", lines(tmp_path / "x.jsonl", [{"text": text}])).in_order())
    assert len(found) == 4 and max(map(len, found)) <= sources_module.LONGEST_DOCUMENT
    assert "".join(found) == text


def test_half_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a\\ud800b \\ud83d\\ude42"}')
    assert list(documents("jsonl", path).in_order()) == ["a?b 🙂"]


def test_one_text_file_is_enough_to_train_on(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("\n\n".join(f"paragraph {n}" for n in range(5000)))
    data = DataConfig(seq_len=16, batch_size=2, sources=(source("text", path),))
    assert TextStream(data, ByteTokenizer(), seed=1, peer_id="a").next_batch()[0].shape == (2, 16)


def test_row_groups_of_one_parquet_file_are_parts(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": [f"d{n}" for n in range(100)]}), path, row_group_size=10)
    found = documents("parquet", path)
    assert found.parts == 10
    assert [t for part in range(10) for t in found.read(part)] == [f"d{n}" for n in range(100)]


def test_wrong_parquet_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"body": ["a"], "id": [1]}), path)
    with pytest.raises(ConfigError, match="no field 'text'; its fields are body, id"):
        documents("parquet", path)
    path.write_bytes(b"PAR1 and then nothing of the kind")
    with pytest.raises(Unavailable, match=r"'mine' .* cannot be"):
        list(documents("parquet", path).in_order())
    good = tmp_path / "y.parquet"
    pq.write_table(pa.table({"text": [f"{n}" * 500 for n in range(2000)]}), good)
    raw = bytearray(good.read_bytes())
    raw[40:4000] = b"\xff" * 3960
    good.write_bytes(raw)
    with pytest.raises(Unavailable, match=r"'mine' .* cannot be read"):
        list(documents("parquet", good).in_order())


def test_a_dataset_by_name_is_streamed_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "BLOCK", 7)
    folder = tmp_path / "dataset"  # a folder is a name that needs no network
    folder.mkdir()
    for shard in range(3):
        table = pa.table({"text": [f"{shard}-{n} " + "x" * 20 for n in range(40)]})
        pq.write_table(table, folder / f"{shard}.parquet")
    data = DataConfig(seq_len=16, batch_size=2, sources=(source("hub", folder),))
    check_sources(data, {})
    first = TextStream(data, ByteTokenizer(), seed=1, peer_id="a")
    for _ in range(130):  # into the second epoch
        first.next_batch()
    second = TextStream(data, ByteTokenizer(), seed=1, peer_id="a")
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for _ in range(60):
        assert np.array_equal(first.next_batch()[0], second.next_batch()[0])


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    begun = time.monotonic()
    with pytest.raises(Unavailable, match="does not answer"):
        check_sources(DataConfig(sources=(source("hub", "some/name"),)), {})
    assert time.monotonic() - begun < 10


def test_an_unreadable_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"'mine'"):
        documents("jsonl", tmp_path / ("x" * 300))
    odd = lines(tmp_path / "a[1].jsonl", [{"text": "a"}])  # its name is also a glob
    assert list(documents("jsonl", odd).in_order()) == ["a"]
    zipped = tmp_path / "x.jsonl.gz"
    zipped.write_bytes(b"\x1f\x8b\x08\x00 cut off")
    with pytest.raises(Unavailable, match=r"'mine' .* cannot be read"):
        list(documents("jsonl", zipped).in_order())


def test_held_out_batches_come_from_every_source_and_are_made_once(tmp_path: Path) -> None:
    kinds = []
    for name in ("aaaa", "bbbb"):
        path = lines(tmp_path / f"{name}.jsonl", [{"text": f"{name} {n}"} for n in range(300)])
        kinds.append(source("jsonl", path, name))

    class Counting(ByteTokenizer):
        calls = 0

        def encode(self, text: str) -> list[int]:
            self.calls += 1
            return super().encode(text)

    tokenizer = Counting()
    data = DataConfig(seq_len=32, batch_size=1, held_out=0.2, sources=tuple(kinds))
    stream = TextStream(data, tokenizer, seed=1, peer_id="a")
    by_source = stream.held_out_by_source(3)
    assert [(n, len(b)) for n, b in by_source.items()] == [("aaaa", 2), ("bbbb", 1)]
    for name, batches in by_source.items():
        text = ByteTokenizer().decode(np.concatenate([b[0] for b in batches]).ravel().tolist())
        assert set(text) <= set(f"{name} 0123456789"), name
    assert len(stream.held_out_batches(1)) == 2  # one of each, though only one was asked for
    stream.held_out_batches(2)
    calls = tokenizer.calls
    stream.held_out_batches(2)
    assert tokenizer.calls == calls > 0


CHILD = """
import sys
from spesd.config import DataConfig, SourceConfig
from spesd.data.stream import TextStream
from spesd.data.tokenizer import ByteTokenizer
def read(kind, path):
    source = SourceConfig(kind=kind, path=path, name=kind)
    TextStream(DataConfig(sources=(source,)), ByteTokenizer(), seed=1, peer_id="a").next_batch()
read("builtin", "")
read("jsonl", sys.argv[1])
assert "datasets" not in sys.modules
read("parquet", sys.argv[2])
"""


def test_local_sources_print_nothing_and_write_no_cache(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    texts = [f"document {n}" for n in range(200)]
    path = lines(tmp_path / "x.jsonl", [{"text": t} for t in texts])
    pq.write_table(pa.table({"text": texts}), tmp_path / "x.parquet")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), str(tmp_path / "x.parquet")],
        capture_output=True, text=True, timeout=60, env={"HOME": str(home), "PYTHONPATH": ":".join(
            p for p in sys.path if p)},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(home.rglob("*")) == []
