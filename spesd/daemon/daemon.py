"""The daemon: startup, main loop, shutdown.

One event at a time goes into the round's table and its commands come out; effects carry them out
and their results come back as events. A service that crashes ends the daemon visibly; the trainer
may crash as often as it likes.
"""

import asyncio
import contextlib
import dataclasses
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from spesd.daemon import capacity, startup
from spesd.daemon.control import serve_control
from spesd.daemon.effects import Effects
from spesd.daemon.entry import Entry
from spesd.daemon.home import Home
from spesd.daemon.membership import Membership
from spesd.daemon.peer import Peer
from spesd.daemon.service import PeerService
from spesd.daemon.startup import Intent
from spesd.daemon.status import RunView, swarm_status
from spesd.daemon.worker import Reply, Worker, WorkerLost
from spesd.errors import SpesdError, Unavailable
from spesd.net.node import Net
from spesd.peerconfig import PeerConfig
from spesd.swarm import events as ev
from spesd.swarm.records import PeerState

INBOX = 100_000  # events; the round takes thousands a second, so a full inbox is a bug
SAVE_S = 6.0  # of the ten seconds that a user waits for Ctrl-C
RESTART_S = (2.0, 60.0)  # back-off between restarts of a crashed trainer
ADDRESS_EVERY_S = 20.0
NET_CHECK_S = 5.0
NET_MISSES = 2


