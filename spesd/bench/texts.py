"""The two texts of the learning benchmark, cut into as many domains as there are peers.

Decides what a domain is: works of one kind in the shipped corpus, modules of one library in the
Python sources. Every domain becomes a JSON-lines file and a data source of its own, so that a peer
can be given one and all can be evaluated on every one.
"""

import gzip
import json
import sysconfig
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import torch

from spesd.config import SourceConfig
from spesd.errors import Unavailable

TEXTS = ("shipped", "sources")
_DOMAIN_BYTES = 6_000_000  # of the larger text
_LONGEST = 8_000  # characters of a document

# the shipped works by kind; four peers get two neighbours each
_KINDS = (
    ("henry", "richard", "john"),
    ("antony", "coriolanus", "julius", "timon", "troilus", "titus"),
    ("hamlet", "lear", "macbeth"),
    ("othello", "romeo", "cymbeline", "pericles"),
    ("alls_well", "measure", "merchant", "winters"),
    ("as_you", "comedy", "loves_labours", "merry", "tempest"),
    ("midsummer", "much_ado", "taming", "twelfth", "two_gentlemen"),
    ("lovers_complaint", "passionate", "phoenix", "lucrece", "sonnets", "venus"),
)


def write_domains(text: str, count: int, folder: Path) -> tuple[SourceConfig, ...]:
    """Write `count` domains of a text into `folder`; return a source for each.

    "shipped" has 5 MB of English plays and poems, "sources" up to 24 MB of the Python code that is
    installed with this interpreter and torch, so nothing is downloaded. Raises Unavailable where
    there is too little.
    """
    domains = _shipped(count) if text == "shipped" else _sources(count)
    made = []
    for number, documents in enumerate(domains):
        if not documents:
            raise Unavailable(f"the text {text!r} has nothing for domain {number} here.")
        path = folder / f"{text}-{count}-{number}.jsonl"
        path.write_text("".join(json.dumps({"text": t}) + "\n" for t in documents))
        made.append(SourceConfig(kind="jsonl", path=str(path), name=f"domain-{number}"))
    return tuple(made)


def _shipped(count: int) -> list[list[str]]:
    raw = (resources.files("spesd.data") / "corpus" / "corpus.jsonl.gz").read_bytes()
    domains: list[list[str]] = [[] for _ in range(count)]
    for line in gzip.decompress(raw).decode().splitlines():
        row = json.loads(line)
        kind = next(
            (i for i, words in enumerate(_KINDS) if any(w in row["work"] for w in words)), 0
        )
        domains[kind * count // len(_KINDS)].append(row["text"])
    return domains


def _sources(count: int) -> list[list[str]]:
    library, framework = Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parent
    patterns = (
        (library, "*.py"), (library, "test/*.py"), (framework, "_inductor/**/*.py"),
        (framework, "distributed/**/*.py"), (library, "[a-k]*/*.py"), (library, "[l-r]*/*.py"),
        (framework, "testing/**/*.py"), (framework, "*.py"),
    )  # fmt: skip
    return [list(_documents(sorted(root.glob(p)))) for root, p in patterns[:count]]


def _documents(files: list[Path]) -> Iterator[str]:
    left = _DOMAIN_BYTES
    for path in files:
        text = path.read_text(errors="replace")[:left]
        left -= len(text)
        yield from (text[at : at + _LONGEST] for at in range(0, len(text), _LONGEST))
