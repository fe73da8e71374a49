"""From what a peer may train: its own checkpoint, another peer's state, or a founder's beginning.

"Load failed" never leads to training: as long as there is no state, the peer waits for a donor and
says so.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from spesd.checkpoint.manifest import Checkpoint
from spesd.daemon.peer import Peer
from spesd.errors import ProtocolViolation, SpesdError, Unavailable
from spesd.ids import expert_part
from spesd.swarm.records import Claim, PeerRecord, PeerState, StateManifest, StatePart

ASK_AGAIN_S = (0.5, 8.0)  # back-off between two rounds of asking, from and up to
PARALLEL_FETCHES = 3


class Sync:
    """Bring the trainer to a state from which it may train."""

    def __init__(self, peer: Peer, rng: random.Random) -> None:
        self.peer, self.rng = peer, rng

    async def run(self, *, fresh: Callable[[], Awaitable[None]]) -> int:
        """Return the round in which training may begin, with the trainer holding its state.

        `fresh` initialises the founder's model where there is no state anywhere.
        """
        peer = self.peer
        pause = ASK_AGAIN_S[0]
        own, damaged = await asyncio.to_thread(peer.store.newest)
        for sentence in damaged:
            peer.journal.write("damaged", reason=sentence)
            peer.say("checkpoint", sentence)
        while True:
            donors = self._donors()
            ahead = max((d.round for d in donors), default=0)
            if own is not None and ahead <= own.round + 1:
                return await self._from_disk(own)
            for donor in donors:
                manifest = await self._ask(donor)
                if manifest is None:
                    continue
                if own is not None and manifest.round <= own.round:
                    return await self._from_disk(own)
                if await self._from_donor(donor.peer_id, manifest, own):
                    return manifest.round + 1
            if not donors and own is None and peer.founder:
                await fresh()
                return 1
            peer.say("state", "waiting for a donor: no live peer can give the run's state yet")
            await asyncio.sleep(pause * (0.5 + self.rng.random()))
            pause = min(pause * 1.7, ASK_AGAIN_S[1])

    def _donors(self) -> list[PeerRecord]:
        """Peers that hold a state, in random order so that joiners spread over them."""
        states = (PeerState.TRAINING, PeerState.PAUSED)
        alive = self.peer.roster.alive(time.monotonic())
        donors = [r for r in alive if r.state in states and r.round >= 1]
        self.rng.shuffle(donors)
        newest = max((d.round for d in donors), default=0)
        return [d for d in donors if d.round >= newest - 1]

    async def _ask(self, donor: PeerRecord) -> StateManifest | None:
        peer = self.peer
        try:
            answer = await peer.net.state(donor.peer_id, peer.run.run_id)
        except (SpesdError, TimeoutError) as error:
            peer.journal.write("donor", peer=donor.peer_id, reason=str(error))
            return None
        if isinstance(answer, str):
            peer.journal.write("donor", peer=donor.peer_id, reason=answer)
            return None
        return answer

    async def _from_disk(self, own: Checkpoint) -> int:
        peer = self.peer
        # what we owned is what we have moments for; memory may have become less since
        kept = [e for e in own.owned if not peer.claims or e in peer.owns][: peer.capacity]
        reply = await peer.worker.call(
            "load_checkpoint", path=str(peer.store.path_of(own)), owned=kept
        )
        peer.progress.steps = int(reply.get("steps", own.steps))
        peer.progress.tokens = int(reply.get("tokens", own.tokens))
        peer.checkpoint = own
        if peer.claims:
            peer.claims = tuple(c for c in peer.claims if c.expert in kept)
        else:
            terms = {p.part: p.term for p in own.parts}
            peer.claims = tuple(
                Claim(expert=e, term=max(terms.get(expert_part(e), 1), 1), since=peer.net.now())
                for e in kept
            )
        self._loaded(own.to_state())
        peer.journal.write("resumed", round=own.round, reason="own checkpoint is the newest")
        return own.round + 1

    async def _from_donor(
        self, donor: str, manifest: StateManifest, own: Checkpoint | None
    ) -> bool:
        """Download every part of a state and load it whole; False if it cannot be had."""
        peer = self.peer
        began = time.monotonic()
        limit = asyncio.Semaphore(PARALLEL_FETCHES)
        sources = [donor, *(d.peer_id for d in self._donors() if d.peer_id != donor)]

        async def one(digest: str, size: int) -> None:
            async with limit:
                await peer.net.fetch(digest, size, sources, peer.bundle_path(digest))

        failed = False
        try:
            async with asyncio.TaskGroup() as group:
                for part in manifest.parts:
                    group.create_task(one(part.digest, part.size))
            if own is not None and peer.checkpoint is None:
                # moments, data position and counters are ours alone, and still good
                kept = [e for e in own.owned if e in peer.owns or not peer.claims]
                await peer.worker.call(
                    "load_checkpoint",
                    path=str(peer.store.path_of(own)),
                    owned=kept[: peer.capacity],
                )
            await own_first(peer)
            await peer.worker.call(
                "load_state",
                round=manifest.round,
                parts=state_parts(peer, manifest.parts),
            )
        except* (SpesdError, TimeoutError) as group_error:
            reason = "; ".join(str(e) for e in group_error.exceptions)
            peer.journal.write("donor", peer=donor, reason=f"download failed: {reason}")
            failed = True
        if failed:
            return False
        self._loaded(manifest)
        peer.journal.write(
            "synced",
            round=manifest.round,
            donor=donor,
            seconds=round(time.monotonic() - began, 2),
        )
        return True

    def _loaded(self, manifest: StateManifest) -> None:
        peer = self.peer
        peer.say("state", "")
        peer.progress.global_tokens = max(manifest.global_tokens, peer.progress.global_tokens)
        peer.progress.contributors = max(manifest.contributors, 1)
        peer.round.versions = {p.part: (p.round, p.term) for p in manifest.parts}


async def own_first(peer: Peer) -> None:
    """Tell the trainer what it will own before it loads: frozen experts are held less precisely."""
    peer.adopt_placement(peer.placement(settled=False))
    await peer.worker.call("own", experts=peer.owns)


def state_parts(peer: Peer, parts: Iterable[StatePart]) -> list[dict[str, Any]]:
    """Return what the trainer is told of a state whose bundles are all on our disk."""
    return [
        {
            "part": p.part,
            "path": str(peer.bundle_path(p.digest)),
            "digest": p.digest,
            "round": p.round,
            "term": p.term,
        }
        for p in parts
    ]


async def find_run(net: object, wanted: str | None) -> str:
    """Return the id of the run to join: the only one there is, or the one called `wanted`."""
    runs: dict[str, str] = await net.find_runs()  # type: ignore[attr-defined]
    if wanted is not None:
        found = [i for i, name in runs.items() if wanted == name or i.startswith(wanted)]
        if len(found) == 1:
            return found[0]
        known = ", ".join(sorted(runs.values())) or "none"
        how_many = "no run" if not found else "more than one run"
        raise Unavailable(
            f"{how_many} called {wanted!r} is known at this address; the runs there are: {known}."
        )
    if len(runs) == 1:
        return next(iter(runs))
    if not runs:
        raise Unavailable(
            "no run is known at this address yet; start one with `spesd start RUN.toml "
            "--bootstrap ADDR`, or check the address."
        )
    listed = ", ".join(f"{name} ({i[:8]})" for i, name in sorted(runs.items()))
    raise Unavailable(f"several runs are known there; choose one with --run NAME: {listed}.")


__all__ = ["ProtocolViolation", "Sync", "find_run"]
