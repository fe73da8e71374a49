"""The learning benchmark: its ways cost what they claim and train by the code of the product."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spesd.bench import learning
from spesd.bench.schemes import (
    ALONE,
    CENTRAL,
    FEDAVG,
    OURS,
    REFERENCE,
    World,
    layout_of,
    make,
    measure,
    run_config,
    state_bytes,
)
from spesd.bench.texts import TEXTS, write_domains
from spesd.bench.virtual import VirtualSwarm, spread
from spesd.model.partition import part_values

SHORT = World(peers=2, steps=4)
PLAIN = replace(OURS, share=1.0, moments8=False, frozen="fp32", wire="fp32", local_steps=2)


def parts_of(swarm: VirtualSwarm, peer: int, part: str) -> torch.Tensor:
    values = part_values(swarm.peers[peer].model, part)
    return torch.cat([values[name].flatten() for name in sorted(values)])


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_falls_into_distinct_domains(text: str, tmp_path: Path) -> None:
    sources = write_domains(text, 4, tmp_path)
    contents = [set(Path(s.path).read_text().splitlines()) for s in sources]
    assert all(sum(map(len, lines)) > 400_000 for lines in contents)
    assert not any(a & b for i, a in enumerate(contents) for b in contents[:i])


def test_experts_are_spread_evenly_over_owners() -> None:
    owned = spread(4, 16, 11)
    owners = [sum(e in mine for mine in owned) for e in range(16)]
    assert all(len(set(mine)) == 11 for mine in owned)
    assert max(owners) - min(owners) <= 1
    assert spread(4, 16, 4) == [tuple(range(i, i + 4)) for i in (0, 4, 8, 12)]


@pytest.mark.parametrize("peers", [4, 8])
def test_ours_owns_more_than_the_reference_in_no_more_bytes(peers: int) -> None:
    run = run_config(World(peers=peers), run_sources(), OURS)
    theirs, ours = (layout_of(s, run, peers) for s in (REFERENCE, OURS))
    assert theirs.k == 16 // peers
    assert ours.k > theirs.k
    assert state_bytes(run, ours) <= state_bytes(run, theirs)


def run_sources() -> tuple:
    from spesd.config import SourceConfig

    return (SourceConfig(),)


def test_after_a_merge_shared_parts_and_adopted_experts_are_alike(tmp_path: Path) -> None:
    swarm = make(PLAIN, SHORT, tmp_path, VirtualSwarm)
    swarm.run_round(2)
    for part in ("shared", "expert-0", "expert-15"):
        assert torch.allclose(parts_of(swarm, 0, part), parts_of(swarm, 1, part), rtol=0, atol=1e-6)
    assert swarm.fetched_bytes == swarm.sent_bytes > 0
    assert not list((tmp_path / "bundles").glob("*.safetensors"))


def test_alone_and_central_exchange_nothing_and_see_the_tokens_they_should(tmp_path: Path) -> None:
    alone = make(ALONE, SHORT, tmp_path, VirtualSwarm)
    central = make(CENTRAL, SHORT, tmp_path, VirtualSwarm)
    for swarm in (alone, central):
        swarm.run_round(2)
        assert swarm.sent_bytes == swarm.fetched_bytes == 0
    # both schedules are where a swarm of two would be; only the central run trained on all of it
    assert alone.tokens == central.tokens == 2 * 2 * 512
    assert alone.peers[0].tokens == 2 * 512
    assert central.peers[0].tokens == 2 * 2 * 512


def test_a_peer_of_one_domain_trains_on_it_and_is_judged_on_all(tmp_path: Path) -> None:
    swarm = make(FEDAVG, replace(SHORT, mixed=False), tmp_path, VirtualSwarm)
    names = [[s.name for s in p.config.data.sources] for p in swarm.peers]
    assert names == [["domain-0"], ["domain-1"]]
    assert len(swarm.config.data.sources) == 2


def test_the_same_cell_twice_gives_the_same_loss() -> None:
    first, second = (measure(PLAIN, SHORT) for _ in range(2))
    assert first["loss"] == second["loss"]
    assert 4.0 < first["loss"] < 6.0  # near ln 264: nothing is learnt in four steps


@pytest.mark.e2e  # minutes on a busy machine
def test_the_table_has_a_row_for_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "WORKERS", 1)
    result = learning.run(quick=True)
    (block,) = result["blocks"]
    rows = {row["scheme"]: row for row in block["rows"]}
    assert list(rows) == [s.name for s in learning.SCHEMES]
    assert rows["alone"]["closed"] == 0.0
    assert rows["central"]["closed"] == 1.0
    assert rows["SPES, as the reference"]["of_reference"] == 1.0
    assert all(f"| {name} |" in learning.table(result) for name in rows)
