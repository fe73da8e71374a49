"""`spesd import`: what it makes of a model, and each wrong input in one sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import SHAPES, checkpoint, dense_model, ids, shaped
from helpers.swarm import spesd
from safetensors.torch import load_file, save_file

from spesd.checkpoint.load import find_checkpoint, load_model
from spesd.checkpoint.weights import verify
from spesd.cli.files import export_checkpoint
from spesd.cli.importing import UPCYCLE, import_model
from spesd.config import run_config_from_toml
from spesd.data.bytes_json import byte_tokenizer_json
from spesd.errors import DamagedState


def imported(model: Path, out: Path, **options: Any) -> Path:
    import_model(model, out, **{"upcycle": False, **dict.fromkeys(UPCYCLE), **options})
    return out


def hf(folder: Path, model: Any, **saving: Any) -> Path:
    """A dense model as transformers saves it, with the byte tokenizer."""
    model.save_pretrained(folder, **saving)
    (folder / "tokenizer.json").write_bytes(byte_tokenizer_json())
    return folder


@pytest.mark.parametrize("kind", SHAPES)
def test_export_and_import_give_the_same_bytes(kind: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, shaped(kind))
    out = imported(export_checkpoint(folder, tmp_path / "hf", "fp32"), tmp_path / "in")
    before, after = find_checkpoint(folder), find_checkpoint(out)
    assert [p.digest for p in before.checkpoint.parts] == [p.digest for p in after.checkpoint.parts]
    assert before.run.model == after.run.model
    run = run_config_from_toml(out / "run.toml")
    assert (run.tokenizer.kind, run.data.seq_len) == ("bytes", before.run.data.seq_len)
    assert verify(out / "weights", run.model, run.start.digest).digest == run.start.digest
    again = export_checkpoint(out, tmp_path / "again", "fp32")
    name = "model.safetensors"
    assert (again / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


def test_bf16_stays_bf16_and_fp16_is_widened(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    half = export_checkpoint(folder, tmp_path / "bf16", "bf16")
    logits = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        source = tmp_path / name
        if name == "fp16":
            source.mkdir()
            (source / "config.json").write_bytes((half / "config.json").read_bytes())
            tensors = load_file(half / "model.safetensors")
            save_file({k: t.to(dtype) for k, t in tensors.items()}, source / "model.safetensors")
        out = imported(source, tmp_path / f"in-{name}")
        kept = load_file(next((out / "weights").glob("*.safetensors")))
        wanted = torch.bfloat16 if name == "bf16" else torch.float32
        assert {t.dtype for t in kept.values()} == {wanted}
        logits[name] = load_model_plain(out)(ids()).logits_BTV
    torch.testing.assert_close(logits["fp16"], logits["bf16"], rtol=1e-2, atol=1e-3)


def load_model_plain(out: Path) -> Any:
    with torch.no_grad():
        return load_model(out).model.requires_grad_(False)


DENSE = {
    "qwen3": {},
    "qwen3-tied": {"tie_word_embeddings": True},
    "llama": {"head_dim": 8},
    "llama-tied": {"head_dim": 16, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("case", DENSE)
def test_upcycling_without_noise_keeps_the_function(case: str, tmp_path: Path) -> None:
    dense = dense_model(case.split("-")[0], **DENSE[case])
    source = hf(tmp_path / "dense", dense, max_shard_size="30KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    out = imported(source, tmp_path / "moe", upcycle=True, noise_std=0.0, experts=4)
    with torch.no_grad():
        ours = load_model(out).model(ids()).logits_BTV
        theirs = dense(ids()).logits
    assert theirs.std() > 0.3
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_upcycling_breaks_every_tie_and_loses_little(tmp_path: Path) -> None:
    dense = dense_model()
    source = hf(tmp_path / "dense", dense)
    loaded = load_model(imported(source, tmp_path / "moe", upcycle=True))
    assert loaded.run.model.n_experts == 8 and loaded.run.model.top_k == 2
    with torch.no_grad():
        out = loaded.model(ids(8, 64))
        theirs = dense(ids(8, 64)).logits
    assert int((out.tokens_per_expert_E > 0).sum()) >= 6
    assert 0 < (out.logits_BTV - theirs).abs().max() < 0.1 * theirs.std()
    experts = loaded.model.blocks()[0].each_expert()
    changed = (experts[0].w2 != experts[1].w2).float().mean()
    assert 0.6 < float(changed) < 0.9  # half of each: three quarters differ somewhere


def test_a_seed_gives_one_model(tmp_path: Path) -> None:
    source = hf(tmp_path / "dense", dense_model())
    digests = []
    for n, seed in enumerate((1, 1, 2)):
        out = imported(source, tmp_path / str(n), upcycle=True, seed=seed)
        digests.append(run_config_from_toml(out / "run.toml").start.digest)
    assert digests[0] == digests[1] != digests[2]


def test_altered_weights_are_noticed(tmp_path: Path) -> None:
    out = imported(export_checkpoint(checkpoint(tmp_path), tmp_path / "hf", "fp32"), tmp_path / "i")
    run = run_config_from_toml(out / "run.toml")
    bundle = next((out / "weights").glob("*.safetensors"))
    bundle.write_bytes(bundle.read_bytes()[:-1] + b"x")
    with pytest.raises(DamagedState):
        verify(out / "weights", run.model, run.start.digest)


# --- wrong inputs ------------------------------------------------------------------------------


def setting(**values: Any) -> Callable[[Path], None]:
    """Change config.json; None removes a key."""

    def change(source: Path) -> None:
        path = source / "config.json"
        tree = {**json.loads(path.read_text()), **values}
        path.write_text(json.dumps({k: v for k, v in tree.items() if v != "GONE"}))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def rewrite(source: Path) -> None:
        held = load_file(source / "model.safetensors")
        change(held)
        save_file(held, source / "model.safetensors")

    return rewrite


def cut(source: Path) -> None:
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def bad_value(value: float) -> Callable[[Path], None]:
    return tensors(lambda t: t["model.norm.weight"].__setitem__(3, value))


Q = "model.layers.1.self_attn.q_proj.weight"
WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda s: (s / "config.json").unlink(), "there is no config.json"),
    "config is no JSON": (lambda s: (s / "config.json").write_text("{"), "not a readable JSON"),
    "config is a list": (lambda s: (s / "config.json").write_text("[]"), "not a JSON object"),
    "architecture": (setting(model_type="gpt2"), "model_type is 'gpt2'"),
    "no architecture": (setting(model_type="GONE"), "model_type is None"),
    "missing setting": (setting(hidden_size="GONE"), "lacks hidden_size"),
    "odd setting": (setting(num_hidden_layers="two"), "num_hidden_layers is 'two'"),
    "rope scaling": (setting(rope_scaling={"type": "yarn", "factor": 4.0}), "rope_scaling"),
    "rope kind": (setting(rope_parameters={"rope_type": "llama3"}), "'llama3' rotary"),
    "attention bias": (setting(attention_bias=True), "attention_bias is True"),
    "sliding window": (setting(use_sliding_window=True), "use_sliding_window"),
    "activation": (setting(hidden_act="gelu"), "only silu"),
    "shared experts": (setting(n_shared_experts=1), "n_shared_experts is 1"),
    "quantised": (setting(quantization_config={"bits": 4}), "quantization_config"),
    "layer types": (setting(layer_types=["sliding_attention"] * 2), "layer_types"),
    "shapes": (setting(intermediate_size=64), "they are of two models"),
    "more layers": (setting(num_hidden_layers=3, layer_types=None), "layers.2"),
    "fewer layers": (setting(num_hidden_layers=1, layer_types=None), "has no place"),
    "missing tensor": (tensors(lambda t: t.pop(Q)), "q_proj.weight is missing"),
    "unexpected tensor": (tensors(lambda t: t.update(odd=torch.ones(2))), "odd has no place"),
    "integer weights": (tensors(lambda t: t.update({Q: t[Q].to(torch.int8)})), "dtype I8"),
    "not a number": (bad_value(float("nan")), "not finite"),
    "infinite": (bad_value(float("inf")), "not finite"),
    "huge": (bad_value(1e9), "over 1e+06"),
    "cut short": (cut, "cut short"),
    "no weights": (lambda s: (s / "model.safetensors").unlink(), "no model.safetensors"),
    "vocabulary": (
        lambda s: (s / "tokenizer.json").write_bytes(
            byte_tokenizer_json().replace(b'"id": 256', b'"id": 900').replace(
                b'"\\u0143": 173', b'"\\u0143": 900'
            ).replace("\u0143\": 173".encode(), "\u0143\": 900".encode())
        ),
        "do not belong together",
    ),
    "tokenizer": (lambda s: (s / "tokenizer.json").write_text("{}"), "not a tokenizer.json"),
}  # fmt: skip


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf(tmp_path_factory.mktemp("dense") / "dense", dense_model())


def snapshot(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_model_is_refused_in_one_sentence_and_nothing_is_written(
    case: str, dense_folder: Path, tmp_path: Path
) -> None:
    import shutil

    source = tmp_path / "model"
    shutil.copytree(dense_folder, source)
    change, sentence = WRONG[case]
    change(source)
    before = snapshot(tmp_path)
    done = spesd("import", "--upcycle", source, tmp_path / "out")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("spesd: "), done.stderr
    assert sentence in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["import", "{model}", "{new}"], "--upcycle makes experts"),
        (["import", "{model}", "{new}", "--experts", "4"], "goes with --upcycle"),
        (["import", "--upcycle", "{model}", "{full}"], "not an empty folder"),
        (["import", "--upcycle", "{model}", "{new}/deep"], "create it first"),
        (["import", "--upcycle", "{none}", "{new}"], "not a folder"),
        (["import", "--upcycle", "{model}", "{new}", "--noise-std", "-1"], "--noise-std"),
        (["import", "--upcycle", "{model}", "{new}", "--noise-fraction", "2"], "--noise-fraction"),
        (["import", "--upcycle", "{model}", "{new}", "--experts", "1"], "top_k"),
    ],
)
def test_a_wrong_use_is_refused_in_one_sentence(
    words: list[str], sentence: str, dense_folder: Path, tmp_path: Path
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    places = {"model": dense_folder, "new": tmp_path / "new", "full": full, "none": tmp_path / "no"}
    before = snapshot(tmp_path)
    done = spesd(*[word.format(**places) for word in words])
    assert done.returncode == 2 and sentence in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert snapshot(tmp_path) == before
