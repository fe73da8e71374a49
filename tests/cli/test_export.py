"""`spesd export`: what stock transformers makes of the folder, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from helpers.models import CLASSES, SHAPES, checkpoint, ids, shaped
from helpers.swarm import spesd
from helpers.tiny import tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from spesd.checkpoint import export
from spesd.checkpoint.load import load_model
from spesd.cli.files import export_checkpoint
from spesd.data.bytes_json import byte_tokenizer_json
from spesd.data.tokenizer import ByteTokenizer, FileTokenizer
from spesd.errors import DamagedState, UsageError


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", SHAPES)
def test_stock_transformers_loads_it_with_equal_bits(kind: str, dtype: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, shaped(kind))
    out = export_checkpoint(folder, tmp_path / "hf", dtype)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    assert type(theirs).__name__ == CLASSES[kind]
    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    assert theirs.dtype == wanted
    loaded = load_model(folder)
    with torch.no_grad():
        ours = loaded.model.to(wanted)(ids()).logits_BTV
        assert torch.equal(ours, theirs(input_ids=ids()).logits)
    model, config = loaded.run.model, theirs.config
    assert config.rms_norm_eps == model.rms_eps
    assert config.rope_parameters["rope_theta"] == model.rope_theta
    assert (config.eos_token_id, config.bos_token_id, config.pad_token_id) == (256, None, None)
    assert theirs.generation_config.eos_token_id == 256
    assert getattr(config, "norm_topk_prob", True) is model.norm_topk_prob


def test_several_files_and_their_index_are_loaded_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path)
    monkeypatch.setattr(export, "FILE_BYTES", 40_000)
    out = export_checkpoint(folder, tmp_path / "hf", "fp32")
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 1
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    with torch.no_grad():
        ours = load_model(folder).model(ids()).logits_BTV
        assert torch.equal(ours, theirs(input_ids=ids()).logits)


def test_the_byte_tokenizer_comes_with_it(tmp_path: Path) -> None:
    out = export_checkpoint(checkpoint(tmp_path), tmp_path / "hf", "fp32")
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    ours = ByteTokenizer()
    for text in ("", "KING. ", "naïve 日本語 🎻\r\n\t\x00", "a<|endoftext|>b", " two  spaces "):
        assert theirs.encode(text) == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
    assert theirs.eos_token_id == ours.eos_id
    assert theirs.model_max_length == 32


@pytest.fixture(scope="module")
def byte_file(tmp_path_factory: pytest.TempPathFactory) -> FileTokenizer:
    path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    path.write_bytes(byte_tokenizer_json())
    return FileTokenizer(path)


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_the_byte_file_gives_the_bytes_of_any_text(byte_file: FileTokenizer, text: str) -> None:
    ours = ByteTokenizer()
    if "<|endoftext|>" not in text:
        assert byte_file.encode(text) == ours.encode(text)
    assert byte_file.decode(ours.encode(text)) == ours.decode(ours.encode(text))


def test_a_damaged_bundle_leaves_nothing(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    manifest = next((folder / "checkpoints").glob("*.json"))
    part = json.loads(manifest.read_text())["body"]["parts"][-1]
    bundle = folder / "bundles" / f"{part['digest']}.safetensors"
    bundle.write_bytes(bundle.read_bytes()[:-1] + b"x")
    before = set(tmp_path.iterdir())
    with pytest.raises(DamagedState):
        export_checkpoint(manifest, tmp_path / "hf", "fp32")
    assert set(tmp_path.iterdir()) == before


def test_what_no_stock_class_computes_is_refused(tmp_path: Path) -> None:
    run = tiny_config(model={"qk_norm": "none"})
    with pytest.raises(UsageError, match="norm_topk_prob = true"):
        export_checkpoint(checkpoint(tmp_path, run), tmp_path / "hf", "fp32")
    assert not (tmp_path / "hf").exists()


def test_transformers_is_not_needed(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, steps=1)
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "transformers.py").write_text("raise ImportError('not here')\n")
    import os
    import subprocess
    import sys

    command = [sys.executable, "-m", "spesd.cli.main", "export", str(folder), str(tmp_path / "hf")]
    path = os.pathsep.join([str(hidden), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert done.returncode == 0, done.stderr
    refused = spesd("export", folder, tmp_path / "hf")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
