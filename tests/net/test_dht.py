"""What the DHT takes, keeps and gives: only what its owner says, for as long as it says."""

import time

import msgpack
import pytest
from helpers.nodes import RUN, Start, record
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord

from spesd.errors import Unavailable
from spesd.net import storage
from spesd.net.codec import MAX_CONFIG_BYTES, RunRecord, run_id_of, seal
from spesd.net.dht import _CONFIG_PREFIX, RUNS_KEY, SpesdValidator, config_key, peers_key, shard_of
from spesd.net.identity import Identity
from spesd.net.node import Net
from spesd.swarm.records import PeerRecord, PeerState

ME, OTHER = Identity.generate(), Identity.generate()
REGULAR = msgpack.packb(None)
SAID = PeerRecord(
    run_id="r", peer_id=ME.peer_id, seq=1, time=1.0, expires=100.0, state=PeerState.TRAINING,
    round=1,
)  # fmt: skip
KEY = peers_key("r", shard_of(ME.peer_id))


def accepts(key: str, subkey: object, value: bytes, expires: float = 100.0) -> bool:
    return SpesdValidator().validate(
        DHTRecord(
            key=DHTID.generate(source=key).to_bytes(),
            subkey=msgpack.packb(subkey),
            value=msgpack.packb(value),
            expiration_time=expires,
        )
    )


def test_a_record_lies_at_its_key_under_its_signer_and_no_longer_than_it_says() -> None:
    raw = seal(SAID, ME)
    assert accepts(KEY, ME.peer_id, raw)
    assert accepts(KEY, ME.peer_id, raw, expires=50.0)
    assert not accepts(KEY, ME.peer_id, raw, expires=101.0)
    assert not accepts(KEY, ME.peer_id, raw, expires=float("nan"))
    assert not accepts(KEY, OTHER.peer_id, raw)
    assert not accepts(KEY, None, raw)
    assert not accepts(peers_key("r", (shard_of(ME.peer_id) + 1) % 4), ME.peer_id, raw)
    assert not accepts(peers_key("s", shard_of(ME.peer_id)), ME.peer_id, raw)
    assert not accepts(KEY, OTHER.peer_id, seal(SAID, OTHER))
    assert not accepts(KEY, ME.peer_id, raw[:-1] + bytes([raw[-1] ^ 1]))
    assert not accepts(KEY, ME.peer_id, raw + b"\0" * 300_000)
    assert not accepts(KEY, ME.peer_id, b"junk")
    assert not SpesdValidator().validate(
        DHTRecord(key=b"k", subkey=b"", value=b"\xc1", expiration_time=1)
    )


def test_a_run_record_lies_under_its_run_and_its_peer() -> None:
    said = RunRecord(run_id="0" * 32, peer_id=ME.peer_id, name="n", expires=100.0)
    raw = seal(said, ME)
    assert accepts(RUNS_KEY, f"{said.run_id}:{ME.peer_id}", raw)
    assert not accepts(RUNS_KEY, f"{'1' * 32}:{ME.peer_id}", raw)
    assert not accepts(RUNS_KEY, f"{said.run_id}:{ME.peer_id}", raw, expires=200.0)
    assert not accepts(KEY, ME.peer_id, raw)


def test_a_config_proves_itself_and_has_no_subkey() -> None:
    config = RUN.canonical()
    value = _CONFIG_PREFIX + config
    assert accepts(config_key(RUN.run_id), None, value)
    assert not accepts(config_key("f" * 32), None, value)
    assert not accepts(config_key(RUN.run_id), None, value + b" ")
    # a dictionary would hide the plain value from readers
    assert not accepts(config_key(RUN.run_id), "x", value)
    large = b"x" * (MAX_CONFIG_BYTES + 1)
    assert not accepts(config_key(run_id_of(large)), None, _CONFIG_PREFIX + large)


async def put(net: Net, key: str, subkey: object, value: bytes, expires: float) -> bool:
    return bool(await net._node.store(key, value, expires, subkey=subkey))


