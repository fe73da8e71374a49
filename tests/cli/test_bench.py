"""The command bench, as a user types it."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from spesd.cli.main import cli
from spesd.errors import UsageError


@pytest.mark.e2e  # minutes on a busy machine
def test_the_step_benchmark_prints_its_table_and_writes_its_json(tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    done = CliRunner().invoke(cli, ["bench", "step", "--quick", "-o", str(out)])
    assert done.exit_code == 0, done.output
    result = json.loads(out.read_text())
    rows = {(r["precision"], r["what"]): r for r in result["rows"]}
    assert len(rows) == 8
    assert all(row["best_ms"] > 0 for row in rows.values())
    assert rows["fp32", "transformers"]["speedup"] == 1.0
    assert "| fp32 | ours, k = 4 |" in done.output


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["learning", "--size", "41M"], "leave --size out"),
        (["step", "-o", "nowhere/step.json"], "there is no folder nowhere"),
    ],
)
def test_a_wrong_use_is_one_sentence_before_anything_runs(given: list[str], says: str) -> None:
    done = CliRunner().invoke(cli, ["bench", *given])
    assert isinstance(done.exception, UsageError)
    assert says in str(done.exception)
