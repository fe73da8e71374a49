"""A peer's home: every profile loads, every compose file and unit runs a command that exists."""

import configparser
import re
import shlex
from pathlib import Path

import click
import pytest
import yaml

from spesd.cli.main import cli
from spesd.peerconfig import parse_bytes, peer_config, profiles

ROOT = Path(__file__).parents[1]
COMPOSE = sorted((ROOT / "peers" / "compose").glob("*.yaml"))
UNITS = sorted((ROOT / "peers" / "systemd").glob("*.service"))


def accepted(words: list[str]) -> None:
    """Parse a spesd command line as click would, without running it."""
    with click.Context(cli) as parent:
        command = cli.get_command(parent, words[0])
        assert command is not None, words
        command.make_context(words[0], list(words[1:]), parent=parent)


@pytest.mark.parametrize("name", list(profiles()))
def test_a_profile_loads_and_leaves_room_on_its_card(name: str, tmp_path: Path) -> None:
    config = peer_config(tmp_path, name, {})
    if name != "cpu":
        assert parse_bytes(config.vram) < parse_bytes(name.upper())


@pytest.mark.parametrize("path", COMPOSE, ids=lambda p: p.stem)
def test_a_compose_file_runs_a_command_that_exists(path: Path) -> None:
    tree = yaml.safe_load(path.read_text())
    for service in tree["services"].values():
        accepted([w if not w.startswith("${") else "ADDR" for w in service["command"]])
        assert service["restart"] == "unless-stopped"
        assert service["volumes"] == ["spesd:/var/lib/spesd"]
        assert int(service["stop_grace_period"].rstrip("s")) >= 12
        assert service["security_opt"] == ["no-new-privileges:true"]


@pytest.mark.parametrize("path", UNITS, ids=lambda p: p.stem)
def test_a_unit_runs_a_command_that_exists_and_ends_it_whole(path: Path) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(path)
    service = unit["Service"]
    words = shlex.split(service["ExecStart"].replace("${BOOTSTRAP}", "ADDR"))
    assert words[0].endswith("/spesd")
    accepted(words[1:])
    assert service["KillMode"] == "mixed" and int(service["TimeoutStopSec"]) >= 12
    assert service["Restart"] == "on-failure"


def test_the_dockerfile_is_unprivileged_and_copies_what_there_is() -> None:
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    last = text[text.rindex("\nFROM ") :]
    assert re.search(r"^USER spesd$", last, re.M)
    assert re.search(r'^ENTRYPOINT \["spesd"\]$', last, re.M)
    assert "VOLUME /var/lib/spesd" in last and "SPESD_HOME=/var/lib/spesd" in last
    health = re.search(r"HEALTHCHECK .*CMD (\[.*\])", last)
    assert health
    words = yaml.safe_load(health[1])
    assert words[0] == "spesd"
    accepted(words[1:])
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.M):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
