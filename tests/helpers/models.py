"""Checkpoints, Hugging Face folders and small tokenizers, for tests of what goes in and out."""

from pathlib import Path
from typing import Any

import torch
import transformers
from helpers.tiny import make_trainer, tiny_config

from spesd.config import RunConfig

# head widths that are not d / heads, and fewer key/value heads
SHAPES: dict[str, dict[str, Any]] = {
    "full": {"n_kv_heads": 1, "rope_theta": 32_000.0, "rms_eps": 3e-6},
    "per_head": {"qk_norm": "per_head", "n_kv_heads": 1, "head_dim": 24, "norm_topk_prob": True,
                 "tie_embeddings": True},
    "none": {"qk_norm": "none", "head_dim": 8, "norm_topk_prob": True},
}  # fmt: skip
CLASSES = {
    "full": "OlmoeForCausalLM", "per_head": "Qwen3MoeForCausalLM", "none": "MixtralForCausalLM"
}  # fmt: skip


def checkpoint(folder: Path, run: RunConfig | None = None, steps: int = 2) -> Path:
    """A run's folder with a checkpoint after a few steps; return it."""
    run = run or tiny_config()
    place = folder / "runs" / run.run_id
    place.mkdir(parents=True)
    (place / "run.json").write_bytes(run.canonical())
    trainer = make_trainer(run, place, "a", tuple(range(run.model.n_experts)))
    trainer.begin_round(1, 5000, 1)
    for _ in range(steps):
        trainer.step()
    trainer.checkpoint(1, 0, 1, {})
    return place


def shaped(kind: str) -> RunConfig:
    """A tiny run of one of SHAPES."""
    return tiny_config(model=SHAPES[kind])


def dense_model(kind: str = "qwen3", **values: Any) -> Any:
    """A dense transformers model with random weights of some size, in fp32."""
    settings = {
        "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 64, "initializer_range": 0.15, "tie_word_embeddings": False,
        "bos_token_id": None, "eos_token_id": 256, "pad_token_id": None, **values,
    }  # fmt: skip
    torch.manual_seed(4)
    classes = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    }
    config, model = classes[kind]
    made = model(config(**settings)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return made


def ids(rows: int = 2, columns: int = 32) -> torch.Tensor:
    """Token ids below 257."""
    return torch.randint(0, 257, (rows, columns), generator=torch.Generator().manual_seed(1))
