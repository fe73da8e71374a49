"""The models of the step and memory benchmarks, ours and transformers'.

Decides shapes and batches. Ours trains through the product's own Trainer on real text; the other is
OlmoeForCausalLM of the same shape with torch's fused AdamW, fed from the same stream.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from spesd.config import RunConfig
from spesd.configtree import from_tree
from spesd.errors import Unavailable
from spesd.memory import Layout
from spesd.model.hf import hf_config
from spesd.train.protocol import TrainerSetup
from spesd.train.trainer import Trainer

SIZES: dict[str, dict[str, int]] = {
    "41M": {"d_model": 256, "ffn": 512, "n_heads": 4, "n_kv_heads": 4},
    "158M": {"d_model": 512, "ffn": 1024, "n_heads": 8, "n_kv_heads": 8},
}
_COMMON = {"vocab_size": 4096, "n_layers": 6, "head_dim": 64, "n_experts": 16, "top_k": 2}

Step = Callable[[], float]


def run_of(size: str) -> RunConfig:
    """Return a run with this model and steps of 8 rows of 256 tokens."""
    tree = {
        "model": {**_COMMON, **SIZES[size]},
        "schedule": {"warmup_tokens": 0, "kind": "constant"},
        "data": {"seq_len": 256, "batch_size": 8, "eval_batches": 1},
    }
    return from_tree(RunConfig, tree)


def our_step(run: RunConfig, layout: Layout, folder: Path, device: str = "cpu") -> Step:
    """Return one step of our trainer, which returns its loss."""
    owned = tuple(range(layout.k))
    trainer = Trainer(
        TrainerSetup(
            config=run, peer_id="bench", store=folder, owned=owned, layout=layout, device=device
        )
    )
    trainer.initialise()
    trainer.begin_round(1, 1_000_000, 1)
    return lambda: float(trainer.step().loss or 0.0)


def hf_step(run: RunConfig, folder: Path, *, half: bool, device: str = "cpu") -> Step:
    """Return one training step of transformers' model of the same shape."""
    try:
        from transformers import OlmoeConfig, OlmoeForCausalLM
    except ImportError:
        raise Unavailable(
            'this benchmark needs transformers to compare with: pip install "spesd[bench]".'
        ) from None
    tree = hf_config(run.model, max_positions=run.data.seq_len, eos_id=None, pad_id=None)
    tree = {k: v for k, v in tree.items() if k not in ("architectures", "model_type", "dtype")}
    model: Any = OlmoeForCausalLM(OlmoeConfig(**tree))
    model.to(device)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=run.optimizer.lr, betas=(0.9, 0.95), fused=True)
    batches = _stream(run, folder)

    def step() -> float:
        inputs, targets = (torch.from_numpy(a).to(device) for a in batches())
        with torch.autocast(device.partition(":")[0], dtype=torch.bfloat16, enabled=half):
            out = model(input_ids=inputs, labels=targets, shift_labels=targets)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.optimizer.grad_clip)
        adam.step()
        adam.zero_grad(set_to_none=True)
        return float(out.loss.detach())

    return step


def _stream(run: RunConfig, folder: Path) -> Callable[[], Any]:
    from spesd.data.stream import TextStream
    from spesd.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(run.tokenizer, None, run.model.vocab_size)
    return TextStream(run.data, tokenizer, seed=run.seed, peer_id="bench").next_batch
