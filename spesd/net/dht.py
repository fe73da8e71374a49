"""What lies in the DHT: peers' signed records, which runs there are, and the runs' configs.

Decides keys, subkeys and who may write what. hivemind's validators see hashed keys only, so each
record says inside what it is. Every get and store has a deadline: a node without our validator
would otherwise never answer.
"""

import asyncio
import hashlib
from collections.abc import Mapping
from typing import Any

import msgpack
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase

from spesd.errors import ProtocolViolation, Unavailable
from spesd.net.codec import MAX_CONFIG_BYTES, MAX_RECORD_BYTES, RunRecord, open_envelope
from spesd.swarm.records import PeerRecord

SHARDS = 4  # keys over which a run's peer records are spread
DEADLINE_S = 10.0
RUN_LIFE_S = 120.0
CONFIG_LIFE_S = 3600.0
_CONFIG_PREFIX = b"spesd-config:"


def peers_key(run_id: str, shard: int) -> str:
    """The key under which the peers of one shard of a run are found."""
    return f"spesd.peers.{run_id}.{shard}"


def shard_of(peer_id: str) -> int:
    """The shard of a peer: by the hash of its id, so that they fill evenly."""
    return hashlib.sha256(peer_id.encode()).digest()[0] % SHARDS


def config_key(run_id: str) -> str:
    """The key under which a run's config is found."""
    return f"spesd.config.{run_id}"


RUNS_KEY = "spesd.runs"


class SpesdValidator(RecordValidatorBase):
    """Stores and returns nothing but what spesd's peers may say.

    A signed record must lie under its signer's subkey, at the key that it belongs to; a config must
    hash to the run id of its key.
    """

    def validate(self, record: DHTRecord) -> bool:
        """Tell whether this record may be stored or returned."""
        try:
            self._check(record)
        except (ProtocolViolation, ValueError, msgpack.UnpackException, TypeError):
            return False
        return True

    def _check(self, record: DHTRecord) -> None:
        if len(record.value) > max(MAX_RECORD_BYTES, MAX_CONFIG_BYTES) + 4096:
            raise ProtocolViolation("a value is too large")
        value = msgpack.unpackb(record.value, raw=False)
        if not isinstance(value, bytes):
            raise ProtocolViolation("a value is not bytes")
        if value.startswith(_CONFIG_PREFIX):
            run_id = hashlib.sha256(value[len(_CONFIG_PREFIX) :]).hexdigest()[:32]
            self._must_lie_at(record.key, config_key(run_id))
            return
        said = open_envelope(value)
        subkey = msgpack.unpackb(record.subkey, raw=False)
        if isinstance(said, PeerRecord):
            self._must_lie_at(record.key, peers_key(said.run_id, shard_of(said.peer_id)))
            owner = said.peer_id
        elif isinstance(said, RunRecord):
            self._must_lie_at(record.key, RUNS_KEY)
            owner = f"{said.run_id}:{said.peer_id}"
        else:
            raise ProtocolViolation("this kind of record does not lie in the DHT")
        if subkey != owner:
            raise ProtocolViolation("a record lies under another's subkey")

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
        """Store a peer's own record until it expires."""
        key = peers_key(record.run_id, shard_of(record.peer_id))
        await self._store(key, raw, record.expires, record.peer_id)

    async def publish_run(self, record: RunRecord, raw: bytes, config: bytes, now: float) -> None:
        """Say that a run exists, and keep its config findable."""
        subkey = f"{record.run_id}:{record.peer_id}"
        await self._store(RUNS_KEY, raw, now + RUN_LIFE_S, subkey)
        await self._store(
            config_key(record.run_id), _CONFIG_PREFIX + config, now + CONFIG_LIFE_S, None
        )

    async def find_peers(self, run_id: str) -> list[PeerRecord]:
        """Return the records of a run's peers that have not expired."""
        found: dict[str, PeerRecord] = {}
        for shard in range(SHARDS):
            for value in (await self._get_all(peers_key(run_id, shard))).values():
                record = self._open(value)
                if isinstance(record, PeerRecord) and record.run_id == run_id:
                    found[record.peer_id] = record
        return [found[p] for p in sorted(found)]

    async def find_runs(self) -> dict[str, str]:
        """Return the names of the runs that somebody vouches for, by run id."""
        records = [self._open(v) for v in (await self._get_all(RUNS_KEY)).values()]
        runs = [r for r in records if isinstance(r, RunRecord)]
        return {r.run_id: r.name for r in sorted(runs, key=lambda r: (r.run_id, r.peer_id))}

    async def find_config(self, run_id: str) -> bytes | None:
        """Return a run's canonical config, which its id proves."""
        found = await self._get(config_key(run_id))
        value = getattr(found, "value", None)
        if not isinstance(value, bytes) or not value.startswith(_CONFIG_PREFIX):
            return None
        config = value[len(_CONFIG_PREFIX) :]
        return config if hashlib.sha256(config).hexdigest()[:32] == run_id else None

    @staticmethod
    def _open(value: Any) -> object:
        try:
            return open_envelope(value) if isinstance(value, bytes) else None
        except ProtocolViolation:
            return None

    async def _store(self, key: str, value: bytes, expires: float, subkey: str | None) -> None:
        try:
            await asyncio.wait_for(self._node.store(key, value, expires, subkey=subkey), DEADLINE_S)
        except TimeoutError:
            raise Unavailable("the DHT did not take a record in time") from None

    async def _get(self, key: str) -> Any:
        try:
            return await asyncio.wait_for(self._node.get(key, latest=True), DEADLINE_S)
        except TimeoutError:
            raise Unavailable("the DHT did not answer in time") from None

    async def _get_all(self, key: str) -> Mapping[str, Any]:
        found = await self._get(key)
        entries = getattr(found, "value", None)
        if not isinstance(entries, Mapping):
            return {}
        return {str(k): getattr(v, "value", None) for k, v in entries.items()}
