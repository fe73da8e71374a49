"""From a command line to a peer that is on the network and knows its run.

Everything that a user can get wrong is found here, before a byte is trained: addresses, the run,
the tokenizer, the corpus, the device, the memory.
"""

import asyncio
import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from spesd import digest as digests
from spesd.checkpoint.bundle import disk_failure
from spesd.checkpoint.store import Store
from spesd.checkpoint.weights import Weights, bundle_file, read_manifest
from spesd.config import RunConfig, run_config_from_canonical
from spesd.daemon.home import Home, write_atomically
from spesd.daemon.service import PeerService
from spesd.daemon.sync import find_run
from spesd.data.sources import check_sources
from spesd.data.tokenizer import load_tokenizer
from spesd.errors import ConfigError, SpesdError, Unavailable, UsageError
from spesd.net.node import Net, NetConfig
from spesd.peerconfig import PeerConfig

LOOK_FOR_RUN_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Intent:
    """What the user asked for."""

    bootstrap: tuple[str, ...] = ()
    run: RunConfig | None = None  # a founder's; a joiner gets it from the swarm
    run_name: str | None = None


async def connect(home: Home, config: PeerConfig, intent: Intent, service: PeerService) -> Net:
    """Start our node: by the addresses given, and by those of peers seen before."""
    remembered = home.remembered()
    known = [a for a in home.cached_addresses() if a not in intent.bootstrap]
    listen = config.listen or _last_listen(remembered)
    settings = NetConfig(
        identity_path=home.identity,
        listen=listen,
        announce=config.announce,
        bootstrap=intent.bootstrap,
        observer=False,
    )
    try:
        net = await Net.start(settings, service)
    except UsageError:
        raise
    except Unavailable as error:
        again = _without_last_port(settings, config, intent, bool(known), error)
        net = await Net.start(again, service)
    if known:
        await net.connect(known)
    if not config.listen:
        home.remember(listen=_ports(net))
    return net


def _without_last_port(
    settings: NetConfig, config: PeerConfig, intent: Intent, known: bool, error: Unavailable
) -> NetConfig:
    """Return what to try after a failed start, or raise the failure if nothing is left."""
    port_taken = not config.listen and bool(settings.listen) and "use" in str(error)
    if port_taken:
        return NetConfig(
            identity_path=settings.identity_path,
            announce=settings.announce,
            bootstrap=intent.bootstrap,
        )
    if known and intent.bootstrap:
        # the address given is dead, but we know others: a run outlives its first node
        return NetConfig(
            identity_path=settings.identity_path,
            listen=settings.listen or NetConfig(identity_path=None).listen,
            announce=settings.announce,
            bootstrap=(),
        )
    raise error


def _last_listen(remembered: dict[str, object]) -> tuple[str, ...]:
    last = remembered.get("listen")
    if isinstance(last, list) and last and all(isinstance(a, str) for a in last):
        return tuple(str(a) for a in last)
    return NetConfig(identity_path=None).listen


def _ports(net: Net) -> list[str]:
    """The addresses to listen on next time: the same ports, so that our address stays true."""
    ports = {}
    for address in net.addresses:
        words = address.split("/")
        if len(words) > 4 and words[3] == "tcp":
            ports[words[1]] = words[4]
    anywhere = {"ip4": "0.0.0.0", "ip6": "::"}
    return [f"/{kind}/{anywhere[kind]}/tcp/{p}" for kind, p in ports.items() if kind in anywhere]


async def learn_run(home: Home, net: Net, intent: Intent) -> RunConfig:
    """Return the run: the founder's own, or what the swarm gives and the run id proves."""
    if intent.run is not None:
        return intent.run
    end = asyncio.get_running_loop().time() + LOOK_FOR_RUN_S
    while True:
        try:
            run_id = await find_run(net, intent.run_name)
            raw = await net.find_config(run_id)
            if raw is None:
                raise Unavailable(f"no peer gives the config of run {run_id}; try again later.")
            return run_config_from_canonical(raw, run_id)
        except Unavailable as error:
            stored = _stored_run(home, intent)
            if stored is not None:
                return stored
            # a swarm that has just begun may not have published itself yet
            waiting = "no run is known" in str(error) or "no peer gives" in str(error)
            if not waiting or asyncio.get_running_loop().time() > end:
                raise
            await asyncio.sleep(0.5)


def _stored_run(home: Home, intent: Intent) -> RunConfig | None:
    """Return the run that this home was in before, if it is the one asked for."""
    run_id = home.remembered().get("run_id")
    if not isinstance(run_id, str):
        return None
    with contextlib.suppress(OSError, SpesdError):
        raw = (home.run_folder(run_id) / "run.json").read_bytes()
        run = run_config_from_canonical(raw, run_id)
        if intent.run_name in (None, run.name) or run_id.startswith(str(intent.run_name)):
            return run
    return None


def keep_run(home: Home, run: RunConfig) -> Path:
    """Write the run's config into the home; return the run's folder."""
    folder = home.run_folder(run.run_id)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unavailable(f"cannot write into {home.path}: {error.strerror}.") from None
    write_atomically(folder / "run.json", run.canonical())
    home.remember(run_id=run.run_id)
    return folder


async def have_tokenizer(
    run: RunConfig, config: PeerConfig, folder: Path, net: Net, service: PeerService
) -> Path | None:
    """Return the tokenizer's file, fetched from the swarm if need be; None for bytes."""
    if run.tokenizer.kind == "bytes":
        load_tokenizer(run.tokenizer, None, run.model.vocab_size)
        return None
    kept = folder / "tokenizer.json"
    given = config.tokenizer or run.tokenizer.path
    if given:
        path = Path(given).expanduser()
        load_tokenizer(run.tokenizer, path, run.model.vocab_size)
        write_atomically(kept, path.read_bytes())
    elif not kept.exists():
        name, size = run.tokenizer.digest.split(":")
        holders = [r.peer_id for r in await net.find_peers(run.run_id)]
        await net.fetch(name, int(size), holders, kept)
    load_tokenizer(run.tokenizer, kept, run.model.vocab_size)
    service.assets[digests.file_digest(kept)] = kept
    return kept


def take_weights(run: RunConfig, store: Store) -> Weights:
    """Put the weights that a run starts from among the store's bundles; return what they are.

    The founder's command has read every byte of them, and the trainer checks each bundle again.
    Raises Unavailable or DamagedState if they are not there any more, ConfigError if they are
    others.
    """
    folder = Path(run.start.path)
    weights = read_manifest(folder)
    if weights.digest != run.start.digest:
        raise ConfigError(f"the weights in {folder} are not those of this run any more.")
    try:
        store.bundles.mkdir(parents=True, exist_ok=True)
        for part in weights.parts:
            source = bundle_file(folder, part.digest)
            target = bundle_file(store.bundles, part.digest)
            temp = target.with_name(f".{part.digest}.{os.getpid()}.tmp")
            temp.unlink(missing_ok=True)
            try:
                os.link(source, temp)  # no second copy, where the file system can
            except OSError:
                shutil.copyfile(source, temp)
            temp.replace(target)
    except OSError as error:
        raise disk_failure(store.bundles, error) from None
    return weights


def check_data(run: RunConfig, config: PeerConfig) -> None:
    """Refuse to start without text."""
    check_sources(run.data, config.data)
