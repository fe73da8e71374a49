"""The command plan: what a peer of a run will need, as text or JSON."""

import json
from pathlib import Path
from typing import Any

import click

from spesd.config import run_config_from_toml
from spesd.daemon.home import default_home
from spesd.peerconfig import parse_bytes, parse_rate, peer_config
from spesd.plan import Link, Swarm, peer_plan

_COMPONENTS = {
    "frozen_weights": "experts of others",
    "trained_weights": "shared and own weights",
    "moments": "AdamW's moments",
    "gradients": "gradients",
    "activations": "activations",
    "working": "one layer at work",
    "logits": "logits and head",
    "overhead": "framework",
}


def show_plan(run_toml: Path, *, as_json: bool, profile: str | None, **options: Any) -> None:
    """Print the plan; every refusal is one sentence."""
    run = run_config_from_toml(run_toml)
    wishes = {k: options[k] for k in ("own", "vram", "device") if options[k] is not None}
    peer = peer_config(options["home"] or default_home(), profile, wishes)
    rates = {k: parse_rate(options[k]) if options[k] else 0 for k in ("uplink", "downlink")}
    plan = peer_plan(
        run,
        peer,
        parse_bytes(peer.vram) if peer.vram else None,
        Link(up=rates["uplink"], down=rates["downlink"]),
        Swarm(peers=options["peers"], tokens_per_s=options["speed"] or 0.0),
    )
    click.echo(json.dumps(plan) if as_json else plan_text(plan))


def plan_text(plan: dict[str, Any]) -> str:
    """Return the plan as a page for people."""
    model, layout, memory, moved = plan["model"], plan["layout"], plan["memory"], plan["round"]
    lines = [
        f"run {plan['run']['name']} ({plan['run']['id'][:8]})",
        f"model: {_big(model['total'])} parameters, {_big(model['active'])} active a token; shared "
        f"{_big(model['shared'])}, one of {model['experts']} experts {_big(model['expert'])}",
        f"this peer: owns {layout['own']} experts (largest that fits: {layout['largest_own']}), "
        f"others held as {layout['frozen']}, recomputes {layout['recompute']}, "
        f"{layout['rows']} rows at once",
        "",
        "memory",
    ]
    lines += [f"  {_COMPONENTS[k]:<24}{_size(memory[k]):>10}" for k in _COMPONENTS]
    budget = f" of {_size(memory['budget']).strip()}" if memory["budget"] else ""
    lines += [f"  {'peak':<24}{_size(memory['peak']):>10}{budget}", ""]
    lines += [f"a round with {moved['peers']} peers"]
    for name in ("down", "up"):
        seconds = moved["link_s"][name]
        wait = "" if seconds is None else f"{seconds:>10.1f} s"
        lines.append(f"  {name:<24}{_size(moved['bytes'][name]):>10}{wait}")
    how = ", assumed; give yours with --speed" if moved["speed_is_assumed"] else ""
    lines.append(
        f"  {'training':<24}{'':>10}{moved['training_s']:>10.1f} s  "
        f"({moved['tokens']:,} tokens at {moved['tokens_per_s']:,.0f} tokens/s{how})"
    )
    if moved["share_of_training"] is not None:
        share = f"{moved['share_of_training']:.0%}"
        lines.append(f"  {'share of the round':<24}{share:>10}  that the link is busy")
    return "\n".join(lines)


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _big(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"