async def test_peers_and_runs_are_found_and_only_their_owners_may_write(start: Start) -> None:
    a, _ = await start("a")
    b, _ = await start("b", a)
    observer, _ = await start("o", a, identity_path=None, observer=True)
    mine = record(b)
    await b.publish_peer(mine)
    await b.publish_run(RUN)
    assert await observer.find_peers(RUN.run_id) == [mine]
    assert await observer.find_runs() == {RUN.run_id: "net-test"}
    assert await observer.find_config(RUN.run_id) == RUN.canonical()
    assert (observer.addr_kind, b.addr_kind) == ("relayed", "loopback")
    key, later = peers_key(RUN.run_id, shard_of(b.peer_id)), mine.expires + 9
    assert not await put(a, key, b.peer_id, a.sign(record(a, expires=later)), later)
    assert not await put(a, key, b.peer_id, b"\0" * 300_000, later)
    newer = record(b, seq=2, round=2, expires=mine.expires + 5)
    await b.publish_peer(newer)
    assert await observer.find_peers(RUN.run_id) == [newer]
    # an old word of b, stored again by somebody to outlive the new one
    assert not await put(a, key, b.peer_id, b.sign(mine), later)
    config = _CONFIG_PREFIX + RUN.canonical()
    assert not await put(a, config_key(RUN.run_id), "x", config, time.time() + 4000)
    assert await observer.find_peers(RUN.run_id) == [newer]
    assert await observer.find_config(RUN.run_id) == RUN.canonical()


async def test_a_goodbye_replaces_what_was_said_even_after_the_clock_went_back(
    start: Start,
) -> None:
    a, _ = await start("a")
    b, _ = await start("b", a)
    await b.publish_peer(record(b))
    await b.publish_peer(record(b, seq=2, state=PeerState.OFFLINE, expires=b.now() + 20))
    (found,) = await a.find_peers(RUN.run_id)
    assert found.state is PeerState.OFFLINE


async def test_what_has_expired_is_neither_taken_nor_found(start: Start) -> None:
    a, _ = await start("a")
    b, _ = await start("b", a)
    with pytest.raises(Unavailable, match="did not take"):
        await b.publish_peer(record(b, expires=b.now() - 1))
    c, _ = await start("c", a)
    await c.publish_peer(record(c))
    assert len(await a.find_peers(RUN.run_id)) == 1
    assert await a._dht.find_peers(RUN.run_id, a.now() + 61) == []


def key(name: str) -> DHTID:
    return DHTID.generate(source=name)


def test_storage_refuses_what_would_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "MAX_KEY_BYTES", 100)
    monkeypatch.setattr(storage, "MAX_KEYS", 3)
    kept, now = storage.BoundedStorage(), time.time()
    assert kept.store(key("a"), b"x" * 60, now + 9, subkey="1")
    assert not kept.store(key("a"), b"x" * 60, now + 9, subkey="2")
    assert kept.store(key("a"), b"y" * 90, now + 10, subkey="1")  # in place of what was there
    assert not kept.store(key("b"), b"x" * 101, now + 9)
    assert not kept.store(key("b"), b"x", now + storage.MAX_LIFE_S + 9)
    assert kept.store(key("b"), b"x", now + 9)
    assert not kept.store(key("b"), b"z", now + 8)
    assert kept.store(key("c"), b"x", now + 9)
    assert not kept.store(key("d"), b"x", now + 9)
    assert kept.store(key("b"), b"y", now + 10)


def test_an_older_record_does_not_shorten_the_life_of_the_newer() -> None:
    kept, now = storage.BoundedStorage(), time.time()
    assert kept.store(key("a"), b"new", now + 60, subkey="1")
    assert not kept.store(key("a"), b"old", now + 1, subkey="1")
    entries = kept.get(key("a")).value
    assert entries.key_to_heap["1"].expiration_time == now + 60


def test_records_of_a_run_are_spread_over_all_shards() -> None:
    shards = [shard_of(Identity.generate().peer_id) for _ in range(12)]
    assert set(shards) <= {0, 1, 2, 3}
    assert len(set(shards)) > 1
