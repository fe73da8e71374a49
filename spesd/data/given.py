"""Text that a user names on the command line, outside the sources of any run.

Decides what kind of file a name means. What a document of such a file is, `files` and `sources`
decide, as for training.
"""

from pathlib import Path

from spesd.config import SourceConfig
from spesd.data.sources import Documents, matching
from spesd.errors import Unavailable

_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}  # others are plain text


def given_documents(path: str, field: str) -> Documents:
    """Open a file, or the files of a glob; `field` has the text of a JSON or parquet row.

    Raises Unavailable or ConfigError, in a sentence, for whatever is wrong with it.
    """
    files = matching(path)
    if not files:
        raise Unavailable(f"there is no file {path!r}; name a file, or files by a quoted glob.")
    kinds = {_KINDS.get(Path(f.name.removesuffix(".gz")).suffix, "text") for f in files}
    if len(kinds) > 1:
        raise Unavailable(f"{path!r} means files of several kinds; name each kind by itself.")
    source = SourceConfig(kind=kinds.pop(), path=path, name=path, field=field)  # type: ignore[arg-type]
    documents = Documents(source, path)
    if next(documents.in_order(), None) is None:
        raise Unavailable(f"{path!r} holds no text; name another file.")
    return documents