class Daemon:
    """One peer's life."""

    def __init__(self, home: Home, config: PeerConfig, intent: Intent) -> None:
        self.home, self.config, self.intent = home, config, intent
        self.service = PeerService()
        self.rng = random.Random(os.urandom(16))
        self.left = asyncio.Event()
        self.leave_asked = asyncio.Event()
        self._spawned: set[asyncio.Task[None]] = set()
        self._crashes = 0
        self._planned_again = False
        self._budget = 0
        self._peer: Peer | None = None
        self._tokenizer: str = ""

    @property
    def peer(self) -> Peer:
        """This peer, once the run is known."""
        assert self._peer is not None
        return self._peer

    async def run(self, announce: Callable[[Net], None]) -> None:
        """Live until the user wants otherwise; `announce` tells how to join us."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signal)
        async with contextlib.AsyncExitStack() as stack:
            net = await self._until_asked(
                startup.connect(self.home, self.config, self.intent, self.service)
            )
            if net is None:
                return
            stack.push_async_callback(net.stop)
            begun = await self._until_asked(self._begin(net))
            if begun is None:
                return
            announce(net)
            await stack.enter_async_context(serve_control(self.home.socket, self._control))
            await self._serve()

    async def _until_asked(self, work: Any) -> Any:
        """Do a piece of the startup, or return None as soon as the user wants to leave."""
        task = asyncio.get_running_loop().create_task(work)
        asked = asyncio.get_running_loop().create_task(self.leave_asked.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for one in (task, asked):
                one.cancel()
            await asyncio.gather(task, asked, return_exceptions=True)

    async def _begin(self, net: Net) -> Peer:
        run = await startup.learn_run(self.home, net, self.intent)
        self.config = capacity.with_device(self.config)
        startup.check_data(run, self.config)
        layout, self._budget = capacity.pick_layout(run, self.config)
        folder = startup.keep_run(self.home, run)
        capacity.check_disk(run, layout, folder)
        path = await startup.have_tokenizer(run, self.config, folder, net, self.service)
        self._tokenizer = str(path) if path else ""
        self._peer = Peer(
            home=self.home,
            run=run,
            config=self.config,
            net=net,
            layout=layout,
            founder=self.intent.run is not None,
            inbox=asyncio.Queue(maxsize=INBOX),
            worker=Worker(folder / "trainer.log", self._trainer_says),
        )
        await self._start_trainer_checked()
        self.service.peer = self._peer
        return self._peer

    # --- the main loop ----------------------------------------------------------------------

    async def _serve(self) -> None:
        peer = self.peer
        self.membership = Membership(peer, self.rng)
        peer.journal.write("started", peer=peer.net.peer_id, layout=dataclasses.asdict(peer.layout))
        async with asyncio.TaskGroup() as services:
            effects = Effects(peer, self.service, services)
            entry = Entry(peer, self.membership, effects, self.rng)
            effects.on_resync = entry.again = lambda r: self._spawn(services, entry.sync(r))
            effects.on_leave = self.left.set
            self._effects, self._entry = effects, entry
            parts = [
                services.create_task(self.membership.run()),
                services.create_task(self._supervise()),
                services.create_task(self._remember_addresses()),
                services.create_task(self._watch_network()),
                services.create_task(self._rounds(effects)),
                services.create_task(self._leaver()),
            ]
            entry.again("starting")
            await self.left.wait()
            await self._shut_down()
            await _end([*parts, *effects.running(), *self._spawned])

    def _spawn(self, group: asyncio.TaskGroup, work: Any) -> None:
        task = group.create_task(work)
        self._spawned = {t for t in self._spawned if not t.done()} | {task}

    async def _rounds(self, effects: Effects) -> None:
        peer = self.peer
        while True:
            event = await peer.inbox.get()
            phase = peer.round.phase
            for command in peer.round.handle(event, time.monotonic()):
                effects.start(command)
            if peer.round.phase is not phase:
                peer.changed.set()

    def _trainer_says(self, message: Reply) -> None:
        peer, p = self.peer, self.peer.progress
        if message["event"] == "steps":
            p.step_in_round = int(message["step_in_round"])
            p.steps, p.tokens = int(message["steps"]), int(message["tokens"])
            p.tokens_per_s = float(message.get("tokens_per_s") or 0.0)
            if p.loss is None:
                p.loss = message.get("loss")
            peer.fault("training")
        elif message["event"] == "steps_done":
            peer.post(ev.StepsDone(round=int(message["round"])))
        elif message["event"] == "bad_step":
            peer.say("numerics", f"a step was skipped: {message.get('reason', 'not finite')}")

    # --- the trainer ------------------------------------------------------------------------

    async def _start_trainer_checked(self) -> None:
        """Start the trainer before anybody is told that we exist: a missing device ends here."""
        peer = self.peer
        await peer.worker.start()
        self._pump = asyncio.get_running_loop().create_task(peer.worker.pump())
        try:
            await self._set_up()
        except BaseException:
            await peer.worker.stop(0.0)
            await self._pump
            raise

    async def _set_up(self) -> None:
        peer = self.peer
        try:
            await peer.worker.call(
                "setup",
                setup={
                    "config": peer.run.canonical().decode(),
                    "peer_id": peer.net.peer_id,
                    "device": self.config.device,
                    "owned": peer.owns,
                    "store": str(peer.folder),
                    "data": dict(self.config.data),
                    "tokenizer": self._tokenizer,
                    "layout": dataclasses.asdict(peer.layout),
                    "threads": self.config.threads,
                    "nice": self.config.nice,
                },
            )
        except WorkerLost as error:
            raise Unavailable(
                f"the trainer did not start ({error}); see {peer.folder / 'trainer.log'}."
            ) from None

    async def _supervise(self) -> None:
        """Restart a trainer that died, with back-off; the daemon goes on serving meanwhile."""
        peer = self.peer
        while True:
            await peer.worker.lost.wait()
            await self._pump
            if self.left.is_set():
                return
            self._crashes += 1
            pause = min(RESTART_S[0] * 2 ** (self._crashes - 1), RESTART_S[1])
            cause = "ran out of memory" if peer.worker.out_of_memory else "ended"
            reason = f"the trainer process {cause}; restarting it in {pause:.0f} s"
            peer.say("trainer", reason)
            if peer.worker.out_of_memory and not self._planned_again:
                self._plan_again()
            peer.state = PeerState.SYNCING
            peer.post(ev.Interrupted(round=peer.round.round, reason=reason))
            await asyncio.sleep(pause)
            peer.worker = Worker(peer.folder / "trainer.log", self._trainer_says)
            await peer.worker.start()
            self._pump = asyncio.get_running_loop().create_task(peer.worker.pump())
            peer.checkpoint = None
            try:
                await self._set_up()
            except SpesdError as error:
                peer.say("trainer", str(error))
                await peer.worker.stop(0.0)
                continue
            peer.say("trainer", "")
            self._entry.again("starting")

    def _plan_again(self) -> None:
        """Hold less than was planned, once: if that does not help either, it is not the plan."""
        peer = self.peer
        self._planned_again = True
        peer.layout, self._budget = capacity.plan_again(
            peer.run, self.config, peer.layout, self._budget
        )
        peer.journal.write("planned_again", layout=dataclasses.asdict(peer.layout))
        peer.say(
            "memory",
            f"memory ran out: the plan is now {self._budget / 1e9:.2f} GB, with {peer.capacity} "
            f"own experts, others held as {peer.layout.frozen}, {peer.layout.rows} rows at once.",
        )

    async def _remember_addresses(self) -> None:
        peer = self.peer
        while True:
            await asyncio.sleep(min(ADDRESS_EVERY_S, 5.0))
            seen = [a for r in peer.roster.present(time.monotonic()) for a in r.addresses[:2]]
            merged = list(dict.fromkeys([*seen, *self.home.cached_addresses()]))[:64]
            if merged and merged != self.home.cached_addresses():
                with contextlib.suppress(SpesdError):
                    self.home.remember(addresses=merged)
            if not peer.roster.alive(time.monotonic()) and merged:
                await peer.net.connect(merged)

    async def _watch_network(self) -> None:
        """End the daemon if its p2pd is gone: whoever runs us starts us again, whole."""
        missed = 0
        while missed < NET_MISSES:
            await asyncio.sleep(NET_CHECK_S)
            missed = 0 if await self.peer.net.alive() else missed + 1
        raise Unavailable("the network daemon (p2pd) ended; start spesd again, the state is safe.")

    # --- what the user wants ----------------------------------------------------------------

    def _signal(self) -> None:
        if self.leave_asked.is_set():
            os._exit(130)  # the second time: now; every write is atomic, so the state is whole
        self.leave_asked.set()

    async def _leaver(self) -> None:
        await self.leave_asked.wait()
        self.peer.post(ev.LeaveAsked(round=self.peer.round.round))

    async def _shut_down(self) -> None:
        peer = self.peer
        peer.journal.write("leaving", round=peer.round.round)
        trained = peer.state is PeerState.TRAINING and peer.round.round >= 1
        try:
            async with asyncio.timeout(SAVE_S):
                await peer.worker.call("halt")
                if trained:
                    await self._effects.checkpoint(peer.round.round - 1)
        except (SpesdError, WorkerLost, TimeoutError) as error:
            peer.journal.write("leaving", reason=f"not saved: {error!r}")
        await self.membership.goodbye()
        await peer.worker.stop()
        await self._pump
        peer.journal.write("left")

    async def _control(self, request: dict[str, Any]) -> dict[str, Any]:
        peer, wish = self.peer, request.get("do")
        if wish == "status":
            return self._status()
        if wish == "leave":
            self.leave_asked.set()
            return {"done": "leaving"}
        if wish == "pause":
            if not peer.paused:
                peer.paused = True
                peer.state = PeerState.PAUSED
                peer.post(ev.Interrupted(round=peer.round.round, reason="paused by the user"))
            return {"done": "paused"}
        if wish == "resume":
            if peer.paused:
                peer.paused = False
                self._entry.again("resumed by the user")
            return {"done": "resumed"}
        return {"error": f"the daemon knows no request {wish!r}."}

    def _status(self) -> dict[str, Any]:
        peer = self.peer
        view = RunView(run_id=peer.run.run_id, name=peer.run.name, n_experts=peer.experts)
        me = {
            "id": peer.net.peer_id,
            "state": str(peer.state),
            "phase": str(peer.round.phase),
            "trainer_pid": peer.worker.pid,
            "addresses": list(peer.net.addresses),
            "clock_offset_s": round(peer.net.clock_offset, 3),
            "val_by_source": peer.progress.val_by_source,
            "rounds": list(peer.rounds),
        }
        records = [*peer.roster.present(time.monotonic()), peer.record()]
        return swarm_status(view, records, me).to_json()


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks until they are done: wait_for may swallow one cancellation (Python 3.11)."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.5)
