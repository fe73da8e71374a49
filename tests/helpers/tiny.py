"""A model that a test can afford, and trainers on it in this process."""

from pathlib import Path
from typing import Any

from spesd.config import RunConfig
from spesd.configtree import from_tree
from spesd.train.trainer import Trainer, TrainerSetup


def tiny_config(**sections: dict[str, Any]) -> RunConfig:
    """A run with 4 experts and 2 layers; `sections` override single values."""
    base: dict[str, dict[str, Any]] = {
        "model": {"d_model": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "head_dim": 16,
                  "ffn": 32, "n_experts": 4},
        "optimizer": {"lr": 3e-3},
        "schedule": {"warmup_tokens": 512, "total_tokens": 100_000},
        "round": {"local_steps": 5, "wire": "fp32"},
        "data": {"seq_len": 32, "batch_size": 4, "eval_batches": 2},
    }  # fmt: skip
    merged = {k: {**base.get(k, {}), **sections.get(k, {})} for k in {*base, *sections}}
    return from_tree(RunConfig, merged)


def make_trainer(config: RunConfig, store: Path, peer: str, owned: tuple[int, ...]) -> Trainer:
    """A trainer with the run's initial weights."""
    trainer = Trainer(TrainerSetup(config=config, peer_id=peer, store=store, owned=owned))
    trainer.initialise()
    return trainer
