"""What lies in the DHT: peers' signed records, which runs there are, and the runs' configs.

Decides keys, subkeys and who may write what. hivemind's validators see hashed keys only, so each
record says inside what it is, and until when it holds. Every get and store has a deadline: a node
without our validator would otherwise never answer. Never decides what a record means for a run.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase

from spesd.errors import ProtocolViolation, Unavailable
from spesd.net.codec import (
    MAX_CONFIG_BYTES,
    MAX_KEY_AND_SIGNATURE_BYTES,
    MAX_RECORD_BYTES,
    Record,
    RunRecord,
    open_envelope,
    run_id_of,
)
from spesd.net.p2pd import LOST
from spesd.swarm.records import PeerRecord

SHARDS = 4  # keys over which a run's peer records are spread
DEADLINE_S = 10.0
RUN_LIFE_S = 120.0
CONFIG_LIFE_S = 3600.0
RUNS_KEY = "spesd.runs"
_CONFIG_PREFIX = b"spesd-config:"
_MAX_VALUE_BYTES = MAX_RECORD_BYTES + MAX_KEY_AND_SIGNATURE_BYTES + 16  # and msgpack's frame
_LEEWAY_S = 0.001


def peers_key(run_id: str, shard: int) -> str:
    """The key under which the peers of one shard of a run are found."""
    return f"spesd.peers.{run_id}.{shard}"


def shard_of(peer_id: str) -> int:
    """The shard of a peer: by the hash of its id, so that they fill evenly."""
    return hashlib.sha256(peer_id.encode()).digest()[0] % SHARDS


def config_key(run_id: str) -> str:
    """The key under which a run's config is found."""
    return f"spesd.config.{run_id}"


class SpesdValidator(RecordValidatorBase):
    """Stores and returns nothing but what spesd's peers may say.

    A signed record must lie under its signer's subkey, at the key that it belongs to, and no longer
    than it says itself: else a stranger could store an old one again for longer than the new one
    that took its place. A config must hash to the run id of its key, and lie there without subkey.
    """

    def validate(self, record: DHTRecord) -> bool:
        """Tell whether this record may be stored or returned."""
        try:
            self._check(record)
        except (ProtocolViolation, ValueError, msgpack.UnpackException, TypeError):
            return False
        return True

    def _check(self, record: DHTRecord) -> None:
        if len(record.value) > _MAX_VALUE_BYTES:
            raise ProtocolViolation("a value is too large")
        value = msgpack.unpackb(record.value, raw=False)
        if not isinstance(value, bytes):
            raise ProtocolViolation("a value is not bytes")
        if value.startswith(_CONFIG_PREFIX):
            self._check_config(record, value[len(_CONFIG_PREFIX) :])
            return
        said = open_envelope(value)
        if isinstance(said, PeerRecord):
            self._must_lie_at(record.key, peers_key(said.run_id, shard_of(said.peer_id)))
            owner = said.peer_id
        elif isinstance(said, RunRecord):
            self._must_lie_at(record.key, RUNS_KEY)
            owner = f"{said.run_id}:{said.peer_id}"
        else:
            raise ProtocolViolation("this kind of record does not lie in the DHT")
        if msgpack.unpackb(record.subkey, raw=False) != owner:
            raise ProtocolViolation("a record lies under another's subkey")
        if not record.expiration_time <= said.expires + _LEEWAY_S:
            raise ProtocolViolation("a record lies there for longer than it says")

    def _check_config(self, record: DHTRecord, config: bytes) -> None:
        if len(config) > MAX_CONFIG_BYTES:
            raise ProtocolViolation("a config is too large")
        if record.subkey != DHTProtocol.IS_REGULAR_VALUE:
            raise ProtocolViolation("a config lies under a subkey")
        self._must_lie_at(record.key, config_key(run_id_of(config)))

    @staticmethod
    def _must_lie_at(raw_key: bytes, key: str) -> None:
        if raw_key != DHTID.generate(source=key).to_bytes():
            raise ProtocolViolation("a record lies at another key")

    @property
    def priority(self) -> int:
        """The only validator there is."""
        return 10

    def merge_with(self, other: RecordValidatorBase) -> bool:
        """There is nothing to merge: this validator has no settings."""
        return isinstance(other, SpesdValidator)


