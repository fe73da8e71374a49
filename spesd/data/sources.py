"""Where documents come from: the shipped corpus, local files, or a dataset by its hub name.

Decides how a source is opened, into which parts it falls, and what is wrong with it, in one
sentence. Never decides which peer reads what (`order` does), and needs no network for a local one.
"""

import gzip
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from spesd.config import DataConfig, SourceConfig
from spesd.data.files import jsonl_values, no_field, ranges, text_documents
from spesd.errors import ConfigError, SpesdError, Unavailable

LONGEST_DOCUMENT = 2**20  # characters; a longer one becomes several documents
HUB_TIMEOUT_S = 10.0
_FEW_SHARDS = 64  # a dataset of fewer shards is split further, by row groups


class Documents:
    """The documents of one source, in `parts` that can be read in any order.

    `skipped` counts documents without text that reading has passed over, once for every reading.
    """

    def __init__(self, source: SourceConfig, path: str) -> None:
        self.source, self.path = source, path
        self.where = f"the data source {source.name!r} ({path or 'builtin'})"
        self.skipped = 0
        self.local_bytes: int | None = None  # size of the local files; None for a hub dataset
        self._dataset: Any = None
        self._ranges: Any = None
        self.parts = 1
        if source.kind != "hub" and source.kind != "builtin":
            files = _files(self, path)
            self.local_bytes = sum(Path(f).stat().st_size for f in files)
        if source.kind in ("text", "jsonl"):
            self._ranges = ranges(files)
            self.parts = len(self._ranges)
        elif source.kind == "parquet":
            self._use(_open_streaming(self, "parquet", data_files=files))
        elif source.kind == "hub":
            self._use(_open_streaming(self, path))

    def _use(self, dataset: Any) -> None:
        field, fields = self.source.field, dataset.column_names
        if fields is not None:
            if field not in fields:
                raise no_field(self.where, field, list(fields))
            dataset = dataset.select_columns([field])
        try:
            if dataset.num_shards < _FEW_SHARDS and hasattr(dataset, "reshard"):
                dataset = dataset.reshard()
        except Exception as error:  # noqa: BLE001 - the readers raise what they like
            raise self._unreadable(error) from None
        self._dataset, self.parts = dataset, max(dataset.num_shards, 1)

    def in_order(self) -> Iterator[str]:
        """Yield every document as it lies, the same on every peer."""
        for part in range(self.parts):
            yield from self.read(part)

    def read(self, part: int) -> Iterator[str]:
        """Yield the documents of one part (0 to `parts` - 1), none longer than LONGEST_DOCUMENT.

        Raises Unavailable or ConfigError, naming the source, for whatever is wrong with it.
        """
        try:
            for text in self._values(part):
                if not isinstance(text, str) or not text.strip():
                    self.skipped += 1
                    continue
                if not text.isascii():  # half a surrogate pair is no text: nothing can encode it
                    text = text.encode("utf-8", "replace").decode("utf-8")
                for at in range(0, len(text), LONGEST_DOCUMENT):
                    yield text[at : at + LONGEST_DOCUMENT]
        except SpesdError:
            raise
        except Exception as error:  # noqa: BLE001 - the readers raise what they like
            raise self._unreadable(error) from None

    def _values(self, part: int) -> Iterator[Any]:
        if self.source.kind == "builtin":
            return iter(_shipped())
        if self.source.kind == "text":
            return text_documents(self._ranges[part])
        if self.source.kind == "jsonl":
            return jsonl_values(self._ranges[part], self.source.field, self.where, self._skip)
        return self._rows(part)

    def _rows(self, part: int) -> Iterator[Any]:
        field = self.source.field
        for row in self._dataset.shard(num_shards=self.parts, index=part):
            if field not in row:
                raise no_field(self.where, field, list(row))
            yield row[field]

    def _skip(self) -> None:
        self.skipped += 1

    def _unreadable(self, error: BaseException) -> Unavailable:
        return Unavailable(f"{self.where} cannot be read: {_first_line(error)}.")


def open_sources(config: DataConfig, paths: Mapping[str, str]) -> list[Documents]:
    """Open every source of a run; `paths` says where this machine has them, by name."""
    unknown = set(paths) - {s.name for s in config.sources}
    if unknown:
        raise ConfigError(
            f"peer.toml gives a path for the data source {sorted(unknown)[0]!r}, which the run "
            f"does not have; it has {', '.join(s.name for s in config.sources)}."
        )
    return [Documents(s, paths.get(s.name, s.path)) for s in config.sources]


def check_sources(config: DataConfig, paths: Mapping[str, str]) -> None:
    """Refuse a run whose sources are missing, unreadable or empty, by one document of each."""
    for documents in open_sources(config, paths):
        if next(documents.in_order(), None) is None:
            raise Unavailable(f"{documents.where} holds no text; give another path.")


def _shipped() -> list[str]:
    raw = (resources.files("spesd.data") / "corpus" / "corpus.jsonl.gz").read_bytes()
    return [json.loads(line)["text"] for line in gzip.decompress(raw).decode().splitlines()]


def matching(path: str) -> list[Path]:
    """Return the file of this name, or else the files that it means as a glob."""
    given = Path(path).expanduser()
    try:
        if given.is_file():
            return [given]
        anchor = Path(given.anchor or ".")
        pattern = str(given.relative_to(given.anchor) if given.anchor else given)
        return [f for f in anchor.glob(pattern) if f.is_file()]
    except (OSError, ValueError) as error:
        raise Unavailable(f"{path!r} cannot be read: {_first_line(error)}.") from None


def _files(documents: Documents, path: str) -> list[str]:
    name = documents.source.name
    try:
        files = matching(path)
        sizes = [f.stat().st_size for f in files]
    except (OSError, Unavailable) as error:
        raise Unavailable(f"{documents.where} cannot be read: {_first_line(error)}.") from None
    if not files:
        raise Unavailable(
            f"the data source {name!r} finds no file at {path!r}; correct the path in run.toml, or "
            f'say where this machine has it: data.{name} = "PATH" in HOME/peer.toml.'
        )
    if not any(sizes):
        raise Unavailable(f"the data source {name!r} is empty: {path}.")
    return sorted(str(f) for f, size in zip(files, sizes, strict=True) if size)


def _open_streaming(documents: Documents, name: str, **given: Any) -> Any:
    import datasets

    datasets.disable_progress_bars()
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    if not given and not Path(name).expanduser().exists() and not datasets.config.HF_HUB_OFFLINE:
        _reach_hub(documents)
    try:
        # streaming leaves nothing but a lock file behind, so its cache may be a passing one
        with tempfile.TemporaryDirectory(prefix="spesd-") as scratch:
            return datasets.load_dataset(
                name, split="train", streaming=True, cache_dir=scratch, **given
            )
    except Exception as error:  # noqa: BLE001 - the library raises what it likes
        raise Unavailable(
            f"{documents.where} cannot be opened: {_first_line(error)}; check its name or path."
        ) from None


def _reach_hub(documents: Documents) -> None:
    """Ask once whether the hub answers: the library itself would retry for half a minute."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - the HTTP library differs between versions
        raise Unavailable(
            f"{documents.where} needs {constants.ENDPOINT}, which does not answer "
            f"({_first_line(error)}); go online or use local files."
        ) from None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:160].rstrip(".") if lines else type(error).__name__
