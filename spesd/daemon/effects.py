"""Carries out each command of the round, one method each; its result comes back as an event.

Decides nothing about the round. A method that fails because of another peer or the world turns
that into an event; a lost trainer becomes Interrupted.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

from spesd.daemon.peer import Peer
from spesd.daemon.service import PeerService
from spesd.daemon.worker import WorkerLost
from spesd.errors import DamagedState, SpesdError
from spesd.ids import SHARED
from spesd.swarm import events as ev
from spesd.swarm.plan import PartMerge
from spesd.swarm.records import Offer, PartOffer

PARALLEL_FETCHES = 4
PUSH_TIMEOUT_S = 5.0
SERVED_KEEP_S = 120.0  # a bundle that somebody asked for lately is not pruned


class Effects:
    """The hands of one peer's round."""

    def __init__(self, peer: Peer, service: PeerService, group: asyncio.TaskGroup) -> None:
        self.peer, self.service, self._group = peer, service, group
        self.on_resync: Callable[[str], None] = lambda reason: None
        self.on_leave: Callable[[], None] = lambda: None
        self._fetches = asyncio.Semaphore(PARALLEL_FETCHES)
        self._round_tasks: set[asyncio.Task[None]] = set()
        self._pins: dict[int, set[str]] = {}  # round -> bundles offered or fetched in it
        self._times: dict[str, float] = {}
        self._bytes = (0, 0)
        self._last_check = 0.0

    def start(self, command: ev.Command) -> None:
        """Begin to carry out a command."""
        action: Callable[[Any], Awaitable[None]] = getattr(self, f"_{type(command).__name__}")
        task = self._group.create_task(self._guarded(action, command))
        self._round_tasks.add(task)
        task.add_done_callback(self._round_tasks.discard)

    def running(self) -> list[asyncio.Task[None]]:
        """The commands that are being carried out."""
        return list(self._round_tasks)

    async def _guarded(self, action: Callable[[Any], Awaitable[None]], command: ev.Command) -> None:
        try:
            await action(command)
        except WorkerLost as error:
            self.peer.post(ev.Interrupted(round=command.round, reason=str(error)))
        except SpesdError as error:
            self.peer.say("trainer", str(error))
            self.peer.post(ev.Interrupted(round=command.round, reason=str(error)))

    def _cancel_others(self) -> None:
        """End what still runs for this round: fetches that came too late, old deadlines."""
        current = asyncio.current_task()
        for task in list(self._round_tasks):
            if task is not current:
                task.cancel()

    # --- one method for each command --------------------------------------------------------

    async def _Train(self, command: ev.Train) -> None:
        peer = self.peer
        self._times = {"begin": time.monotonic()}
        self._bytes = (peer.net.bytes_up, peer.net.bytes_down)
        peer.progress.done, peer.progress.step_in_round = False, 0
        peer.changed.set()
        await peer.worker.call(
            "train",
            round=command.round,
            steps=command.steps,
            go_on=command.go_on,
            global_tokens=peer.progress.global_tokens,
            contributors=peer.progress.contributors,
        )

    async def _SayDone(self, command: ev.SayDone) -> None:
        self._times.setdefault("done", time.monotonic())
        self.peer.progress.done = True
        self.peer.changed.set()

    async def _Snapshot(self, command: ev.Snapshot) -> None:
        peer = self.peer
        self._times["closed"] = time.monotonic()
        peer.fault("offering")
        reply = await peer.worker.call("snapshot", round=command.round)
        terms = {c.expert: c.term for c in peer.claims}
        parts = tuple(
            PartOffer(
                part=p["part"],
                term=_term(p["part"], terms),
                tokens=p["tokens"],
                digest=p["digest"],
                size=p["size"],
            )
            for p in reply["parts"]
        )
        for refused in reply.get("refused", []):
            peer.say("numerics", f"kept back {refused}")
        if not any(p.part == SHARED for p in parts):
            raise DamagedState("our shared parameters are not finite; going back to a good state")
        peer.progress.loss = reply.get("loss", peer.progress.loss)
        offer = Offer(
            run_id=peer.run.run_id,
            peer_id=peer.net.peer_id,
            round=command.round,
            tokens=int(reply["tokens"]),
            global_tokens=peer.progress.global_tokens,
            loss=reply.get("loss"),
            parts=parts,
        )
        self._pins[command.round] = {p.digest for p in parts}
        peer.keep_offer(offer, peer.net.sign(offer))
        peer.post(ev.SnapshotTaken(round=command.round, offer=offer))

    async def _PublishOffer(self, command: ev.PublishOffer) -> None:
        peer = self.peer
        self._times["offered"] = time.monotonic()
        raw = peer.net.sign(command.offer)
        peer.fault("exchanging")

        async def push(peer_id: str) -> None:
            try:
                await asyncio.wait_for(peer.net.announce(peer_id, [raw]), PUSH_TIMEOUT_S)
            except (SpesdError, TimeoutError):
                peer.roster.failed(peer_id, time.monotonic())
                peer.changed.set()

        async with asyncio.TaskGroup() as group:
            for record in peer.roster.present(time.monotonic()):
                group.create_task(push(record.peer_id))

    async def _AskOffers(self, command: ev.AskOffers) -> None:
        peer = self.peer

        async def ask(peer_id: str) -> None:
            with contextlib.suppress(SpesdError, TimeoutError):
                for offer, raw in await peer.net.offers(peer_id, peer.run.run_id, command.round):
                    if peer.keep_offer(offer, raw):
                        peer.post(ev.OfferSeen(round=offer.round, offer=offer))

        async with asyncio.TaskGroup() as group:
            for peer_id in sorted(command.peers):
                group.create_task(ask(peer_id))

    async def _Fetch(self, command: ev.Fetch) -> None:
        peer, want = self.peer, command.want
        # whoever else is in the round may have fetched these bytes already, should their maker die
        others = [p for p in sorted(peer.round.offers) if p != want.peer]
        sources = [want.peer, *others]
        try:
            async with self._fetches:
                await peer.net.fetch(want.digest, want.size, sources, peer.bundle_path(want.digest))
        except (SpesdError, TimeoutError) as error:
            peer.post(ev.FetchFailed(round=command.round, want=want, reason=str(error)))
            return
        self._pins.setdefault(command.round, set()).add(want.digest)
        peer.post(ev.PartArrived(round=command.round, want=want))

    async def _SetDeadline(self, command: ev.SetDeadline) -> None:
        await asyncio.sleep(command.seconds)
        self.peer.post(ev.DeadlinePassed(round=command.round, phase=command.phase))

    async def _Merge(self, command: ev.Merge) -> None:
        peer = self.peer
        self._cancel_others()
        self._times["merge"] = time.monotonic()
        peer.fault("merging")
        reply = await peer.worker.call(
            "merge",
            round=command.round,
            global_tokens=peer.progress.global_tokens,
            parts=[self._inputs(p) for p in command.parts],
        )
        self._count(command)
        rejected = [f"{r['part']} of {r['peer']}: {r['reason']}" for r in reply["rejected"]]
        for part in command.parts:
            if any(r["part"] == part.part for r in reply["rejected"]) and not any(
                p == part.part for p in reply.get("merged", [])
            ):
                continue
            peer.round.versions[part.part] = (part.round, part.term)
        for offered in command.offers[0].parts:
            peer.round.versions[offered.part] = (command.round, offered.term)
        if command.round % peer.run.round.eval_every == 0:
            peer.evaluated(command.round, await peer.worker.call("evaluate"))
        await self._settle_ownership()
        if command.round % peer.run.round.checkpoint_every == 0 or peer.state_wanted:
            await self.checkpoint(command.round)
        self._report(command, reply, rejected)
        peer.post(ev.MergeDone(round=command.round))

    async def _Resync(self, command: ev.Resync) -> None:
        self._cancel_others()
        self.on_resync(command.reason)

    async def _HandOver(self, command: ev.HandOver) -> None:
        self._cancel_others()
        self.on_leave()

    # --- their parts ------------------------------------------------------------------------

    def _inputs(self, part: PartMerge) -> dict[str, Any]:
        return {
            "part": part.part,
            "own_tokens": part.own_tokens,
            "round": part.round,
            "term": part.term,
            "inputs": [
                {
                    "path": str(self.peer.bundle_path(w.digest)),
                    "digest": w.digest,
                    "tokens": w.tokens,
                    "peer": w.peer,
                }
                for w in part.inputs
            ],
        }

    def _count(self, command: ev.Merge) -> None:
        """Move the swarm's progress on: everybody who saw the same offers comes to one number."""
        progress = self.peer.progress
        base = max(o.global_tokens for o in command.offers)
        progress.global_tokens = base + sum(o.tokens for o in command.offers)
        progress.contributors = max(sum(o.tokens > 0 for o in command.offers), 1)

    async def _settle_ownership(self) -> None:
        peer = self.peer
        if peer.adopt_placement(peer.placement(settled=True)):
            await peer.worker.call("own", experts=peer.owns)

    async def checkpoint(self, round_number: int) -> None:
        """Save the state after the merge of `round_number`, and drop what nothing refers to."""
        peer = self.peer
        peer.fault("checkpointing")
        try:
            reply = await peer.worker.call(
                "checkpoint",
                round=round_number,
                global_tokens=peer.progress.global_tokens,
                contributors=peer.progress.contributors,
                versions={p: list(v) for p, v in sorted(peer.round.versions.items())},
            )
        except SpesdError as error:
            peer.say("checkpoint", f"not saved: {error}")
            peer.journal.write("checkpoint_failed", round=round_number, reason=str(error))
            return
        peer.say("checkpoint", "")
        peer.state_wanted = False
        peer.checkpoint = peer.store.read(reply["path"])
        for old in [r for r in self._pins if r < round_number - 2]:
            del self._pins[old]
        now = time.monotonic()
        self.service.served = {
            d: t for d, t in self.service.served.items() if now - t < SERVED_KEEP_S
        }
        pinned = set(self.service.served).union(*self._pins.values())
        await asyncio.to_thread(peer.store.prune, 2, pinned)

    def _report(self, command: ev.Merge, reply: dict[str, Any], rejected: list[str]) -> None:
        peer, t = self.peer, self._times
        end = time.monotonic()
        closed = t.get("closed", end)
        done = min(t.get("done", closed), closed)
        stopped = end - (closed if peer.run.round.quorum < 1 else done)
        total = max(end - t.get("begin", end), 1e-9)
        up, down = peer.net.bytes_up - self._bytes[0], peer.net.bytes_down - self._bytes[1]
        summary = {
            "round": command.round,
            "closed_by": peer.round.closed_by,
            "offers": len(command.offers),
            "merged": len(command.parts),
            "missed": [*command.missed, *rejected],
            "seconds": {
                "train": round(done - t.get("begin", done), 3),
                "wait": round(closed - done, 3),
                "exchange": round(t["merge"] - closed, 3),
                "merge": round(end - t["merge"], 3),
            },
            "bytes": {"up": up, "down": down},
            "stall_fraction": round(min(stopped / total, 1.0), 4),
        }
        peer.rounds.append(summary)
        p = peer.progress
        peer.journal.write(
            "merged",
            **summary,
            tokens=p.tokens,
            global_tokens=p.global_tokens,
            loss=p.loss,
            val_loss=p.val_loss,
            owns=peer.owns,
            draws=reply.get("draws"),
        )


def _term(part: str, terms: dict[int, int]) -> int:
    return next((t for e, t in terms.items() if part == f"expert-{e}"), 0)
