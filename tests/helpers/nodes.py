"""Nodes for tests: real ones, with a daemon's side that has nothing behind it."""

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from spesd.config import RunConfig
from spesd.digest import file_digest
from spesd.net.node import Net
from spesd.swarm.records import Offer, PartOffer, PeerRecord, PeerState

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
RUN = RunConfig(name="net-test")


class FakeDaemon:
    """The daemon's side of a node, with nothing behind it."""

    def __init__(self) -> None:
        self.config: bytes | None = RUN.canonical()
        self.records: list[bytes] = []
        self.held: dict[int, list[bytes]] = {}
        self.received: list[object] = []
        self.manifest: bytes | str = "no state yet"
        self.bundles: dict[str, Path] = {}

    def run_config(self) -> bytes | None:
        return self.config

    def known_records(self) -> Sequence[bytes]:
        return self.records

    def on_envelope(self, record: object, raw: bytes, sender: str) -> None:
        self.received.append(record)

    def offers(self, round_number: int) -> Sequence[bytes]:
        return self.held.get(round_number, [])

    async def state(self) -> bytes | str:
        return self.manifest

    def bundle_path(self, digest: str) -> Path | None:
        return self.bundles.get(digest)


Node = tuple[Net, FakeDaemon]
Start = Callable[..., Awaitable[Node]]


def record(net: Net, **values: Any) -> PeerRecord:
    now = net.now()
    base = PeerRecord(
        run_id=RUN.run_id, peer_id=net.peer_id, seq=1, time=now, expires=now + 60,
        state=PeerState.TRAINING, round=1, addresses=net.addresses,
    )  # fmt: skip
    return replace(base, **values)


def offer(net: Net, **values: Any) -> Offer:
    part = PartOffer(part="shared", term=0, tokens=1, digest="ab" * 32, size=3)
    base = Offer(
        run_id=RUN.run_id, peer_id=net.peer_id, round=4, tokens=1, global_tokens=0, loss=None,
        parts=(part,),
    )  # fmt: skip
    return replace(base, **values)


def bundle(folder: Path, size: int, name: str = "bundle") -> tuple[Path, str]:
    path = folder / name
    path.write_bytes(os.urandom(size))
    return path, file_digest(path)


def answer_instead(net: Net, name: str, reply: Callable[[], bytes]) -> None:
    """Make a node answer a call with other bytes than spesd would."""

    async def handler(data: bytes, sender: object) -> bytes:
        return reply()

    net._p2pd.p2p._client.control.unary_handlers[f"PeerServicer.{name}"] = handler


def stream_instead(net: Net, protocol: str, handler: Any) -> None:
    """Make a node serve streams otherwise than spesd would."""
    net._p2pd.p2p._client.control.handlers[protocol] = handler
