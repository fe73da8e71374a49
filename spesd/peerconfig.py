"""PeerConfig: what this machine may be used for. Never part of a run, never sent to anybody.

Layers, later ones win: defaults, a profile, HOME/peer.toml, the command line.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import spesd
from spesd.configtree import from_tree, not_negative
from spesd.errors import ConfigError, UsageError

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20,
          "GIB": 2**30, "TIB": 2**40}  # fmt: skip
_RATES = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    """One peer's machine."""

    device: str = "auto"  # auto, cpu, or cuda:N
    own: int = 0  # experts to own; 0: as many as memory holds
    vram: str = ""  # memory to use, such as "8GB"; nothing: measured
    # how experts of others are held; auto: bf16, or int8 where only that makes room
    frozen: Literal["auto", "fp32", "bf16", "int8"] = "auto"
    # what the backward pass computes again instead of keeping; auto: no more than memory asks for
    recompute: Literal["auto", "none", "experts", "layers"] = "auto"
    micro_batch: int = 0  # rows that pass through the model at once; 0: as many as fit
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # of matrix products; auto: bf16 on a GPU
    moments: Literal["fp32", "int8"] = "fp32"  # of AdamW; int8 needs the extra spesd[adam8]
    threads: int = 0  # CPU threads of the trainer; 0: torch's choice
    nice: int = 10  # of the trainer: the volunteer's own work comes first
    listen: tuple[str, ...] = ()  # multiaddrs; nothing: any free port, kept for the next start
    announce: tuple[str, ...] = ()  # multiaddrs at which others reach us, if they differ
    tokenizer: str = ""  # where this machine has the run's tokenizer.json
    data: dict[str, str] = field(default_factory=dict)  # data source -> path on this machine
    faults: dict[str, str] = field(default_factory=dict)  # for tests: kill = "merging@3"

    def __post_init__(self) -> None:
        not_negative("own", self.own)
        not_negative("threads", self.threads)
        not_negative("micro_batch", self.micro_batch)
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"device is {self.device!r}; it is auto, cpu or cuda:N.")
        if not 0 <= self.nice <= 19:
            raise ConfigError(f"nice is {self.nice}; it lies between 0 and 19.")
        if self.vram:
            parse_bytes(self.vram)


def parse_bytes(text: str) -> int:
    """Return the bytes that a size such as "8GB" or "512MiB" means; ConfigError otherwise."""
    match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or (match[2] and match[2].upper() not in _UNITS):
        raise ConfigError(f"{text!r} is not a size; write it like 8GB or 512MiB.")
    if not match[2]:
        raise ConfigError(f"{text!r} has no unit; write it like {match[1]}GB.")
    size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size <= 0:
        raise ConfigError(f"{text!r} is not above 0.")
    return size


def parse_rate(text: str) -> int:
    """Return the bits a second that a rate such as "20Mbit" means; ConfigError otherwise."""
    match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([A-Za-z]*)(?:/s)?\s*", text)
    if match is None or (match[2] and match[2].lower() not in _RATES):
        raise ConfigError(f"{text!r} is not a rate; write it like 20Mbit or 1Gbit.")
    if not match[2]:
        raise ConfigError(f"{text!r} has no unit; write it like {match[1]}Mbit.")
    rate = int(float(match[1]) * _RATES[match[2].lower()])
    if rate <= 0:
        raise ConfigError(f"{text!r} is not above 0.")
    return rate


def profiles() -> dict[str, Path]:
    """Return the classes of machines that there are profiles for, by name."""
    shipped = Path(str(resources.files(spesd))) / "profiles"
    source = Path(spesd.__file__).parent.parent / "peers" / "profiles"
    folder = shipped if shipped.is_dir() else source
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def peer_config(home: Path, profile: str | None, wishes: Mapping[str, Any]) -> PeerConfig:
    """Return this machine's config; every refusal names the file or option that is wrong."""
    layers: dict[str, Any] = {}
    if profile is not None:
        known = profiles()
        if profile not in known:
            raise UsageError(f"there is no profile {profile!r}; there are {', '.join(known)}.")
        layers |= _read(known[profile])
    own = home / "peer.toml"
    if own.exists():
        layers |= _read(own)
    wanted = {k: list(v) if isinstance(v, tuple) else v for k, v in wishes.items()}
    return from_tree(PeerConfig, {**layers, **wanted})


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
        from_tree(PeerConfig, tree)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not a readable TOML file: {error}.") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return tree
