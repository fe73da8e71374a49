"""The plan of a peer: memory it will use, bytes it will move, and refusals in a sentence."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from spesd.cli.main import cli
from spesd.config import RunConfig, run_config_from_toml
from spesd.errors import ConfigError, UsageError
from spesd.peerconfig import PeerConfig, parse_rate
from spesd.plan import Link, Swarm, peer_plan, traffic
from spesd.presets import preset_toml

GPU = PeerConfig(device="cuda:0")


def run_of(preset: str, folder: Path) -> RunConfig:
    path = folder / f"{preset}.toml"
    path.write_text(preset_toml(preset))
    return run_config_from_toml(path)


def test_a_round_moves_what_is_fetched_from_partners_and_owners(tmp_path: Path) -> None:
    run = run_of("1b", tmp_path)
    shared, expert = 261.5e6, 56.6e6
    # four peers, each expert with one owner: shared from three, twelve experts once, in bf16
    one_owner = traffic(run, 4, 4)
    assert one_owner["down"] == one_owner["up"]
    assert one_owner["down"] == pytest.approx(2 * (3 * shared + 12 * expert), rel=1e-3)
    # two owners: each foreign expert comes from both, each own one from the co-owner
    assert traffic(run, 8, 4)["down"] == pytest.approx(
        2 * (3 * shared + 16 * expert + 8 * expert), rel=1e-3
    )
    assert traffic(run, 16, 1) == {"down": 0, "up": 0}


def test_links_and_speed_give_the_share_of_a_round(tmp_path: Path) -> None:
    run = run_of("1b", tmp_path)
    link = Link(up=20_000_000, down=100_000_000)
    swarm = Swarm(peers=4, tokens_per_s=10_000.0)
    found = peer_plan(run, PeerConfig(device="cuda:0", own=4), None, link, swarm)["round"]
    assert found["tokens"] == 100 * 2048 * 8
    assert found["training_s"] == pytest.approx(163.84)
    assert found["link_s"]["up"] == pytest.approx(8 * found["bytes"]["up"] / 20e6)
    assert found["share_of_training"] == pytest.approx(found["link_s"]["up"] / 163.84)
    unknown = peer_plan(run, GPU, None, Link(), Swarm(peers=4))["round"]
    assert unknown["share_of_training"] is None and unknown["speed_is_assumed"]


def test_components_add_up_to_the_peak(tmp_path: Path) -> None:
    found = peer_plan(run_of("small", tmp_path), GPU, 10**10, Link(), Swarm(peers=2))["memory"]
    parts = {k: v for k, v in found.items() if k not in ("peak", "budget")}
    lasting = sum(parts[k] for k in ("frozen_weights", "trained_weights", "moments", "overhead"))
    passing = parts["activations"] + parts["logits"]
    assert found["peak"] == lasting + max(passing, parts["gradients"])


@pytest.mark.parametrize(("preset", "budget"), [("7b", "24GB"), ("9b", "8GB"), ("1b", "1GB")])
def test_what_does_not_fit_is_refused_with_what_it_needs(
    preset: str, budget: str, tmp_path: Path
) -> None:
    run = run_of(preset, tmp_path)
    with pytest.raises(UsageError, match="does not fit into"):
        peer_plan(run, GPU, int(budget[:-2]) * 10**9, Link(), Swarm(peers=4))


def test_eight_bit_moments_bring_the_7b_to_a_24_gb_card(tmp_path: Path) -> None:
    run = run_of("7b", tmp_path)
    peer = PeerConfig(device="cuda:0", moments="int8")
    found = peer_plan(run, peer, 24 * 10**9, Link(), Swarm(peers=4))
    assert found["layout"]["own"] >= 2 and found["memory"]["peak"] <= 24 * 10**9


def test_the_command_prints_text_and_json(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(preset_toml("small"))
    common = ["plan", str(path), "--device", "cpu", "--home", str(tmp_path / "none")]
    link = ["--uplink", "20Mbit", "--downlink", "100Mbit", "--peers", "8"]
    text = CliRunner().invoke(cli, [*common, *link], catch_exceptions=False)
    assert "peak" in text.output and "share of the round" in text.output
    found = CliRunner().invoke(cli, [*common, *link, "--json", "--own", "3"])
    plan = json.loads(found.output)
    assert plan["layout"]["own"] == 3 and plan["round"]["peers"] == 8
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--uplink", "20"], "no unit"),
        (["--uplink", "0Mbit"], "not above 0"),
        (["--downlink", "fast"], "not a rate"),
        (["--own", "99"], "99"),
        (["--vram", "10MB"], "does not fit"),
    ],
)
def test_wrong_use_is_one_sentence(arguments: list[str], words: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(preset_toml("tiny"))
    command = [sys.executable, "-m", "spesd.cli.main", "plan", str(path), "--device", "cpu"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert words in done.stderr and done.stderr.count("\n") == 1 and done.stdout == ""


def test_planning_imports_no_torch() -> None:
    code = "import sys, spesd.cli.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_rates_have_units() -> None:
    assert parse_rate("20Mbit") == 20_000_000
    assert parse_rate("1.5 gbit/s") == 1_500_000_000
    for text in ("20", "-1Mbit", "0kbit", "20MB", "", "Mbit"):
        with pytest.raises(ConfigError):
            parse_rate(text)
