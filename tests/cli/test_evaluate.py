"""`spesd eval`: numbers that a reader can check, and one sentence for what is wrong."""

import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.swarm import spesd
from helpers.tiny import make_trainer, tiny_config

from spesd.cli import evaluate as command
from spesd.cli.main import cli
from spesd.data.stream import TextStream
from spesd.data.tokenizer import ByteTokenizer
from spesd.errors import SpesdError

Run = Callable[..., str]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home whose peer has trained a little."""
    torch.set_num_threads(1)
    home = tmp_path_factory.mktemp("home")
    config = tiny_config()
    folder = home / "runs" / config.run_id
    folder.mkdir(parents=True)
    (folder / "run.json").write_bytes(config.canonical())
    trainer = make_trainer(config, folder, "a", (0, 1, 2, 3))
    for _ in range(60):
        trainer.step()
    trainer.checkpoint(7, trainer.tokens, 1, {})
    return home


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process; return what it printed."""

    def run(*arguments: Any) -> str:
        cli.main(["eval", *map(str, arguments)], standalone_mode=False)
        return capsys.readouterr().out

    return run


def test_the_held_out_text_of_the_run_is_measured(home: Path, run: Run) -> None:
    tree = json.loads(run(home, "--json", "--device", "cpu"))
    assert (tree["round"], tree["context"], tree["data"]) == (7, 32, "held-out")
    counts = tree["sources"]["builtin"]
    config = tiny_config()
    stream = TextStream(config.data, ByteTokenizer(), seed=config.seed, peer_id="b")
    texts = list(stream.held_out_texts()["builtin"])
    assert counts["bytes"] == sum(len(t.encode()) for t in texts) > 10_000
    assert counts["tokens"] == counts["bytes"] + len(texts)
    assert tree["total"] == counts
    assert 1.5 < counts["nats_per_token"] < math.log(257)  # it has learned something
    assert counts["perplexity"] == pytest.approx(math.exp(counts["nats_per_token"]))
    text = run(home)
    assert f"{counts['nats_per_token']:.4f}" in text
    assert f"{counts['tokens']:,}" in text and "round 7" in text and "builtin" in text


def test_ones_own_text_is_measured_file_by_file(home: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("ROMEO. But soft, what light through yonder window?\n" * 9)
    noise = "".join(json.dumps({"body": "#@~^%$" * 40}) + "\n" for _ in range(3))
    (tmp_path / "noise.jsonl").write_text(noise)
    data = ["--data", tmp_path / "*.txt", "--data", tmp_path / "noise.jsonl", "--field", "body"]
    tree = json.loads(run(home, *data, "--json"))
    plain, noise = tree["sources"].values()
    assert list(tree["sources"]) == [str(tmp_path / "*.txt"), str(tmp_path / "noise.jsonl")]
    assert plain["bits_per_byte"] < noise["bits_per_byte"] - 1
    assert noise["bytes"] == 3 * 240 and noise["tokens"] == 3 * 241
    assert tree["total"]["tokens"] == plain["tokens"] + noise["tokens"]
    assert tree["data"] == "given"
    text = run(home, *data)
    assert "in all" in text and "noise.jsonl" in text
    few = json.loads(run(home, *data, "--max-tokens", 100, "--json"))
    assert [c["tokens"] for c in few["sources"].values()] == [100, 100]


def test_a_source_that_this_machine_has_elsewhere_is_found(tmp_path: Path, run: Run) -> None:
    here = tmp_path / "books.jsonl"
    here.write_text("".join(f'{{"text": "number {n}"}}\n' for n in range(200)))
    source = {"kind": "jsonl", "path": str(tmp_path / "gone.jsonl"), "name": "books"}
    config = tiny_config(data={"sources": [source, {"name": "plays"}]})
    folder = tmp_path / "runs" / config.run_id
    folder.mkdir(parents=True)
    (folder / "run.json").write_bytes(config.canonical())
    (tmp_path / "gone.jsonl").write_text(here.read_text())
    make_trainer(config, folder, "a", (0, 1, 2, 3)).checkpoint(0, 0, 1, {})
    (tmp_path / "gone.jsonl").unlink()
    with pytest.raises(SpesdError, match=r"data\.books = .* in HOME/peer\.toml"):
        run(tmp_path)
    (tmp_path / "peer.toml").write_text(f'[data]\nbooks = "{here}"\n')
    assert list(json.loads(run(tmp_path, "--json"))["sources"]) == ["books", "plays"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--data", "none.txt"], 1, "no file 'none.txt'"),
        (["--data", "empty.txt"], 1, "empty.txt"),
        (["--data", "row.jsonl"], 2, "--field"),
        (["--device", "tpu"], 2, "device is 'tpu'"),
        (["--device", "cuda:99"], 1, "cuda:99"),
        (["--limit", "3"], 2, "--limit goes with --tasks"),
        (["--task-path", "x"], 2, "--task-path goes with --tasks"),
        (["--tasks", "x", "--data", "row.jsonl"], 2, "their own text"),
    ],
)
def test_wrong_wishes_are_sentences(
    home: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    arguments: list[str], code: int, says: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "row.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(SpesdError) as error:
        run(home, *arguments)
    assert says in str(error.value) and error.value.exit_code == code


def test_what_is_no_whole_checkpoint_is_a_sentence_without_a_traceback(tmp_path: Path) -> None:
    answer = spesd("eval", tmp_path / "nowhere")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "is no checkpoint" in answer.stderr and len(answer.stderr.splitlines()) == 1
    config = tiny_config()
    folder = tmp_path / "runs" / config.run_id
    folder.mkdir(parents=True)
    (folder / "run.json").write_bytes(config.canonical())
    make_trainer(config, folder, "a", (0, 1, 2, 3)).checkpoint(0, 0, 1, {})
    for bundle in (folder / "bundles").iterdir():
        bundle.write_bytes(bundle.read_bytes()[:-1] + b"!")
    answer = spesd("eval", tmp_path)
    assert (answer.returncode, answer.stdout) == (1, "")
    assert "damaged" in answer.stderr and len(answer.stderr.splitlines()) == 1


def test_without_the_extra_tasks_tell_how_to_install_it(
    home: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SpesdError, match=r'pip install "spesd\[eval\]"'):
        run(home, "--tasks", "anything")
    assert importlib.util.find_spec("spesd") is None  # it was asked, and nothing was imported
