"""A peer's home: every profile loads, every compose file and unit runs a command that exists."""

import configparser
import re
import shlex
import tomllib
from pathlib import Path

import click
import pytest
import yaml

from spesd.cli.main import cli
from spesd.config import run_config_from_toml
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


def spesd_words(command: list[str], entrypoint: list[str] | None) -> list[str]:
    """Return a service's spesd arguments, with ADDR for what is known only at run time."""
    if entrypoint is None:
        return [re.sub(r"^\$\{BOOTSTRAP:\?.*\}$", "ADDR", word) for word in command]
    assert entrypoint == ["sh", "-c"] and len(command) == 1
    # in a compose file $$ is a dollar sign; `exec` lets a stop reach spesd itself
    line = re.sub(r'"\$\$\(.*?\)"', "ADDR", command[0]).partition(" > ")[0]
    words = shlex.split(line)
    assert words[:2] == ["exec", "spesd"], words
    return words[2:]


@pytest.mark.parametrize("path", COMPOSE, ids=lambda p: p.stem)
def test_a_compose_file_runs_commands_that_exist(path: Path) -> None:
    tree = yaml.safe_load(path.read_text())
    volumes = set(tree["volumes"])
    for service in tree["services"].values():
        accepted(spesd_words(service["command"], service.get("entrypoint")))
        targets = [volume.split(":")[1:2] or [volume] for volume in service["volumes"]]
        assert ["/var/lib/spesd"] in targets
        for source in (v.split(":")[0] for v in service["volumes"] if ":" in v):
            assert source in volumes or (path.parent / source).exists(), source
        if "build" in service:
            build = service["build"]
            context = build if isinstance(build, str) else build["context"]
            assert (path.parent / context / "Dockerfile").exists()


@pytest.mark.parametrize("path", COMPOSE, ids=lambda p: p.stem)
def test_a_container_may_do_little_and_has_time_to_leave(path: Path) -> None:
    for service in yaml.safe_load(path.read_text())["services"].values():
        assert service["restart"] == "unless-stopped"
        assert int(service["stop_grace_period"].rstrip("s")) >= 12
        assert service["init"] is True
        assert service["read_only"] is True and service["tmpfs"] == ["/tmp"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["cap_drop"] == ["ALL"]


def test_there_are_compose_files_for_each_way_to_run() -> None:
    assert {p.stem for p in COMPOSE} == {"peer", "peer-cuda", "bootstrap", "local-swarm"}
    cuda = yaml.safe_load((ROOT / "peers" / "compose" / "peer-cuda.yaml").read_text())
    (device,) = cuda["services"]["peer"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"] and len(device["device_ids"]) == 1


def test_the_local_swarm_has_the_peers_that_its_run_waits_for() -> None:
    tree = yaml.safe_load((ROOT / "peers" / "compose" / "local-swarm.yaml").read_text())
    peers = 1 + tree["services"]["volunteer"]["deploy"]["replicas"]
    run = run_config_from_toml(ROOT / "examples" / "demo.toml")
    assert run.swarm.min_peers == peers


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


@pytest.mark.parametrize("path", UNITS, ids=lambda p: p.stem)
def test_each_setting_that_limits_a_unit_has_its_reason(path: Path) -> None:
    limits = re.compile(r"^(Protect|Private|Restrict|NoNew|Capability|Lock|SystemCall|Dynamic)")
    explained = False
    for line in path.read_text().splitlines():
        if line.startswith("#"):
            explained = True
        elif not line.strip() or line.startswith("["):
            explained = False
        elif limits.match(line):
            assert explained, f"{path.name}: {line} has no comment above it"
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.read(path)
    assert unit["Service"]["NoNewPrivileges"] == "yes"
    assert unit["Service"]["ProtectSystem"] == "strict"


def test_the_list_of_meeting_points_is_a_list() -> None:
    tree = tomllib.loads((ROOT / "peers" / "bootstrap.toml").read_text())
    assert set(tree) == {"runs"}
    for run in tree["runs"]:
        assert set(run) == {"name", "run_id", "addresses"}
        assert all(re.search(r"/p2p/\w+$", address) for address in run["addresses"])


def test_every_file_here_is_named_in_a_readme() -> None:
    home = ROOT / "peers"
    text = " ".join(page.read_text() for page in home.rglob("README.md"))
    for path in (*COMPOSE, *UNITS, home / "bootstrap.toml"):
        assert path.name in text, path


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
