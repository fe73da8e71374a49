"""The lm-evaluation-harness on a checkpoint of ours: its own tasks, without a network."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers.tiny import make_trainer, tiny_config

from spesd.config import ModelConfig
from spesd.data.tokenizer import ByteTokenizer
from spesd.model.transformer import MoETransformer

pytest.importorskip("lm_eval")

CHOICE = """
task: toy_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
ROLLING = """
task: toy_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}}]
"""
UNTIL = """
task: toy_until
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "never"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
TEXT = "ROMEO. But soft, what light through yonder window breaks? It is the east. "


class Request(NamedTuple):
    args: tuple[Any, ...]


def in_its_own_process(home: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `spesd eval`: the harness warns, which this process would take for an error."""
    command = [sys.executable, "-m", "spesd.cli.main", "eval", str(home), *map(str, arguments)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(home / "hf")}
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    config = tiny_config()
    folder = home / "runs" / config.run_id
    folder.mkdir(parents=True)
    (folder / "run.json").write_bytes(config.canonical())
    trainer = make_trainer(config, folder, "a", (0, 1, 2, 3))
    for _ in range(100):
        trainer.step()
    trainer.checkpoint(1, trainer.tokens, 1, {})
    return home


def test_tasks_of_ones_own_run_without_a_network(home: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    row = {"question": "ROMEO. I see", "choices": ["#@~^", " the"], "answer": 1, "text": TEXT}
    rows.write_text((json.dumps(row) + "\n") * 5)
    for name, task in (("choice", CHOICE), ("rolling", ROLLING), ("until", UNTIL)):
        (tmp_path / f"{name}.yaml").write_text(task.format(rows=rows))
    tasks = ["--tasks", "toy_choice,toy_rolling,toy_until", "--task-path", tmp_path]
    answer = in_its_own_process(home, *tasks, "--limit", "4", "--json")
    assert answer.returncode == 0, answer.stderr
    tree = json.loads(answer.stdout)  # and nothing else is on stdout
    assert tree["limit"] == 4
    assert tree["tasks"]["toy_choice"]["acc"]["value"] == 1.0  # noise is less likely than a word
    assert tree["tasks"]["toy_choice"]["acc"]["higher_is_better"] is True
    assert tree["tasks"]["toy_until"]["exact_match"]["value"] == 0.0
    bits = tree["tasks"]["toy_rolling"]["bits_per_byte"]["value"]
    (tmp_path / "one.txt").write_text(TEXT)
    ours = in_its_own_process(home, "--data", tmp_path / "one.txt", "--json")
    counts = json.loads(ours.stdout)["total"]  # the same text, but with its end token
    assert bits == pytest.approx(counts["bits_per_byte"], abs=0.25)


def test_a_task_that_is_not_there_is_a_sentence(home: Path, tmp_path: Path) -> None:
    answer = in_its_own_process(home, "--tasks", "no_such_task", "--task-path", tmp_path)
    assert answer.returncode == 2 and "no_such_task" in answer.stderr
    assert "Traceback" not in answer.stderr and answer.stdout == ""
    (tmp_path / "choice.yaml").write_text(CHOICE.format(rows=tmp_path / "none.jsonl"))
    answer = in_its_own_process(home, "--tasks", "toy_choice", "--task-path", tmp_path)
    assert answer.returncode == 1 and "cannot be loaded" in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.filterwarnings("ignore")
def test_the_three_requests_are_answered_as_the_model_does() -> None:
    from spesd.train.harness import HarnessModel

    torch.set_num_threads(1)
    model = MoETransformer(ModelConfig(vocab_size=264, d_model=32, init_std=0.3))
    model.init_weights(0)
    words = ByteTokenizer()
    ours = HarnessModel(model, words, context=16)

    def plain(ids: list[int], last: int) -> float:
        with torch.no_grad():
            table = model(torch.tensor([ids[:-1]])).logits_BTV[0].log_softmax(-1)
        return float(table.gather(1, torch.tensor(ids[1:])[:, None])[-last:].sum())

    pairs = [Request(("To be", " or")), Request(("", "not")), Request(("a space ", "b"))]
    found = [logprob for logprob, _ in ours.loglikelihood(pairs)]
    wanted = [plain(words.encode("To be or"), 3), plain([256, *words.encode("not")], 3)]
    wanted.append(plain(words.encode("a space b"), 2))  # the space belongs to the word after it
    assert found == pytest.approx(wanted, rel=1e-5)
    rolled = ours.loglikelihood_rolling([Request(("abc",)), Request((TEXT,))])
    assert rolled[0] == pytest.approx(plain([256, *words.encode("abc")], 3), rel=1e-5)
    assert math.isfinite(rolled[1]) and rolled[1] < rolled[0]
    free, cut = ours.generate_until(
        [Request(("To be", {"max_gen_toks": 12})), Request(("To be", {"until": ["", "\n"]}))]
    )
    assert 0 < len(free) <= 12
    assert "\n" not in cut
    stop = free[3]
    (stopped,) = ours.generate_until([Request(("To be", {"until": stop, "max_gen_toks": 12}))])
    assert stopped == free[: free.index(stop)]
    drawn = {"do_sample": True, "temperature": 1.5, "max_gen_toks": 12}
    assert ours.generate_until([Request(("To be", drawn))]) == ours.generate_until(
        [Request(("To be", drawn))]
    )
