"""One node of the network: p2pd, the DHT and our RPCs behind one object.

Everything awaited here has a deadline, and everything that fails raises Unavailable (the world) or
ProtocolViolation (another peer's fault). Never decides anything about a run.
"""

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.utils.multiaddr import Multiaddr

import spesd.net.quiet  # noqa: F401 - before hivemind
from spesd.config import RunConfig
from spesd.errors import ProtocolViolation, Unavailable, UsageError
from spesd.net.addresses import (
    best_first,
    check_port,
    checked,
    kind_of,
    port_of,
    start_failure,
    without_ip6,
)
from spesd.net.codec import MAX_ENVELOPES, Record, RunRecord, open_envelope, seal
from spesd.net.dht import Dht, SpesdValidator
from spesd.net.fetch import Download
from spesd.net.identity import Identity
from spesd.net.pb.spesd.v1 import exchange_pb2 as pb
from spesd.net.servicer import PeerServicer, Service
from spesd.swarm.records import Offer, PeerRecord, StateManifest

ANYWHERE = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")
CALL_S = 6.0
DIAL_S = 8.0
DIAL_ROUNDS = 2  # a bootstrap peer that is just starting gets a second chance
STOP_S = 5.0
CLOCK_SAMPLES = 32
_LOST = (
    P2PDaemonError,
    P2PHandlerError,
    OSError,
    TimeoutError,
    EOFError,
    asyncio.IncompleteReadError,
)


