"""Status as plain text: no meaning in colour, one line a peer."""

from typing import Any


def render_status(tree: dict[str, Any]) -> str:
    """Return the status as text."""
    run = tree["run"]
    lines = [
        f"run {run['name']} ({run['id'][:8]})  round {run['round']}  "
        f"tokens {run['global_tokens']:,}  coverage {tree['coverage']:.0%}",
        "",
        f"{'peer':10} {'state':9} {'round':>5} {'behind':>6} {'owns':14} {'steps':>7} "
        f"{'tok/s':>8} {'loss':>7} {'held-out':>8} {'address':9}",
    ]
    for peer in tree["peers"]:
        lines.append(
            f"{peer['id'][-8:]:10} {peer['state']:9} {peer['round']:>5} {peer['behind']:>6} "
            f"{_owned(peer['owns']):14} {peer['steps']:>7} {peer['tokens_per_s']:>8.0f} "
            f"{_number(peer['loss']):>7} {_number(peer['val_loss']):>8} {peer['addr_kind']:9}"
        )
        lines.extend(f"{'':10} ! {sentence}" for sentence in peer["health"])
    orphans = [e["id"] for e in tree["experts"] if not e["owners"]]
    if orphans:
        lines += ["", f"experts without an owner: {_owned(orphans)}"]
    me = tree.get("me")
    if me and len(by_source := me.get("val_by_source", {})) > 1:
        each = ", ".join(f"{name} {_number(loss)}" for name, loss in by_source.items())
        lines += ["", f"held-out by source: {each}"]
    if me and me["rounds"]:
        last = me["rounds"][-1]
        seconds = ", ".join(f"{k} {v:.1f}" for k, v in last["seconds"].items())
        lines += [
            "",
            f"last round {last['round']}: closed by {last['closed_by']}; {last['offers']} offers; "
            f"seconds: {seconds}; bytes up {last['bytes']['up']:,}, down "
            f"{last['bytes']['down']:,}",
        ]
        lines.extend(f"  missed: {m}" for m in last["missed"])
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _owned(experts: list[int]) -> str:
    """Write 0,1,2,3,7 as 0-3,7."""
    spans: list[list[int]] = []
    for expert in experts:
        if spans and expert == spans[-1][1] + 1:
            spans[-1][1] = expert
        else:
            spans.append([expert, expert])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans) or "-"
