"""Where documents come from: the shipped corpus, local files, or a dataset by its hub name.

Decides how a source is read and what is wrong with it, in one sentence. Never decides which peer
reads what (`stream` does).
"""

import gzip
import json
import logging
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from spesd.config import DataConfig, SourceConfig
from spesd.errors import ConfigError, Unavailable

LONGEST_DOCUMENT = 2**20  # characters; what is longer is cut
_BUILDERS = {"text": "text", "jsonl": "json", "parquet": "parquet"}


class Documents:
    """The documents of one source, in one order, with an exact place to resume from."""

    def __init__(self, source: SourceConfig, path: str) -> None:
        self.source, self.path = source, path
        self._builtin: list[str] | None = None
        self._dataset: Any = None
        if source.kind == "builtin":
            self._builtin = _shipped()
        else:
            self._dataset = _open(source, path)

    @property
    def local_bytes(self) -> int | None:
        """The size of the local files; None for a hub dataset."""
        if self._builtin is not None:
            return sum(len(t) for t in self._builtin)
        if self.source.kind == "hub":
            return None
        return sum(Path(f).stat().st_size for f in _files(self.source, self.path))

    def in_order(self) -> Iterator[str]:
        """Yield every document as it lies, the same on every peer."""
        if self._builtin is not None:
            yield from self._builtin
            return
        yield from self._texts(self._dataset)

    def shuffled_shards(self, seed: int) -> "ShardOrder":
        """Return the documents with their files in another order (a streaming source only)."""
        return ShardOrder(self, self._dataset.shuffle(seed=seed, buffer_size=1))

    def _texts(self, dataset: Any) -> Iterator[str]:
        name = self.source.name
        try:
            for row in dataset:
                if self.source.field not in row:
                    raise ConfigError(
                        f"the data source {name!r} has no field {self.source.field!r}; its fields "
                        f"are {', '.join(sorted(row))}: set data.sources.field."
                    )
                text = row[self.source.field]
                if isinstance(text, str) and text.strip():
                    yield text[:LONGEST_DOCUMENT]
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - the readers raise what they like
            raise Unavailable(
                f"the data source {name!r} ({self.path}) cannot be read: {_first_line(error)}."
            ) from None


class ShardOrder:
    """A streaming source in one epoch's order."""

    def __init__(self, documents: Documents, dataset: Any) -> None:
        self._documents, self._dataset = documents, dataset

    def texts(self) -> Iterator[str]:
        """Yield the documents from where the state is."""
        return self._documents._texts(self._dataset)

    def state(self) -> dict[str, Any]:
        """Return the place of the next document."""
        return dict(self._dataset.state_dict())

    def resume(self, state: dict[str, Any]) -> None:
        """Go to a place that `state` returned."""
        self._dataset.load_state_dict(state)


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
    """Refuse a run whose sources are missing, unreadable or empty."""
    for documents in open_sources(config, paths):
        if next(documents.in_order(), None) is None:
            raise Unavailable(
                f"the data source {documents.source.name!r} ({documents.path or 'builtin'}) holds "
                "no text; give another path."
            )


def _shipped() -> list[str]:
    raw = (resources.files("spesd.data") / "corpus" / "corpus.jsonl.gz").read_bytes()
    return [json.loads(line)["text"] for line in gzip.decompress(raw).decode().splitlines()]


def _files(source: SourceConfig, path: str) -> list[str]:
    given = Path(path).expanduser()
    anchor = Path(given.anchor or ".")
    pattern = str(given.relative_to(given.anchor) if given.anchor else given)
    files = sorted(str(f) for f in anchor.glob(pattern) if f.is_file())
    if not files:
        raise Unavailable(
            f"the data source {source.name!r} finds no file at {path!r}; correct the path in "
            f'run.toml, or say where this machine has it: data.{source.name} = "PATH" in '
            "HOME/peer.toml."
        )
    if not any(Path(f).stat().st_size for f in files):
        raise Unavailable(f"the data source {source.name!r} is empty: {path}.")
    return files


def _open(source: SourceConfig, path: str) -> Any:
    import datasets

    datasets.disable_progress_bars()
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    extra: dict[str, Any] = {"sample_by": "document"} if source.kind == "text" else {}
    try:
        if source.kind == "hub":
            return datasets.load_dataset(path, split="train", streaming=True)
        return datasets.load_dataset(
            _BUILDERS[source.kind],
            data_files=_files(source, path),
            split="train",
            streaming=True,
            **extra,
        )
    except (ConfigError, Unavailable):
        raise
    except Exception as error:  # noqa: BLE001 - the library raises what it likes
        raise Unavailable(
            f"the data source {source.name!r} ({path}) cannot be opened: {_first_line(error)}."
        ) from None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:160].rstrip(".") if lines else type(error).__name__
