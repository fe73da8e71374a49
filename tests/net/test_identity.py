"""The key file: private, persistent, and clear when damaged."""

import stat
from pathlib import Path

import pytest

from spesd.errors import ProtocolViolation, Unavailable
from spesd.net.identity import Identity, peer_id_of, verify


def test_an_identity_persists_with_mode_0600(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    first = Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    assert Identity.load_or_create(path).peer_id == first.peer_id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert first.peer_id == peer_id_of(first.public_key)


def test_a_damaged_key_is_one_sentence_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    Identity.load_or_create(path)
    damaged = path.read_bytes()[:-9]
    path.write_bytes(damaged)
    with pytest.raises(Unavailable, match="damaged"):
        Identity.load_or_create(path)
    assert path.read_bytes() == damaged
    with pytest.raises(Unavailable, match="cannot write"):
        Identity.load_or_create(tmp_path / "none" / "identity.key")


def test_a_signature_is_checked() -> None:
    me, other = Identity.generate(), Identity.generate()
    verify(me.public_key, b"m", me.sign(b"m"))
    for key, message in ((other.public_key, b"m"), (me.public_key, b"n"), (b"junk", b"m")):
        with pytest.raises(ProtocolViolation):
            verify(key, message, me.sign(b"m"))
