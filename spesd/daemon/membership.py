"""Heartbeats: tell the swarm where we stand, hear where it stands, keep the claims alive.

Each beat pushes our signed record to the peers we know (at most FANOUT of them), hears of peers
that we do not know from one of them at random, and renews the records in the DHT. What it learns
reaches the round as RosterSeen.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence

from spesd.daemon.peer import Peer
from spesd.errors import ProtocolViolation, SpesdError
from spesd.swarm.events import RosterSeen
from spesd.swarm.records import PeerRecord, PeerState
from spesd.swarm.roster import participants

FANOUT = 16  # peers that hear of us directly each beat; the rest hear from them
DHT_EVERY = 5  # beats between renewals in the DHT
FIND_EVERY = 8  # beats between searches of the DHT, once we know somebody
PUSH_TIMEOUT_S = 4.0


class Membership:
    """The heartbeat loop of one peer."""

    def __init__(self, peer: Peer, rng: random.Random) -> None:
        self.peer, self.rng = peer, rng
        self._beat = 0

    async def run(self) -> None:
        """Beat until cancelled; a change of ours makes the next beat come at once."""
        beat_s = self.peer.roster.times.heartbeat_s
        while True:
            began = time.monotonic()
            await self.beat()
            left = beat_s - (time.monotonic() - began)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.peer.changed.wait(), max(left, 0.05))

    async def beat(self) -> None:
        """One heartbeat: push, hear, renew."""
        peer = self.peer
        peer.changed.clear()
        record = peer.record()
        raw = peer.net.sign(record)
        peer.raw_records[peer.net.peer_id] = raw
        known = peer.roster.present(time.monotonic())
        async with asyncio.TaskGroup() as group:
            for other in self._some(known):
                group.create_task(self._push(other.peer_id, [raw]))
            if self._beat % DHT_EVERY == 0:
                group.create_task(self._publish(record))
            if self._beat % FIND_EVERY == 0 or not known:
                group.create_task(self._find())
            elif known:
                group.create_task(self._hear(self.rng.choice(known).peer_id))
        self._beat += 1
        peer.roster.tick(time.monotonic())
        self.report()

    def report(self) -> None:
        """Tell the round who is there."""
        peer = self.peer
        alive = peer.roster.alive(time.monotonic())
        here = participants(alive, peer.round.round)
        done = {r.peer_id for r in here if is_done(r, peer.round.round)}
        peer.post(
            RosterSeen(
                round=peer.round.round,
                participants=frozenset(r.peer_id for r in here),
                done=frozenset(done),
            )
        )

    def _some(self, known: Sequence[PeerRecord]) -> list[PeerRecord]:
        return list(known) if len(known) <= FANOUT else self.rng.sample(list(known), FANOUT)

    async def _push(self, peer_id: str, envelopes: Sequence[bytes]) -> None:
        try:
            await asyncio.wait_for(self.peer.net.announce(peer_id, envelopes), PUSH_TIMEOUT_S)
        except (SpesdError, TimeoutError):
            self.peer.roster.failed(peer_id, time.monotonic())

    async def _publish(self, record: PeerRecord) -> None:
        with contextlib.suppress(SpesdError, TimeoutError):
            await self.peer.net.publish_peer(record)
            await self.peer.net.publish_run(self.peer.run)

    async def _find(self) -> None:
        with contextlib.suppress(SpesdError, TimeoutError):
            for record in await self.peer.net.find_peers(self.peer.run.run_id):
                if self.peer.roster.record(record.peer_id) is None and not is_gone(record):
                    # heard of, not heard from: ask it, so that a stale record counts for nothing
                    await self._hear(record.peer_id)

    async def _hear(self, peer_id: str) -> None:
        peer = self.peer
        if peer_id == peer.net.peer_id:
            return
        try:
            reply = await peer.net.hello(peer_id, peer.run.run_id)
        except (SpesdError, TimeoutError):
            peer.roster.failed(peer_id, time.monotonic())
            return
        for record, raw in reply.records:
            with contextlib.suppress(ProtocolViolation):
                # at second hand only news counts; a dead peer's last word must not be passed on
                # for ever, so what has expired is dropped
                if record.expires > peer.net.now():
                    peer.see(record, raw)

    async def goodbye(self) -> None:
        """Say OFFLINE to everybody, and overwrite our records."""
        peer = self.peer
        peer.state, peer.claims = PeerState.OFFLINE, ()
        record = peer.record()
        raw = peer.net.sign(record)
        with contextlib.suppress(SpesdError, TimeoutError):
            async with asyncio.timeout(3.0), asyncio.TaskGroup() as group:
                for other in self._some(peer.roster.present(time.monotonic())):
                    group.create_task(self._push(other.peer_id, [raw]))
                group.create_task(self._publish(record))


def is_done(record: PeerRecord, round_number: int) -> bool:
    """Tell whether this peer has made its steps of the round, or is past it."""
    return record.round > round_number or (record.round == round_number and record.done)


def is_gone(record: PeerRecord) -> bool:
    """Tell whether this record is a goodbye."""
    return record.state is PeerState.OFFLINE
