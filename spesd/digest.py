"""The names of bundles: digests that let every chunk be checked the moment it arrives.

A digest is the hash of the size and of the list of chunk hashes, so the list can be checked against
the name, and each chunk against the list, before all bytes are here. `hashlib` alone.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

CHUNK_BYTES = 256 * 1024
_DOMAIN = b"spesd-bundle-v1"


def chunk_digests(path: Path) -> list[bytes]:
    """Return the SHA-256 of each CHUNK_BYTES of a file, in order."""
    found = []
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            found.append(hashlib.sha256(chunk).digest())
    return found


def digest_of(size: int, chunks: Sequence[bytes]) -> str:
    """Return the name (64 hex digits) of `size` bytes with these chunk digests."""
    whole = hashlib.sha256(_DOMAIN + size.to_bytes(8, "big"))
    for chunk in chunks:
        whole.update(chunk)
    return whole.hexdigest()


def file_digest(path: Path) -> str:
    """Return the name of a file's bytes."""
    return digest_of(path.stat().st_size, chunk_digests(path))


def bytes_digest(raw: bytes) -> str:
    """Return the name of these bytes."""
    chunks = [
        hashlib.sha256(raw[at : at + CHUNK_BYTES]).digest()
        for at in range(0, len(raw), CHUNK_BYTES)
    ]
    return digest_of(len(raw), chunks)


def chunk_count(size: int) -> int:
    """Return how many chunks `size` bytes have."""
    return -(-size // CHUNK_BYTES)
