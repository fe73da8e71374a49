"""Getting to a state, to a seat among the owners, and into a round.

Decides when training may begin. What state that is, is `sync`'s matter; which experts, placement's.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable

from spesd.daemon.effects import Effects
from spesd.daemon.membership import Membership
from spesd.daemon.peer import Peer
from spesd.daemon.startup import take_weights
from spesd.daemon.sync import Sync, own_first, state_parts
from spesd.daemon.worker import WorkerLost
from spesd.errors import SpesdError
from spesd.ids import all_parts
from spesd.swarm import events as ev
from spesd.swarm.lease import coverage, leases
from spesd.swarm.records import PeerState
from spesd.swarm.round import Phase

TICK_S = 0.3
TRY_AGAIN_S = 2.0


class Entry:
    """A peer's way into a round, at its start and whenever it fell out of one."""

    def __init__(
        self, peer: Peer, membership: Membership, effects: Effects, rng: random.Random
    ) -> None:
        self.peer, self.membership, self.effects, self.rng = peer, membership, effects, rng
        self.again: Callable[[str], None] = lambda reason: None  # start `sync` once more
        self._one = asyncio.Lock()

    async def sync(self, reason: str) -> None:
        async with self._one:
            if self.peer.round.phase is Phase.SYNCING:
                await self._sync_once(reason)

    async def _sync_once(self, reason: str) -> None:
        peer = self.peer
        if peer.paused:
            peer.state = PeerState.PAUSED
            peer.changed.set()
            with contextlib.suppress(WorkerLost):
                await peer.worker.call("halt")
            return
        peer.state = PeerState.SYNCING
        peer.changed.set()
        peer.journal.write("syncing", reason=reason)
        try:
            if reason != "starting":
                await peer.worker.call("halt")
            await self._meet()
            round_number = await Sync(peer, self.rng).run(fresh=self._initialise)
            if peer.progress.val_loss is None:
                peer.evaluated(round_number - 1, await peer.worker.call("evaluate"))
            await self._take_seat(round_number)
        except WorkerLost as error:
            peer.journal.write("sync_failed", reason=str(error))
            return  # the supervisor restarts the trainer and syncs again
        except SpesdError as error:
            peer.say("state", str(error))
            peer.journal.write("sync_failed", reason=str(error))
            await asyncio.sleep(TRY_AGAIN_S)
            self.again(str(error))
            return
        if not peer.paused:
            peer.post(ev.Synced(round=round_number))

    async def _meet(self) -> None:
        """Hear who is there before deciding anything: one or two heartbeats."""
        for _ in range(2):
            await self.membership.beat()
            if self.peer.roster.alive(time.monotonic()):
                return
            await asyncio.sleep(TICK_S)

    async def _initialise(self) -> None:
        peer = self.peer
        await own_first(peer)
        if peer.run.start.kind == "weights":
            weights = await asyncio.to_thread(take_weights, peer.run, peer.store)
            parts = state_parts(peer, weights.state_parts())
            await peer.worker.call("load_state", round=0, parts=parts)
            peer.journal.write("started_from", weights=weights.digest)
        else:
            await peer.worker.call("initialise")
        peer.round.versions = dict.fromkeys(all_parts(peer.experts), (0, 0))
        await self.effects.checkpoint(0)

    async def _take_seat(self, round_number: int) -> None:
        """Claim experts; before the very first round, wait until everybody needed is there."""
        peer = self.peer
        peer.round.round = round_number
        first = round_number == 1
        peer.adopt_placement(peer.placement(settled=not first))
        peer.state = PeerState.PAUSED if peer.paused else PeerState.TRAINING
        peer.changed.set()
        while first and not self._may_begin():
            await asyncio.sleep(TICK_S)
            peer.adopt_placement(peer.placement(settled=False))
        peer.say("begin", "")
        await peer.worker.call("own", experts=peer.owns)

    def _may_begin(self) -> bool:
        peer = self.peer
        alive = peer.roster.alive(time.monotonic())
        if any(r.round > 1 or r.step_in_round > 0 for r in alive):
            return True
        ready = 1 + sum(r.state is PeerState.TRAINING for r in alive)
        held = leases([*alive, peer.record()], peer.experts)
        covered = coverage(held, peer.experts)
        if ready >= peer.run.swarm.min_peers and covered == 1.0:
            return True
        peer.say(
            "begin",
            f"waiting to begin: {ready} of {peer.run.swarm.min_peers} peers are ready, "
            f"{covered:.0%} of the experts have an owner",
        )
        return False