class Dht:
    """Signed records, found and published."""

    def __init__(self, node: DHTNode) -> None:
        self._node = node

    async def publish_peer(self, record: PeerRecord, raw: bytes) -> None:
        """Store a peer's own record until it expires; Unavailable if nobody takes it."""
        key = peers_key(record.run_id, shard_of(record.peer_id))
        if not await self._store(key, raw, record.expires, record.peer_id):
            raise Unavailable("the DHT did not take our record: nobody answers, or it has a later")

    async def publish_run(self, record: RunRecord, raw: bytes, config: bytes, now: float) -> None:
        """Say that a run exists, and keep its config findable."""
        subkey = f"{record.run_id}:{record.peer_id}"
        await self._store(RUNS_KEY, raw, record.expires, subkey)
        # refused where another peer's copy of the same bytes lives longer, which is as well
        await self._store(
            config_key(record.run_id), _CONFIG_PREFIX + config, now + CONFIG_LIFE_S, None
        )

    async def find_peers(self, run_id: str, now: float) -> list[PeerRecord]:
        """Return the records of a run's peers that have not expired, by peer id."""
        keys = [peers_key(run_id, shard) for shard in range(SHARDS)]
        found = [r for r in await self._records(keys) if isinstance(r, PeerRecord)]
        newest: dict[str, PeerRecord] = {}
        for record in sorted(found, key=lambda r: (r.peer_id, r.seq)):
            if record.run_id == run_id and record.expires > now:
                newest[record.peer_id] = record
        return [newest[p] for p in sorted(newest)]

    async def find_runs(self, now: float) -> dict[str, str]:
        """Return the names of the runs that somebody vouches for, by run id."""
        found = [r for r in await self._records([RUNS_KEY]) if isinstance(r, RunRecord)]
        valid = sorted((r.run_id, r.peer_id, r.name) for r in found if r.expires > now)
        return {run_id: name for run_id, _, name in valid}

    async def find_config(self, run_id: str) -> bytes | None:
        """Return a run's canonical config, which its id proves."""
        found = await self._get(config_key(run_id))
        value = getattr(found, "value", None)
        if not isinstance(value, bytes) or not value.startswith(_CONFIG_PREFIX):
            return None
        config = value[len(_CONFIG_PREFIX) :]
        return config if run_id_of(config) == run_id else None

    async def _records(self, keys: Sequence[str]) -> list[Record]:
        """Return the records under all subkeys of these keys; Unavailable if no key answers."""
        answers: list[Mapping[str, Any]] = []

        async def ask(key: str) -> None:
            # one request for each: together they could exceed what one message holds
            with contextlib.suppress(Unavailable):
                value = getattr(await self._get(key), "value", None)
                answers.append(value if isinstance(value, Mapping) else {})

        async with asyncio.TaskGroup() as group:
            for key in keys:
                group.create_task(ask(key))
        if not answers:
            raise Unavailable("the DHT did not answer in time")
        records = []
        for answer in answers:
            for entry in answer.values():
                with contextlib.suppress(ProtocolViolation):
                    value = getattr(entry, "value", None)
                    if isinstance(value, bytes):
                        records.append(open_envelope(value))
        return records

    async def _store(self, key: str, value: bytes, expires: float, subkey: str | None) -> bool:
        try:
            async with asyncio.timeout(DEADLINE_S):
                return bool(await self._node.store(key, value, expires, subkey=subkey))
        except LOST:
            raise Unavailable("the DHT did not take a record in time") from None

    async def _get(self, key: str) -> Any:
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await self._node.get(key, latest=True)
        except LOST:
            raise Unavailable("the DHT did not answer in time") from None