@dataclass(frozen=True, kw_only=True)
class NetConfig:
    """How to be on the network. Without an identity file the node is anonymous."""

    identity_path: Path | None
    listen: tuple[str, ...] = ANYWHERE
    announce: tuple[str, ...] = ()
    bootstrap: tuple[str, ...] = ()
    observer: bool = False  # listens nowhere and stores nothing for others
    startup_timeout_s: float = 30.0


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What a peer says when greeted."""

    records: tuple[tuple[PeerRecord, bytes], ...]
    time: float


class Net:
    """A running node; make one with `start`."""

    def __init__(self, config: NetConfig, service: Service, identity: Identity) -> None:
        self.config, self._identity = config, identity
        self.peer_id = identity.peer_id
        self._servicer = PeerServicer(service)
        self._p2p: Any = None
        self._node: Any = None
        self._dht: Any = None
        self.addresses: tuple[str, ...] = ()
        self.bytes_down = 0
        self._offsets: dict[str, float] = {}
        self._dialed: set[str] = set()
        self._downloads: dict[str, asyncio.Lock] = {}

    @classmethod
    async def start(cls, config: NetConfig, service: Service) -> "Net":
        """Start p2pd, reach a bootstrap peer, join the DHT.

        Raises UsageError for addresses that make no sense, Unavailable if the port is taken or no
        bootstrap peer answers; then nothing is left running.
        """
        bootstrap = [checked(a, with_peer=True) for a in config.bootstrap]
        for address in config.announce:
            if port_of(checked(address, with_peer=False)) == 0:
                raise UsageError(f"{address} announces port 0; give the port that others dial.")
        for address in config.listen:
            checked(address, with_peer=False)
            check_port(address)
        identity = (
            Identity.load_or_create(config.identity_path)
            if config.identity_path is not None
            else Identity.generate()
        )
        net = cls(config, service, identity)
        try:
            await net._start_p2p()
            reached = await net._reach(bootstrap) if bootstrap else []
            await net._start_dht(reached)
        except BaseException:
            await net.stop()
            raise
        return net

    # --- starting and stopping --------------------------------------------------------------

    async def _start_p2p(self) -> None:
        config = self.config
        path = config.identity_path
        with contextlib.ExitStack() as stack:
            if path is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spesd-")))
                path = folder / "identity.key"
                self._identity.save(path)
            for attempt in (0, 1):
                listen = without_ip6(config.listen) if attempt else config.listen
                try:
                    self._p2p = await P2P.create(
                        identity_path=str(path),
                        host_maddrs=None if config.observer else list(listen),
                        announce_maddrs=list(config.announce) or None,
                        no_listen=config.observer,
                        nat_port_map=not config.observer,
                        startup_timeout=config.startup_timeout_s,
                        check_if_identity_free=False,
                        idle_timeout=30,
                    )
                    break
                except P2PDaemonError as error:
                    again = attempt == 0 and without_ip6(config.listen) != config.listen
                    if again and "in use" not in str(error):
                        continue  # a host without IPv6
                    raise start_failure(str(error), config.listen) from None
        await self._servicer.add_p2p_handlers(self._p2p)

    async def _reach(self, bootstrap: Sequence[str]) -> list[str]:
        """Dial the bootstrap peers; return those that answer, or say why none does."""
        reasons: dict[str, str] = {}
        for attempt in range(DIAL_ROUNDS):
            results = await asyncio.gather(*(self._dial(a) for a in bootstrap))
            reached = [a for a, failure in zip(bootstrap, results, strict=True) if failure is None]
            if reached:
                return reached
            for address, failure in zip(bootstrap, results, strict=True):
                # the first reason is the true one: later dials may only meet p2pd's own back-off
                reasons.setdefault(address, str(failure))
            if attempt + 1 < DIAL_ROUNDS:
                await asyncio.sleep(1.0)
        listed = "; ".join(f"{a}: {reason}" for a, reason in reasons.items())
        raise Unavailable(
            f"no bootstrap peer answers ({listed}); check the address, or ask for another one."
        )

    async def _dial(self, address: str) -> str | None:
        """Connect to an address with peer id; return None, or why it failed."""
        parsed = Multiaddr(address)
        target = PeerID.from_base58(parsed["p2p"])
        where = parsed.decapsulate(Multiaddr(f"/p2p/{parsed['p2p']}"))
        if str(target) == self.peer_id:
            return "that is this peer's own address"
        try:
            await asyncio.wait_for(self._p2p._client.connect(target, [where]), DIAL_S)
        except TimeoutError:
            return f"no answer within {DIAL_S:.0f} s"
        except (*_LOST, Exception) as error:  # noqa: BLE001 - the bindings raise bare exceptions
            text = str(error)
            if "peer id mismatch" in text:
                return "another peer answers there: the peer id in the address is wrong"
            return "nobody answers there"
        return None

    async def _start_dht(self, reached: Sequence[str]) -> None:
        try:
            self._node = await asyncio.wait_for(
                DHTNode.create(
                    p2p=self._p2p,
                    initial_peers=list(reached) or None,
                    record_validator=SpesdValidator(),
                    client_mode=self.config.observer,
                    strict=False,  # clocks are measured by us, not a reason to refuse a volunteer
                    ensure_bootstrap_success=False,
                ),
                self.config.startup_timeout_s,
            )
        except TimeoutError:
            raise Unavailable("the DHT did not answer in time; try again.") from None
        self._dht = Dht(self._node)
        seen: list[str] = []
        if not self.config.observer:
            seen = [str(a) for a in await self._p2p.get_visible_maddrs()]
        with_id = [a if "/p2p/" in a else f"{a}/p2p/{self.peer_id}" for a in seen]
        announced = [f"{a}/p2p/{self.peer_id}" for a in self.config.announce if "/p2p/" not in a]
        self.addresses = tuple(dict.fromkeys([*announced, *best_first(with_id)]))

    async def stop(self) -> None:
        """Leave the DHT and end p2pd; it is gone when this returns."""
        child = getattr(self._p2p, "_child", None)
        if self._node is not None:
            with contextlib.suppress(TimeoutError, *_LOST):
                await asyncio.wait_for(self._node.shutdown(), STOP_S)
        if self._p2p is not None:
            with contextlib.suppress(TimeoutError, *_LOST):
                await asyncio.wait_for(self._p2p.shutdown(), STOP_S)
        if child is not None and child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()

    # --- about ourselves --------------------------------------------------------------------

    @property
    def addr_kind(self) -> str:
        """Who can dial us: public, private or loopback; relayed if we listen nowhere."""
        return kind_of(self.addresses[0]) if self.addresses else "relayed"

    @property
    def clock_offset(self) -> float:
        """Seconds by which the others' clocks are ahead of ours (their median)."""
        return statistics.median(self._offsets.values()) if self._offsets else 0.0

    def now(self) -> float:
        """Return the swarm's time: our clock, corrected by the others'."""
        return time.time() + self.clock_offset

    @property
    def bytes_up(self) -> int:
        """Bytes of bundles sent to others."""
        return self._servicer.bytes_up

    @property
    def violations(self) -> dict[str, int]:
        """Messages dropped because they broke a rule, by sender."""
        return dict(self._servicer.violations)

    def sign(self, record: Record) -> bytes:
        """Return the signed envelope of a record of ours."""
        return seal(record, self._identity)

    # --- the DHT ----------------------------------------------------------------------------

    async def publish_peer(self, record: PeerRecord) -> None:
        """Store our own record in the DHT."""
        await self._dht.publish_peer(record, self.sign(record))

    async def publish_run(self, config: RunConfig) -> None:
        """Vouch for a run in the DHT, so that it can be found by name."""
        record = RunRecord(run_id=config.run_id, peer_id=self.peer_id, name=config.name)
        await self._dht.publish_run(record, self.sign(record), config.canonical(), self.now())

    async def find_peers(self, run_id: str) -> list[PeerRecord]:
        """Return the records of a run's peers from the DHT, verified and unexpired."""
        found: list[PeerRecord] = await self._dht.find_peers(run_id)
        return found

    async def find_runs(self) -> dict[str, str]:
        """Return the names of the runs in the DHT by run id."""
        found: dict[str, str] = await self._dht.find_runs()
        return found

    async def find_config(self, run_id: str) -> bytes | None:
        """Return a run's config: from the DHT, or from a peer that we are connected to."""
        config: bytes | None = await self._dht.find_config(run_id)
        if config is not None:
            return config
        for peer in await self._p2p.list_peers():
            with contextlib.suppress(Unavailable):
                reply = await self._call(str(peer.peer_id), "rpc_run", pb.RunRequest(run_id=run_id))
                if reply.config:
                    return bytes(reply.config)
        return None

    # --- calls ------------------------------------------------------------------------------

    async def hello(self, peer_id: str, run_id: str) -> Hello:
        """Greet a peer: whom does it know, and what time has it?"""
        began = time.time()
        reply = await self._call(peer_id, "rpc_hello", pb.HelloRequest(run_id=run_id))
        self._offsets[peer_id] = reply.time - (began + time.time()) / 2
        while len(self._offsets) > CLOCK_SAMPLES:
            del self._offsets[next(iter(self._offsets))]
        records = []
        for raw in reply.records[:MAX_ENVELOPES]:
            record = open_envelope(raw)
            if isinstance(record, PeerRecord) and record.run_id == run_id:
                records.append((record, bytes(raw)))
        return Hello(records=tuple(records), time=reply.time)

    async def announce(self, peer_id: str, envelopes: Sequence[bytes]) -> None:
        """Push signed records or offers to a peer."""
        await self._call(peer_id, "rpc_announce", pb.Announcement(envelopes=envelopes))

    async def offers(
        self, peer_id: str, run_id: str, round_number: int
    ) -> list[tuple[Offer, bytes]]:
        """Ask a peer for the offers that it knows for a round."""
        request = pb.OffersRequest(run_id=run_id, round=round_number)
        reply = await self._call(peer_id, "rpc_offers", request)
        found = []
        for raw in reply.envelopes[:MAX_ENVELOPES]:
            record = open_envelope(raw)
            if isinstance(record, Offer) and record.run_id == run_id:
                found.append((record, bytes(raw)))
        return found

    async def state(self, peer_id: str, run_id: str) -> StateManifest | str:
        """Ask a peer for the manifest of its state, or why it has none to give."""
        reply = await self._call(peer_id, "rpc_state", pb.StateRequest(run_id=run_id))
        if not reply.envelope:
            return str(reply.reason)[:256] or "no reason given"
        record = open_envelope(reply.envelope)
        if not isinstance(record, StateManifest) or record.run_id != run_id:
            raise ProtocolViolation("a state is not of this run")
        return record

    async def fetch(self, digest: str, size: int, sources: Sequence[str], into: Path) -> Path:
        """Fetch a bundle by its name into a file; see `fetch.Download`."""
        lock = self._downloads.setdefault(digest, asyncio.Lock())
        async with lock:
            download = Download(digest, size, into, self._open_fetch)
            try:
                return await download.run([s for s in sources if s != self.peer_id])
            finally:
                self.bytes_down += download.bytes_down
                self._downloads.pop(digest, None)

    async def connect(self, addresses: Sequence[str]) -> None:
        """Dial addresses with peer ids; those that fail cost nothing but time."""
        good = []
        for address in addresses:
            with contextlib.suppress(UsageError):
                good.append(checked(address, with_peer=True))
        async with asyncio.TaskGroup() as group:
            for address in good:
                group.create_task(self._dial(address))

    async def alive(self) -> bool:
        """Tell whether p2pd still answers us."""
        try:
            await asyncio.wait_for(self._p2p.list_peers(), CALL_S)
        except (TimeoutError, *_LOST):
            return False
        return True

    async def _open_fetch(self, peer_id: str, request: pb.FetchRequest) -> Any:
        stub = PeerServicer.get_stub(self._p2p, PeerID.from_base58(peer_id))
        try:
            return _Guarded(await stub.rpc_fetch(request))
        except _LOST as error:
            raise Unavailable(f"it does not answer ({type(error).__name__})") from None

    async def _call(self, peer_id: str, name: str, request: Any) -> Any:
        try:
            stub = PeerServicer.get_stub(self._p2p, PeerID.from_base58(peer_id))
            return await getattr(stub, name)(request, timeout=CALL_S)
        except _LOST as error:
            raise Unavailable(
                f"peer {peer_id[-8:]} does not answer ({type(error).__name__})"
            ) from None
        except ValueError as error:
            raise ProtocolViolation(f"peer {peer_id[-8:]}: {error}") from None


class _Guarded:
    """A stream of replies whose lost connection is Unavailable, like everything else here."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __anext__(self) -> Any:
        try:
            return await anext(self._stream)
        except _LOST as error:
            raise Unavailable(f"the connection was lost ({type(error).__name__})") from None

    async def aclose(self) -> None:
        """Close the stream; it may be gone already."""
        with contextlib.suppress(*_LOST, RuntimeError):
            await self._stream.aclose()
