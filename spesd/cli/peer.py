"""Running a daemon in the foreground, for `start`, `join` and `bootstrap`."""

import asyncio
import contextlib
import dataclasses
import signal
import sys
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import click
import uvloop

from spesd.config import RunConfig, run_config_from_toml
from spesd.daemon.home import Home, default_home
from spesd.errors import SpesdError, Unavailable, UsageError
from spesd.peerconfig import PeerConfig, peer_config


def run_peer(
    *,
    home: Path | None,
    bootstrap: tuple[str, ...],
    run_toml: Path | None,
    run_name: str | None,
    options: dict[str, Any],
) -> None:
    """Found a run, or join one, and stay until the user wants otherwise."""
    place = home or default_home()
    run = None if run_toml is None else _founders_run(run_toml, place)
    if run is None and not bootstrap and not Home(place).cached_addresses():
        raise UsageError(
            "say where the run is: spesd join --bootstrap /ip4/HOST/tcp/PORT/p2p/PEER_ID."
        )
    profile = options.pop("profile")
    wishes = {k: v for k, v in options.items() if v not in (None, ())}
    config = peer_config(place, profile, wishes)
    if run is not None:
        from spesd.daemon.capacity import check_own
        from spesd.daemon.startup import check_data

        check_data(run, config)
        if config.own:
            check_own(run, config.own)
    with Home(place) as opened:
        _run(place, _live(opened, config, bootstrap, run, run_name))


async def _live(
    home: Home,
    config: PeerConfig,
    bootstrap: tuple[str, ...],
    run: RunConfig | None,
    run_name: str | None,
) -> None:
    from spesd.daemon.daemon import Daemon
    from spesd.daemon.startup import Intent

    intent = Intent(bootstrap=bootstrap, run=run, run_name=run_name)
    daemon = Daemon(home, config, intent)
    await daemon.run(lambda net: _announce(net.addresses, net.addr_kind))


def _announce(addresses: tuple[str, ...], kind: str) -> None:
    """Print the line that a volunteer types; alone on stdout, so that scripts can use it."""
    click.echo(f"spesd join --bootstrap {addresses[0]}")
    sys.stdout.flush()
    if kind != "public":
        click.echo(
            f"spesd: that address is {kind}: others reach it only from the same network, unless "
            "you forward the port and announce it (README, founding a run).",
            err=True,
        )


def _founders_run(path: Path, home: Path) -> RunConfig:
    """Read run.toml, and name the tokenizer and the weights by their bytes."""
    run = _with_tokenizer(run_config_from_toml(path), path.parent)
    return run if run.start.kind == "random" else _with_weights(run, path.parent, home)


def _with_tokenizer(run: RunConfig, base: Path) -> RunConfig:
    """Name the tokenizer by its bytes: the path is this machine's matter."""
    if run.tokenizer.kind == "bytes":
        return run
    from spesd.data.tokenizer import load_tokenizer
    from spesd.digest import file_digest

    given = (base / Path(run.tokenizer.path).expanduser()).resolve()
    load_tokenizer(dataclasses.replace(run.tokenizer, digest=""), given, run.model.vocab_size)
    name = f"{file_digest(given)}:{given.stat().st_size}"
    if run.tokenizer.digest not in ("", name):
        raise UsageError(
            f"{given} is not the tokenizer that tokenizer.digest names; remove the digest or "
            "give the right file."
        )
    tokenizer = dataclasses.replace(run.tokenizer, digest=name, path=str(given))
    return dataclasses.replace(run, tokenizer=tokenizer)


def _with_weights(run: RunConfig, base: Path, home: Path) -> RunConfig:
    """Check every byte of the weights, and name them; no need once the home has the run's state."""
    begun = Home(home).run_folder(run.run_id) / "checkpoints"
    if run.start.digest and any(begun.glob("round-*.json")):
        return run
    from spesd.checkpoint.weights import verify

    if not run.start.path:
        raise UsageError("a founder needs the weights: say where they are as start.path.")
    given = (base / Path(run.start.path).expanduser()).resolve()
    weights = verify(given, run.model, run.start.digest)
    start = dataclasses.replace(run.start, digest=weights.digest, path=str(given))
    return dataclasses.replace(run, start=start)


def run_bootstrap(
    *, home: Path | None, bootstrap: tuple[str, ...], listen: tuple[str, ...]
) -> None:
    """Serve the DHT and relay, and nothing else."""
    place = home or default_home()
    config = peer_config(place, None, {"listen": listen} if listen else {})
    with Home(place) as opened:
        _run(place, _meeting_point(opened, config, bootstrap))


async def _meeting_point(home: Home, config: PeerConfig, bootstrap: tuple[str, ...]) -> None:
    from spesd.daemon.service import PeerService
    from spesd.daemon.startup import Intent, connect

    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked.set)
    net = await connect(home, config, Intent(bootstrap=bootstrap), PeerService())
    try:
        _announce(net.addresses, net.addr_kind)
        await asked.wait()
    finally:
        await net.stop()


def _run(home: Path, work: Coroutine[Any, Any, None]) -> None:
    """Run to the end; a bug of ours leaves its traceback in the home, and one sentence here."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(work)
    except* SpesdError as group:
        raise _first(group) from None
    except* (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)
    except* Exception as group:  # noqa: BLE001 - the one supervisor
        log = home / "crash.log"
        with contextlib.suppress(OSError):
            log.write_text("".join(traceback.format_exception(group)), encoding="utf-8")
        raise Unavailable(
            f"a fault of spesd itself ended the daemon ({_first(group)!r}); its state is safe. "
            f"Please report {log}, and start it again."
        ) from None


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
