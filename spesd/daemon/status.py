"""One Status behind text, JSON and `--watch`: made from peers' records alone.

Anyone who can read the DHT sees the same swarm; only `me` needs the local daemon.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from spesd.swarm.lease import coverage, leases
from spesd.swarm.records import PeerRecord, PeerState


@dataclass(frozen=True, kw_only=True)
class RunView:
    """What a status must know of the run."""

    run_id: str
    name: str
    n_experts: int


@dataclass(frozen=True, kw_only=True)
class Status:
    """The swarm as one observer sees it; `spesd status --json` is this, and stable."""

    run: dict[str, Any]
    peers: list[dict[str, Any]]
    experts: list[dict[str, Any]]
    coverage: float
    me: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the documented JSON tree."""
        tree = asdict(self)
        if self.me is None:
            del tree["me"]
        return tree


def swarm_status(
    run: RunView, records: Iterable[PeerRecord], me: dict[str, Any] | None = None
) -> Status:
    """Build the status from the records of the peers that are not gone."""
    here = sorted(
        (r for r in records if r.run_id == run.run_id and r.state is not PeerState.OFFLINE),
        key=lambda r: r.peer_id,
    )
    newest = max((r.round for r in here), default=0)
    held = leases(here, run.n_experts)
    rounds = {r.peer_id: r.round for r in here}
    experts = []
    for expert in range(run.n_experts):
        lease = held.get(expert)
        # an owner in round r has merged round r - 1: that is the newest version there is
        version = max((rounds[p] - 1 for p in lease.owners), default=0) if lease else None
        experts.append(
            {
                "id": expert,
                "owners": list(lease.owners) if lease else [],
                "version": None if version is None else max(version, 0),
                "staleness_rounds": None if version is None else max(newest - 1 - version, 0),
            }
        )
    return Status(
        run={
            "name": run.name,
            "id": run.run_id,
            "round": newest,
            "global_tokens": max((r.global_tokens for r in here), default=0),
        },
        peers=[_peer(record, newest) for record in here],
        experts=experts,
        coverage=coverage(held, run.n_experts),
        me=me,
    )


def _peer(record: PeerRecord, newest: int) -> dict[str, Any]:
    return {
        "id": record.peer_id,
        "state": str(record.state),
        "round": record.round,
        "owns": list(record.owns),
        "steps": record.steps,
        "tokens": record.tokens,
        "tokens_per_s": round(record.tokens_per_s, 1),
        "loss": record.loss,
        "val_loss": record.val_loss,
        "behind": max(newest - record.round, 0),
        "addr_kind": record.addr_kind,
        "addresses": list(record.addresses),
        "version": record.version,
        "health": list(record.health),
    }
