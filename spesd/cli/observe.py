"""`spesd status`: from the local daemon's socket, or from the DHT as a mere observer."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from spesd.cli.render import render_status
from spesd.errors import SpesdError, Unavailable

WATCH_S = 2.0
Tree = dict[str, Any]


def show_status(
    bootstrap: tuple[str, ...],
    run_name: str | None,
    *,
    home: Path | None,
    as_json: bool,
    watch: bool,
) -> None:
    """Print the status once, or again and again with `watch`."""

    def show(tree: Tree) -> None:
        text = json.dumps(tree) if as_json else render_status(tree)
        if watch and not as_json:
            click.clear()
        click.echo(text)

    if not bootstrap:
        _local(home, show, watch)
        return
    import uvloop

    with (
        contextlib.suppress(KeyboardInterrupt),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_observe(bootstrap, run_name, show, watch))


def _local(home: Path | None, show: Callable[[Tree], None], watch: bool) -> None:
    from spesd.daemon.control import ask
    from spesd.daemon.home import Home, default_home

    place = home or default_home()
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            show(ask(Home(place).socket, place, {"do": "status"}))
            if not watch:
                return
            time.sleep(WATCH_S)


async def _observe(
    bootstrap: tuple[str, ...], run_name: str | None, show: Callable[[Tree], None], watch: bool
) -> None:
    from spesd.daemon.service import PeerService
    from spesd.daemon.sync import find_run
    from spesd.net.node import Net, NetConfig

    net = await Net.start(
        NetConfig(identity_path=None, bootstrap=bootstrap, observer=True), PeerService()
    )
    try:
        run_id = await find_run(net, run_name)
        while True:
            show(await _look(net, run_id))
            if not watch:
                return
            await asyncio.sleep(WATCH_S)
    finally:
        await net.stop()


async def _look(net: Any, run_id: str) -> Tree:
    """Read the records in the DHT, then ask one of the peers for newer ones."""
    from spesd.config import run_config_from_canonical
    from spesd.daemon.status import RunView, swarm_status

    raw = await net.find_config(run_id)
    if raw is None:
        raise Unavailable(f"nobody gives the config of run {run_id} now; try again.")
    run = run_config_from_canonical(raw, run_id)
    newest = {r.peer_id: r for r in await net.find_peers(run_id)}
    for peer_id in sorted(newest):
        with contextlib.suppress(SpesdError, TimeoutError):
            for record, _ in (await net.hello(peer_id, run_id)).records:
                known = newest.get(record.peer_id)
                if known is None or record.seq > known.seq:
                    newest[record.peer_id] = record
            break
    now = net.now()
    fresh = [r for r in newest.values() if r.expires > now]
    view = RunView(run_id=run_id, name=run.name, n_experts=run.model.n_experts)
    return swarm_status(view, fresh).to_json()
