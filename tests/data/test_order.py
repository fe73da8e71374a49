"""A peer's order: complete, its own, bounded in memory, and resumed in another process."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spesd.config import DataConfig, SourceConfig
from spesd.data import files, order
from spesd.data import stream as stream_module
from spesd.data.order import Streamed
from spesd.data.sources import Documents
from spesd.data.stream import TextStream
from spesd.data.tokenizer import ByteTokenizer
from spesd.errors import DamagedState, Unavailable


def jsonl(path: Path, count: int, words: int = 5) -> SourceConfig:
    rows = [json.dumps({"text": f"doc {n} " + "word " * words}) for n in range(count)]
    path.write_text("\n".join(rows) + "\n")
    return SourceConfig(kind="jsonl", path=str(path), name=path.stem)


def streamed(source: SourceConfig, peer: str = "a", block: int = 10) -> Streamed:
    return Streamed(Documents(source, source.path), peer, lambda text: False, block)


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small files be read as large ones are."""
    monkeypatch.setattr(stream_module, "INDEXED_BYTES", 10)
    monkeypatch.setattr(stream_module, "BLOCK", 16)
    monkeypatch.setattr(files, "RANGE_BYTES", 1000)


@pytest.mark.parametrize("width", [10**6, 400])
@pytest.mark.parametrize("farthest", [1, 50, 8192])
def test_each_epoch_has_every_document_once_in_another_order(
    width: int, farthest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "RANGE_BYTES", width)
    monkeypatch.setattr(order, "FARTHEST_BEGIN", farthest)
    reader = streamed(jsonl(tmp_path / "x.jsonl", 130))
    epochs = [[next(reader) for _ in range(130)] for _ in range(3)]
    assert all(len(set(epoch)) == 130 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("width", [10**6, 700])
def test_every_place_can_be_resumed(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "RANGE_BYTES", width)
    source = jsonl(tmp_path / "x.jsonl", 50)
    wanted = streamed(source, block=4)
    expected = [next(wanted) for _ in range(120)]
    reader = streamed(source, block=4)
    for at in range(110):  # through two epochs' ends
        other = streamed(source, block=4)
        other.resume(json.loads(json.dumps(reader.state())))
        assert [next(other) for _ in range(8)] == expected[at : at + 8]
        assert next(reader) == expected[at]


@pytest.mark.parametrize("width", [10**7, 4000])
def test_peers_on_one_large_file_overlap_by_chance_only(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "RANGE_BYTES", width)
    monkeypatch.setattr(order, "FARTHEST_BEGIN", 8000)
    source = jsonl(tmp_path / "x.jsonl", 8000, words=1)
    seen = []
    for peer in "abcdef":
        reader = streamed(source, peer, block=64)
        seen.append({next(reader) for _ in range(200)})
    shared = [len(a & b) for n, a in enumerate(seen) for b in seen[:n]]
    assert sum(shared) / len(shared) < 40  # 200 would be the same documents


def test_a_block_of_long_documents_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "BLOCK_CHARS", 500)
    reader = streamed(jsonl(tmp_path / "x.jsonl", 50, words=40), block=10**6)
    for _ in range(60):
        next(reader)
        assert sum(map(len, reader._block)) < 500 + 250


def test_a_large_source_of_held_out_documents_alone_is_refused(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "x.jsonl", 30)
    with pytest.raises(Unavailable, match="besides the held-out"):
        next(Streamed(Documents(source, source.path), "a", lambda text: True, 10))


CHILD = """
import json, sys
from spesd.config import DataConfig, SourceConfig
from spesd.data import files, stream
from spesd.data.tokenizer import ByteTokenizer
stream.INDEXED_BYTES, stream.BLOCK, files.RANGE_BYTES = 10, 16, 1000
source = SourceConfig(kind="jsonl", path=sys.argv[1], name="x")
reader = stream.TextStream(DataConfig(seq_len=16, batch_size=2, sources=(source,)), ByteTokenizer(),
                           seed=1, peer_id="a")
reader.load_state_dict(json.loads(sys.argv[2]))
print(json.dumps([[b.tolist() for b in reader.next_batch()] for _ in range(20)]))
"""


