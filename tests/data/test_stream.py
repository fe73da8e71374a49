"""A peer's stream: packed, its own, mixed, never the held-out set, and resumed exactly."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spesd.config import DataConfig, SourceConfig
from spesd.configtree import from_tree
from spesd.data import stream as stream_module
from spesd.data.sources import check_sources
from spesd.data.stream import TextStream
from spesd.data.tokenizer import ByteTokenizer
from spesd.errors import ConfigError, DamagedState, SpesdError, Unavailable

DOCUMENTS = [f"document {n}: " + chr(97 + n % 26) * (20 + 7 * n % 90) for n in range(60)]


def config(*sources: dict[str, Any], **values: Any) -> DataConfig:
    listed = {"sources": list(sources)} if sources else {}
    return from_tree(
        DataConfig, {"seq_len": 16, "batch_size": 2, "held_out": 0.1, **listed, **values}
    )


def open_stream(data: DataConfig, peer: str = "a", **values: Any) -> TextStream:
    return TextStream(data, ByteTokenizer(), **{"seed": 1, "peer_id": peer, **values})


def write(folder: Path, kind: str) -> dict[str, Any]:
    """Write DOCUMENTS as files of a kind; return the source."""
    path = str(folder / f"*.{kind}")
    for shard in range(3):
        texts = DOCUMENTS[shard::3]
        if kind == "jsonl":
            lines = [json.dumps({"text": t, "n": 1}) for t in texts]
            (folder / f"{shard}.jsonl").write_text("\n".join(lines) + "\n")
        elif kind == "parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.table({"text": texts}), folder / f"{shard}.parquet")
        else:
            for number, text in enumerate(texts):
                (folder / f"{shard}-{number}.text").write_text(text)
    return {"kind": kind, "path": path, "name": kind}


def documents_in(stream: TextStream, batches: int) -> list[str]:
    flat: list[int] = []
    for _ in range(batches):
        flat += stream.next_batch()[0].ravel().tolist()
    text = ByteTokenizer().decode([10 if i == 256 else i for i in flat])
    return text.split("\n")


def test_batches_are_packed_and_targets_are_the_next_tokens() -> None:
    stream = open_stream(config())
    before = None
    for _ in range(5):
        inputs, targets = stream.next_batch()
        assert inputs.shape == targets.shape == (2, 16) and inputs.dtype == np.int64
        assert inputs.ravel()[1:].tolist() == targets.ravel()[:-1].tolist()
        if before is not None:
            assert inputs[0, 0] == before  # nothing lies between two batches
        before = targets[-1, -1]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "text"])
@pytest.mark.parametrize("large", [False, True])
def test_every_document_once_an_epoch_and_the_held_out_never(
    kind: str, large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(stream_module, "INDEXED_BYTES", 10)
        monkeypatch.setattr(stream_module, "BLOCK", 7)
    data = config(write(tmp_path, kind))
    stream = open_stream(data)
    held = {d for d in DOCUMENTS if stream._held.is_held_out(d)}
    assert 0 < len(held) < 20
    size = sum(len(d) + 1 for d in DOCUMENTS if d not in held)
    seen = documents_in(stream, -(-size // 32) + 2)[: len(DOCUMENTS) - len(held)]
    assert sorted(seen) == sorted(d for d in DOCUMENTS if d not in held)
    other = documents_in(open_stream(data, "b"), 30)
    assert other[:5] != seen[:5]
    again = documents_in(open_stream(data), 30)
    assert again[:5] == seen[:5]


@pytest.mark.parametrize("kind", ["builtin", "jsonl", "parquet", "text"])
@pytest.mark.parametrize("large", [False, True])
def test_resume_is_exact_across_epochs(
    kind: str, large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "PIECE", 11)
    if large and kind != "builtin":
        monkeypatch.setattr(stream_module, "INDEXED_BYTES", 10)
        monkeypatch.setattr(stream_module, "BLOCK", 7)
    sources = [] if kind == "builtin" else [write(tmp_path, kind), {"name": "other"}]
    data = config(*sources)
    straight = open_stream(data)
    for stop in (0, 1, 7, 150, 170):
        stream = open_stream(data)
        for _ in range(stop):
            stream.next_batch()
        place = json.loads(json.dumps(stream.state_dict()))
        assert len(json.dumps(place)) < 100_000
        resumed = open_stream(data)
        resumed.load_state_dict(place)
        for _ in range(12):
            for one, two in zip(stream.next_batch(), resumed.next_batch(), strict=True):
                assert np.array_equal(one, two)
    assert straight.next_batch()[0].shape == (2, 16)


def test_the_held_out_set_is_everybodys(tmp_path: Path) -> None:
    data = config(write(tmp_path, "jsonl"))
    one, two = (
        open_stream(data, "a").held_out_batches(3),
        open_stream(data, "b").held_out_batches(3),
    )
    assert len(one) == 3
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(one, two, strict=True))
    few = open_stream(config(write(tmp_path, "jsonl"), held_out=1e-9))
    assert len(few.held_out_batches(3)) >= 1  # one document is held out whatever the share


def test_a_place_in_other_data_is_refused(tmp_path: Path) -> None:
    place = open_stream(config()).state_dict()
    with pytest.raises(DamagedState):
        open_stream(config(write(tmp_path, "jsonl"))).load_state_dict(place)


def test_a_peer_may_have_a_source_elsewhere(tmp_path: Path) -> None:
    source = {**write(tmp_path, "jsonl"), "path": "/nowhere/*.jsonl"}
    data = config(source)
    check_sources(data, {"jsonl": str(tmp_path / "*.jsonl")})
    with pytest.raises(ConfigError, match="books"):
        check_sources(data, {"books": "x"})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "finds no file"),
        ("", "is empty"),
        ('{"body": "x"}\n', "no field 'text'"),
        ('{"text": "x"}\n{"text": tru', "cannot be"),
        ('{"text": "  "}\n', "no text"),
    ],
)
def test_wrong_sources_are_sentences(text: str | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SpesdError, match=says):
        data = config({"kind": "jsonl", "path": str(path), "name": "x"})
        check_sources(data, {})
        open_stream(data)


def test_a_hub_name_without_a_network_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    source = SourceConfig(kind="hub", path="nobody/nothing", name="web")
    with pytest.raises(Unavailable, match="web"):
        check_sources(DataConfig(sources=(source,)), {})
