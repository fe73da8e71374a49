"""Peer configs: which layer wins, and refusals that name the file and the key."""

import re
from pathlib import Path
from typing import Any

import pytest

from spesd.configtree import from_tree
from spesd.errors import ConfigError, UsageError
from spesd.peerconfig import PeerConfig, parse_bytes, peer_config, profiles


def test_layers_of_a_peers_config(tmp_path: Path) -> None:
    (tmp_path / "peer.toml").write_text('vram = "6GB"\n[data]\nbooks = "/data/*.txt"\n')
    config = peer_config(tmp_path, "12gb", {"own": 3, "listen": ("/ip4/0.0.0.0/tcp/1",)})
    assert (config.device, config.vram, config.own) == ("cuda:0", "6GB", 3)
    assert config.data == {"books": "/data/*.txt"}
    assert config.listen == ("/ip4/0.0.0.0/tcp/1",)
    assert peer_config(tmp_path / "none", None, {}) == PeerConfig()
    (tmp_path / "peer.toml").write_text("vrma = 1")
    with pytest.raises(ConfigError, match=r"peer.toml: unknown key 'vrma'"):
        peer_config(tmp_path, None, {})
    with pytest.raises(UsageError, match="cpu"):
        peer_config(tmp_path, "toaster", {})


@pytest.mark.parametrize("text", ["8", "-1GB", "0GB", "8 potatoes", "GB", ""])
def test_sizes_without_sense_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GB", 8 * 10**9), ("1.5 GiB", 3 * 2**29), ("512mib", 2**29), (" 2TB ", 2 * 10**12)],
)
def test_sizes_are_understood(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_there_is_a_profile_for_each_class_of_machine() -> None:
    assert set(profiles()) == {"cpu", "8gb", "12gb", "16gb", "24gb", "48gb"}


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"own": -1}, "own is -1"),
        ({"own": "2"}, "own is '2'; it must be a whole number"),
        ({"threads": -1}, "threads is -1"),
        ({"nice": 20}, "nice is 20"),
        ({"vram": "8"}, "has no unit"),
        ({"frozen": "int4"}, "frozen is 'int4'"),
        ({"listen": "/ip4/0.0.0.0/tcp/1"}, "listen must be a list"),
        ({"data": {"books": 3}}, "data.books"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_a_machine_cannot_do_is_refused_by_its_key(tree: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        from_tree(PeerConfig, tree)


@pytest.mark.parametrize("raw", [b"own = ", b"\xff\xfe"])
def test_a_damaged_peer_toml_is_refused_by_its_path(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "peer.toml").write_bytes(raw)
    with pytest.raises(ConfigError, match=r"peer\.toml is not a readable TOML file"):
        peer_config(tmp_path, None, {})