@pytest.mark.usefixtures("on_disk")
def test_another_process_goes_on_with_the_same_batches(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "x.jsonl", 100)
    data = DataConfig(seq_len=16, batch_size=2, sources=(source,))
    stream = TextStream(data, ByteTokenizer(), seed=1, peer_id="a")
    for _ in range(217):  # into the third epoch
        stream.next_batch()
    place = json.dumps(stream.state_dict())
    done = subprocess.run(
        [sys.executable, "-c", CHILD, source.path, place],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    wanted = [[b.tolist() for b in stream.next_batch()] for _ in range(20)]
    assert json.loads(done.stdout) == wanted


def test_a_place_is_small_whatever_is_half_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"{n}" + "語" * 40_000}) for n in range(6)))
    data = DataConfig(
        seq_len=64, batch_size=1, sources=(SourceConfig(kind="jsonl", path=str(path), name="x"),)
    )
    for large in (False, True):
        if large:
            monkeypatch.setattr(stream_module, "INDEXED_BYTES", 10)
        stream = TextStream(data, ByteTokenizer(), seed=1, peer_id="a")
        for _ in range(2500):  # in the middle of a document and of a piece
            stream.next_batch()
        place = json.dumps(stream.state_dict())
        assert len(place) < 1000
        other = TextStream(data, ByteTokenizer(), seed=1, peer_id="a")
        other.load_state_dict(json.loads(place))
        for _ in range(700):
            assert np.array_equal(stream.next_batch()[1], other.next_batch()[1])


@pytest.mark.usefixtures("on_disk")
@pytest.mark.parametrize(
    "damage",
    [
        {"document": "0" * 16},
        {"left": 10**6},
        {"readers": []},
        {"readers": [{"epoch": 0, "entry": 10**6, "before": 0, "at": 1, "parts": 1}]},
        {"drawn": "x"},
    ],
)
def test_a_refused_place_changes_nothing(damage: dict[str, Any], tmp_path: Path) -> None:
    source = jsonl(tmp_path / "x.jsonl", 100)
    data = DataConfig(seq_len=16, batch_size=2, sources=(source,))
    stream, twin = (TextStream(data, ByteTokenizer(), seed=1, peer_id="a") for _ in range(2))
    for _ in range(9):
        stream.next_batch()
        twin.next_batch()
    with pytest.raises(DamagedState, match="changed"):
        stream.load_state_dict({**stream.state_dict(), **damage})
    for _ in range(30):
        assert np.array_equal(stream.next_batch()[0], twin.next_batch()[0])


@pytest.mark.usefixtures("on_disk")
def test_changed_text_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    data = DataConfig(seq_len=16, batch_size=2, sources=(jsonl(path, 100),))
    stream = TextStream(data, ByteTokenizer(), seed=1, peer_id="a")
    for _ in range(9):
        stream.next_batch()
    path.write_text(path.read_text().replace("word", "book"))
    with pytest.raises(DamagedState):
        TextStream(data, ByteTokenizer(), seed=1, peer_id="a").load_state_dict(stream.state_dict())


def test_sources_are_mixed_by_weight(tmp_path: Path) -> None:
    sources = []
    for name, weight in (("xs", 3.0), ("ys", 1.0)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(json.dumps({"text": f"{name}-{n:02}"}) for n in range(50)))
        sources.append(SourceConfig(kind="jsonl", path=str(path), name=name, weight=weight))
    data = DataConfig(seq_len=60, batch_size=100, sources=tuple(sources))
    flat = TextStream(data, ByteTokenizer(), seed=1, peer_id="a").next_batch()[0].ravel()
    counts = Counter(re.findall("xs|ys", ByteTokenizer().decode(flat.tolist())))
    assert 2.4 < counts["xs"] / counts["ys"] < 3.8
