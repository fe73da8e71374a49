"""hivemind's p2p daemon as a child of ours: start, dial, watch, end.

Decides how long to dial and what a failure to start means. Never decides whom to dial.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.utils.multiaddr import Multiaddr

from spesd.errors import Unavailable
from spesd.net.addresses import best_first, start_failure, without_ip6
from spesd.net.identity import Identity
from spesd.net.runtime import RuntimeFolder, sweep

PROBE_S = 6.0
DIAL_S = 8.0
DIALS_AT_ONCE = 8
# p2pd refuses to dial a failed address again for 5, 6 and 9 s (measured); asking sooner is no retry
REDIAL_S = (5.3, 6.3, 9.3)
STOP_S = 5.0
MISMATCH = "another peer answers there: the peer id in the address is wrong"
OWN = "that is this peer's own address"

# what hivemind raises when a peer or p2pd is lost
LOST = (
    P2PDaemonError,
    P2PHandlerError,
    OSError,
    TimeoutError,
    EOFError,
    asyncio.IncompleteReadError,
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to start p2pd."""

    identity_path: Path | None
    listen: tuple[str, ...]
    announce: tuple[str, ...]
    observer: bool
    startup_timeout_s: float


class P2pd:
    """A running p2pd; make one with `start`."""

    def __init__(self, p2p: Any, folder: RuntimeFolder, settings: Settings, peer_id: str) -> None:
        self.p2p, self.peer_id = p2p, peer_id
        self._folder, self._settings = folder, settings
        self._dials = asyncio.Semaphore(DIALS_AT_ONCE)

    @classmethod
    async def start(cls, settings: Settings, identity: Identity) -> "P2pd":
        """Start p2pd; Unavailable if it does not, and then nothing is left running."""
        sweep()
        folder = RuntimeFolder()
        path = settings.identity_path
        try:
            if path is None:
                path = folder.path / "identity.key"
                identity.save(path)
            p2p = await _create(settings, path, folder)
        except BaseException:
            folder.remove()
            raise
        return cls(p2p, folder, settings, identity.peer_id)

    @property
    def pid(self) -> int:
        """The process id of p2pd."""
        return int(self.p2p._child.pid)

    async def addresses(self) -> tuple[str, ...]:
        """Return the addresses that others may dial, with our peer id, best first.

        They change: p2pd learns of a mapped port, or how others see us, only after a while.
        """
        if self._settings.observer:
            return ()
        try:
            async with asyncio.timeout(PROBE_S):
                seen = [str(a) for a in await self.p2p.get_visible_maddrs(latest=True)]
        except (*LOST, ValueError):
            seen = []  # ValueError: it has none
        given = [a if "/p2p/" in a else f"{a}/p2p/{self.peer_id}" for a in self._settings.announce]
        with_id = [a if "/p2p/" in a else f"{a}/p2p/{self.peer_id}" for a in seen]
        return tuple(dict.fromkeys([*given, *best_first(with_id)]))

    async def dial(self, address: str) -> str | None:
        """Connect to an address with peer id; return None, or why it failed."""
        parsed = Multiaddr(address)
        target = PeerID.from_base58(parsed["p2p"])
        where = parsed.decapsulate(Multiaddr(f"/p2p/{parsed['p2p']}"))
        if str(target) == self.peer_id:
            return OWN
        try:
            async with self._dials, asyncio.timeout(DIAL_S):
                await self.p2p._client.connect(target, [where])
        except TimeoutError:
            return f"no answer within {DIAL_S:.0f} s"
        except (*LOST, DecodeError, ValueError) as error:
            return MISMATCH if "peer id mismatch" in str(error) else "nobody answers there"
        return None

    async def dial_all(self, addresses: Sequence[str]) -> dict[str, str | None]:
        """Dial addresses side by side; return for each None, or why it failed."""
        async with asyncio.TaskGroup() as group:
            tasks = {a: group.create_task(self.dial(a)) for a in dict.fromkeys(addresses)}
        return {a: task.result() for a, task in tasks.items()}

    async def reach(self, bootstrap: Sequence[str], patience_s: float) -> list[str]:
        """Return the addresses that answer; dial again while none does and patience lasts."""
        loop = asyncio.get_running_loop()
        end = loop.time() + patience_s
        reasons: dict[str, str] = {}
        waiting: Sequence[str] = bootstrap
        for pause in (*REDIAL_S, *([REDIAL_S[-1]] * 100)):
            results = await self.dial_all(waiting)
            reached = [a for a, failure in results.items() if failure is None]
            if reached:
                return reached
            for address, failure in results.items():
                # the first reason is the true one: later dials may only meet p2pd's own back-off
                reasons.setdefault(address, str(failure))
            waiting = [a for a in waiting if reasons[a] not in (MISMATCH, OWN)]
            if not waiting or loop.time() + pause > end:
                break
            await asyncio.sleep(pause)
        listed = "; ".join(f"{a}: {reason}" for a, reason in reasons.items())
        raise Unavailable(
            f"no bootstrap peer answers ({listed}); check the address, or ask for another one."
        )

    async def alive(self) -> bool:
        """Tell whether p2pd runs and the connection that our calls go over still works."""
        if self._ended():
            return False
        try:
            async with asyncio.timeout(PROBE_S):
                await self.p2p.list_peers()
        except LOST:
            return False
        return True

    def _ended(self) -> bool:
        control = self.p2p._client.control
        halves = (control._read_task, control._write_task)
        # hivemind ends these without a word, and from then on every call waits for ever
        return self.p2p._child.returncode is not None or any(h is None or h.done() for h in halves)

    async def stop(self, node: Any) -> None:
        """Shut the DHT node down, if there is one, and end p2pd; it is gone when this returns."""
        child = self.p2p._child
        if node is not None and not self._ended():
            with contextlib.suppress(*LOST):
                async with asyncio.timeout(STOP_S):
                    await node.shutdown()
        with contextlib.suppress(*LOST):
            async with asyncio.timeout(STOP_S):
                await self.p2p.shutdown()
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
        self._folder.remove()


async def _create(settings: Settings, identity: Path, folder: RuntimeFolder) -> Any:
    # hivemind has no setting for where its sockets lie, but a subclass may say
    kind: Any = type("P2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{folder.path}/"})
    plain = without_ip6(settings.listen)
    attempts = [settings.listen, plain] if plain != settings.listen else [plain]
    failure = ""
    for listen in attempts:  # the second: a host without IPv6
        try:
            return await kind.create(
                identity_path=str(identity),
                host_maddrs=None if settings.observer else list(listen),
                announce_maddrs=list(settings.announce) or None,
                no_listen=settings.observer,
                nat_port_map=not settings.observer,
                startup_timeout=settings.startup_timeout_s,
                check_if_identity_free=False,
                idle_timeout=30,
            )
        except P2PDaemonError as error:
            failure = str(error)
            if "in use" in failure:
                break
    raise start_failure(failure, settings.listen) from None
