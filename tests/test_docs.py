"""The documents are true: the table is the code's, commands and settings are all described."""

import re
from pathlib import Path

from helpers.docs import with_table

from spesd.cli.main import cli

ROOT = Path(__file__).parents[1]


def test_the_round_table_is_the_codes() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    assert with_table(page) == page, "run `make docs`"


def test_the_readme_names_every_command_and_no_other() -> None:
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"(?:^|`)spesd ([a-z]+)", text, re.M)) - {"pretrains"}
    assert set(cli.commands) <= named
    assert named <= set(cli.commands), named - set(cli.commands)


def test_the_options_are_few_and_pinned() -> None:
    options = {
        name: sorted(p.opts[-1] for p in command.params if p.param_type_name == "option")
        for name, command in cli.commands.items()
    }
    machine = ["--bootstrap", "--device", "--home", "--listen", "--own", "--profile", "--vram"]
    assert options == {
        "new": ["--output", "--preset", "--scale"],
        "plan": [
            "--device",
            "--downlink",
            "--home",
            "--json",
            "--own",
            "--peers",
            "--profile",
            "--speed",
            "--uplink",
            "--vram",
        ],
        "start": machine,
        "join": sorted([*machine, "--run"]),
        "status": ["--bootstrap", "--home", "--json", "--run", "--watch"],
        "leave": ["--home"],
        "pause": ["--home"],
        "resume": ["--home"],
        "bootstrap": ["--bootstrap", "--home", "--listen"],
        "generate": ["--prompt", "--seed", "--temperature", "--tokens", "--top-p"],
        "eval": [
            "--data",
            "--device",
            "--field",
            "--json",
            "--limit",
            "--max-tokens",
            "--task-path",
            "--tasks",
        ],
        "bench": ["--json", "--output", "--quick", "--size"],
        "export": ["--dtype"],
        "import": [
            "--experts",
            "--noise-fraction",
            "--noise-std",
            "--router-init",
            "--router-std",
            "--seed",
            "--top-k",
            "--upcycle",
        ],
    }


def test_the_wire_specification_names_every_message() -> None:
    spec = (ROOT / "proto" / "README.md").read_text()
    for path in (ROOT / "proto").rglob("*.proto"):
        for message in re.findall(r"^message (\w+)", path.read_text(), re.M):
            assert message in spec, message
