"""Status: the same tree from anybody's records, and text that shows what is wrong."""

from spesd.cli.render import render_status
from spesd.daemon.status import RunView, swarm_status
from spesd.swarm.records import Claim, PeerRecord, PeerState

VIEW = RunView(run_id="r", name="demo", n_experts=4)


def record(peer: str, number: int, *experts: int, **values: object) -> PeerRecord:
    claims = tuple(Claim(expert=e, term=1, since=0.0) for e in experts)
    base: dict = {
        "run_id": "r", "peer_id": peer, "seq": 1, "time": 0.0, "expires": 1.0,
        "state": PeerState.TRAINING, "round": number, "claims": claims,
    }  # fmt: skip
    return PeerRecord(**{**base, **values})


def test_rounds_coverage_and_staleness_come_from_the_records() -> None:
    status = swarm_status(
        VIEW,
        [
            record("b", 7, 1, 2, global_tokens=500),
            record("a", 9, 0, 1, global_tokens=900),
            record("c", 9, 3, state=PeerState.OFFLINE),
            record("d", 50, 3, run_id="other"),
        ],
    ).to_json()
    assert status["run"] == {"name": "demo", "id": "r", "round": 9, "global_tokens": 900}
    assert [(p["id"], p["behind"]) for p in status["peers"]] == [("a", 0), ("b", 2)]
    assert status["coverage"] == 0.75
    experts = {e["id"]: e for e in status["experts"]}
    assert experts[1]["owners"] == ["a", "b"]
    assert (experts[1]["version"], experts[1]["staleness_rounds"]) == (8, 0)
    assert (experts[2]["version"], experts[2]["staleness_rounds"]) == (6, 2)
    assert (experts[3]["owners"], experts[3]["version"]) == ([], None)
    assert "me" not in status


def test_the_text_shows_health_and_orphans() -> None:
    tree = swarm_status(VIEW, [record("peer-a", 3, 0, 1, 3, health=("disk is full",))]).to_json()
    text = render_status(tree)
    assert "coverage 75%" in text
    assert "! disk is full" in text
    assert "without an owner: 2" in text
    assert "0-1,3" in text


def test_the_text_shows_the_held_out_loss_of_each_source() -> None:
    me = {"rounds": [], "val_by_source": {"plays": 2.5, "digits": None}}
    tree = swarm_status(VIEW, [record("peer-a", 3, 0)], me).to_json()
    assert "held-out by source: plays 2.500, digits -" in render_status(tree)
    me["val_by_source"] = {"plays": 2.5}  # one source's is the peer's own number
    assert "by source" not in render_status(swarm_status(VIEW, [], me).to_json())
