"""One node of the network: p2pd, the DHT and our RPCs behind one object.

Everything awaited here has a deadline, and everything that fails raises Unavailable (the world) or
ProtocolViolation (another peer's fault). Never decides anything about a run.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hivemind.dht.node import DHTNode

from spesd.config import RunConfig
from spesd.errors import ProtocolViolation, Unavailable, UsageError
from spesd.net.addresses import check_port, checked, kind_of, port_of
from spesd.net.calls import Calls, Clock, Hello
from spesd.net.codec import Record, RunRecord, seal
from spesd.net.dht import RUN_LIFE_S, Dht, SpesdValidator
from spesd.net.fetch import Fetcher, Progress
from spesd.net.identity import Identity
from spesd.net.p2pd import LOST, P2pd, Settings
from spesd.net.servicer import PeerServicer, Service, Violations
from spesd.net.storage import BoundedStorage
from spesd.net.uploads import PROTOCOL, Uploads
from spesd.swarm.records import Offer, PeerRecord, StateManifest

ANYWHERE = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")
CACHED_KEYS = 512
ASK_ALL_S = 15.0


@dataclass(frozen=True, kw_only=True)
class NetConfig:
    """How to be on the network. Without an identity file the node is anonymous."""

    identity_path: Path | None
    listen: tuple[str, ...] = ANYWHERE
    announce: tuple[str, ...] = ()
    bootstrap: tuple[str, ...] = ()
    observer: bool = False  # listens nowhere and stores nothing for others
    startup_timeout_s: float = 30.0  # for p2pd, and for the DHT
    patience_s: float = 12.0  # how long to dial bootstrap peers of which none answers


class Net:
    """A running node; make one with `start`."""

    def __init__(self, config: NetConfig, identity: Identity, p2pd: P2pd, service: Service) -> None:
        self.config, self._identity, self._p2pd = config, identity, p2pd
        self.peer_id = identity.peer_id
        self.addresses: tuple[str, ...] = ()
        self._clock, self._violations = Clock(), Violations()
        self._servicer = PeerServicer(service, self._violations)
        self._uploads = Uploads(service, self._violations)
        self._calls = Calls(p2pd.p2p, self._clock, self._violations)
        self._fetcher = Fetcher(self._calls.open_fetch, self._violations)
        self._node: Any = None
        self._dht: Any = None
        self._last_expiry = 0.0

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
        settings = Settings(
            identity_path=config.identity_path,
            listen=config.listen,
            announce=config.announce,
            observer=config.observer,
            startup_timeout_s=config.startup_timeout_s,
        )
        net = cls(config, identity, await P2pd.start(settings, identity), service)
        try:
            await net._join(bootstrap)
        except BaseException:
            await net.stop()
            raise
        return net

    async def _join(self, bootstrap: Sequence[str]) -> None:
        p2p, config = self._p2pd.p2p, self.config
        await self._servicer.add_p2p_handlers(p2p)
        await p2p.add_binary_stream_handler(PROTOCOL, self._uploads.handle)
        reached = await self._p2pd.reach(bootstrap, config.patience_s) if bootstrap else []
        try:
            async with asyncio.timeout(config.startup_timeout_s):
                self._node = await DHTNode.create(
                    p2p=p2p,
                    initial_peers=list(reached) or None,
                    record_validator=SpesdValidator(),
                    client_mode=config.observer,
                    strict=False,  # clocks are measured by us, not a reason to refuse a volunteer
                    ensure_bootstrap_success=False,
                )
        except TimeoutError:
            raise Unavailable("the DHT did not answer in time; try again.") from None
        self._node.protocol.storage = BoundedStorage()
        self._node.protocol.cache = BoundedStorage(CACHED_KEYS)
        self._dht = Dht(self._node)
        self.addresses = await self._p2pd.addresses()

    async def stop(self) -> None:
        """Leave the DHT and end p2pd; it is gone when this returns."""
        await self._uploads.stop()
        await self._p2pd.stop(self._node)

    # --- about ourselves --------------------------------------------------------------------

    @property
    def addr_kind(self) -> str:
        """Who can dial us: public, private or loopback; relayed if we listen nowhere."""
        return kind_of(self.addresses[0]) if self.addresses else "relayed"

    @property
    def p2pd_pid(self) -> int:
        """The process id of our p2pd."""
        return self._p2pd.pid

    @property
    def clock_offset(self) -> float:
        """Seconds by which the swarm's time is ahead of our clock."""
        return self._clock.offset

    def now(self) -> float:
        """Return the swarm's time: our clock, corrected by the others'."""
        return self._clock.now()

    @property
    def bytes_up(self) -> int:
        """Bytes of bundles sent to others."""
        return self._uploads.bytes_up

    @property
    def bytes_down(self) -> int:
        """Bytes of bundles that came from others."""
        return self._fetcher.bytes_from.total()

    @property
    def bytes_from(self) -> dict[str, int]:
        """Bytes of bundles that came from others, by peer."""
        return dict(self._fetcher.bytes_from)

    @property
    def violations(self) -> dict[str, int]:
        """Messages dropped because they broke a rule, by sender."""
        return self._violations.by_peer()

    def sign(self, record: Record) -> bytes:
        """Return the signed envelope of a record of ours."""
        return seal(record, self._identity)

    async def alive(self) -> bool:
        """Tell whether p2pd still serves us; learns our newest addresses on the way."""
        if not await self._p2pd.alive():
            return False
        self.addresses = await self._p2pd.addresses() or self.addresses
        return True

    # --- the DHT ----------------------------------------------------------------------------

    async def publish_peer(self, record: PeerRecord) -> None:
        """Store our own record in the DHT."""
        # the DHT refuses what does not outlive the record before, also after our clock was set back
        self._last_expiry = max(record.expires, self._last_expiry + 0.01)
        lasting = replace(record, expires=self._last_expiry)
        await self._dht.publish_peer(lasting, self.sign(lasting))

    async def publish_run(self, config: RunConfig) -> None:
        """Vouch for a run in the DHT, so that it can be found by name."""
        now = self.now()
        record = RunRecord(
            run_id=config.run_id, peer_id=self.peer_id, name=config.name, expires=now + RUN_LIFE_S
        )
        await self._dht.publish_run(record, self.sign(record), config.canonical(), now)

    async def find_peers(self, run_id: str) -> list[PeerRecord]:
        """Return the records of a run's peers from the DHT, verified and unexpired."""
        found: list[PeerRecord] = await self._dht.find_peers(run_id, self.now())
        return found

    async def find_runs(self) -> dict[str, str]:
        """Return the names of the runs in the DHT by run id."""
        found: dict[str, str] = await self._dht.find_runs(self.now())
        return found

    async def find_config(self, run_id: str) -> bytes | None:
        """Return a run's config: from the DHT, or from a peer that we are connected to."""
        with contextlib.suppress(Unavailable):
            config: bytes | None = await self._dht.find_config(run_id)
            if config is not None:
                return config
        with contextlib.suppress(*LOST):
            async with asyncio.timeout(ASK_ALL_S):
                for peer in await self._p2pd.p2p.list_peers():
                    with contextlib.suppress(Unavailable, ProtocolViolation):
                        answer = await self._calls.run(str(peer.peer_id), run_id)
                        if answer is not None:
                            return answer
        return None

    # --- calls ------------------------------------------------------------------------------

    async def hello(self, peer_id: str, run_id: str) -> Hello:
        """Greet a peer: whom does it know, and what time has it?"""
        return await self._calls.hello(peer_id, run_id)

    async def announce(self, peer_id: str, envelopes: Sequence[bytes]) -> None:
        """Push signed records or offers to a peer."""
        await self._calls.announce(peer_id, envelopes)

    async def offers(
        self, peer_id: str, run_id: str, round_number: int
    ) -> list[tuple[Offer, bytes]]:
        """Ask a peer for the offers that it knows for a round."""
        return await self._calls.offers(peer_id, run_id, round_number)

    async def state(self, peer_id: str, run_id: str) -> StateManifest | str:
        """Ask a peer for the manifest of its state, or why it has none to give."""
        return await self._calls.state(peer_id, run_id)

    async def fetch(
        self,
        digest: str,
        size: int,
        sources: Sequence[str],
        into: Path,
        progress: Progress | None = None,
    ) -> Path:
        """Fetch a bundle by its name into a file; `progress` hears (bytes here, bytes in all)."""
        others = [s for s in sources if s != self.peer_id]
        return await self._fetcher.fetch(digest, size, others, into, progress)

    async def connect(self, addresses: Sequence[str]) -> None:
        """Dial addresses with peer ids; those that fail cost nothing but time."""
        good = []
        for address in addresses:
            with contextlib.suppress(UsageError):
                good.append(checked(address, with_peer=True))
        await self._p2pd.dial_all(good)
