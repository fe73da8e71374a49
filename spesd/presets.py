"""The run configs that `spesd new` writes: every setting, its value, and why.

Decides the values of a preset; which settings exist is `config`'s matter, and a comment for each is
kept here, so that a new setting without one fails a test. Shapes of 1b to 9b are the SPES paper's.
"""

import dataclasses
import json
from typing import Any

from spesd.config import RunConfig
from spesd.errors import UsageError

# what differs from the defaults of `config`, per preset
_BIG: dict[str, Any] = {
    "optimizer": {"lr": 4e-4},
    "schedule": {"warmup_tokens": 4_000_000_000, "total_tokens": 500_000_000_000},
    "round": {"local_steps": 100, "deadline_s": 900.0, "checkpoint_every": 5},
    "merging": {"interval_rounds": 5, "alpha": 0.05, "decay_tokens": 40_000_000_000},
    "data": {
        "seq_len": 2048,
        "batch_size": 8,
        "sources": [
            {"kind": "hub", "path": "HuggingFaceFW/fineweb-edu", "name": "web", "field": "text"}
        ],
    },
    "tokenizer": {"kind": "file", "path": "tokenizer.json"},
}
_MODEL_1B: dict[str, Any] = {
    "vocab_size": 151_665, "d_model": 768, "n_layers": 12, "n_heads": 12, "n_kv_heads": 12,
    "head_dim": 64, "ffn": 2048, "n_experts": 16, "top_k": 2, "rope_theta": 500_000.0,
}  # fmt: skip
_MODEL_7B: dict[str, Any] = {
    "vocab_size": 151_665, "d_model": 2048, "n_layers": 16, "n_heads": 16, "n_kv_heads": 16,
    "head_dim": 128, "ffn": 2048, "n_experts": 32, "top_k": 4, "rope_theta": 32_000.0,
}  # fmt: skip
_MODEL_9B: dict[str, Any] = {
    "vocab_size": 151_936, "d_model": 2048, "n_layers": 28, "n_heads": 16, "n_kv_heads": 8,
    "head_dim": 128, "ffn": 6144, "n_experts": 8, "top_k": 2, "rope_theta": 1_000_000.0,
    "qk_norm": "per_head", "norm_topk_prob": True,
}  # fmt: skip
_PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "optimizer": {"lr": 3e-3},
        "schedule": {"warmup_tokens": 20_000, "total_tokens": 20_000_000},
        "round": {"local_steps": 20, "deadline_s": 30.0},
    },
    "small": {
        "model": {"d_model": 256, "n_layers": 6, "head_dim": 64, "ffn": 512, "n_experts": 16},
        "optimizer": {"lr": 1e-3},
        "schedule": {"warmup_tokens": 1_000_000, "total_tokens": 200_000_000},
        "round": {"local_steps": 50, "deadline_s": 60.0},
        "data": {"seq_len": 256},
    },
    "1b": {"model": _MODEL_1B, **_BIG},
    "2b": {"model": {**_MODEL_1B, "ffn": 4096}, **_BIG},
    "7b": {"model": _MODEL_7B, **_BIG},
    "9b": {"model": _MODEL_9B, **_BIG},
}

COMMENTS = {
    "name": "how volunteers name the run: spesd join --run NAME",
    "seed": "of the initial weights and of everybody's data order",
    "model.vocab_size": "at least the tokenizer's; the byte tokenizer has 257",
    "model.d_model": "width of the residual stream",
    "model.n_layers": "transformer blocks",
    "model.n_heads": "attention heads",
    "model.n_kv_heads": "key/value heads; a divisor of n_heads",
    "model.head_dim": "width of one head",
    "model.ffn": "width of one expert (SwiGLU)",
    "model.n_experts": "experts in every layer; the unit of ownership",
    "model.top_k": "experts that a token goes to",
    "model.qk_norm": "full (OLMoE), per_head (Qwen3) or none",
    "model.norm_topk_prob": "make the chosen experts' weights sum to 1",
    "model.tie_embeddings": "one matrix for input and output; saves memory on every peer",
    "model.rope_theta": "base of the rotary embedding",
    "model.rms_eps": "in RMSNorm",
    "model.init_std": "of the initial weights",
    "loss.load_balance": "weight of the load-balancing loss",
    "loss.router_z": "weight of the router's z-loss",
    "loss.output_z": "weight of the output's z-loss",
    "loss.owned_balance": "what a peer's own experts count in it at first (paper: 0.7)",
    "loss.owned_balance_tokens": "of the whole swarm, until they count as all others",
    "optimizer.lr": "peak learning rate of AdamW",
    "optimizer.beta1": "decay of the mean",
    "optimizer.beta2": "decay of the squares",
    "optimizer.eps": "in AdamW's denominator",
    "optimizer.weight_decay": "on matrices only",
    "optimizer.grad_clip": "largest norm of a step's gradient",
    "schedule.kind": "cosine, linear or constant after the warm-up",
    "schedule.warmup_tokens": "of the whole swarm",
    "schedule.total_tokens": "of the whole swarm",
    "schedule.final_fraction": "of the peak, at total_tokens and after",
    "round.local_steps": "steps between two merges; shorter learns better, if the links allow",
    "round.quorum": "share of the live peers that must be done; 1.0: wait for all, train no more",
    "round.overlap": "train while bundles travel (not in this version)",
    "round.deadline_s": "longest wait for others, seconds; the learned deadline stays below",
    "round.gossip_fanout": "partners per part you co-own and round; 0: all",
    "round.wire": "bf16 or fp32: how weights travel",
    "round.checkpoint_every": "rounds",
    "round.eval_every": "rounds",
    "merging.interval_rounds": "rounds between two expert mergings; 0: never",
    "merging.alpha": "strength at the start; falls linearly to 0",
    "merging.decay_tokens": "of the whole swarm, until merging ends",
    "merging.donors": "most similar experts that each is drawn to",
    "swarm.min_peers": "the first round waits for this many",
    "swarm.experts_per_peer": "0: as many as each peer's memory holds",
    "data.seq_len": "tokens in a row",
    "data.batch_size": "rows in a step",
    "data.held_out": "share of the documents that nobody trains on",
    "data.eval_batches": "held-out batches per evaluation, over all sources",
    "data.sources.kind": "builtin, text, jsonl, parquet or hub",
    "data.sources.path": "file, glob or hub name; each peer may say where it has it (peer.toml)",
    "data.sources.name": "how peer.toml refers to it",
    "data.sources.field": "the column that holds the text",
    "data.sources.weight": "relative share of the documents drawn",
    "tokenizer.kind": "bytes, or file for a tokenizer.json",
    "tokenizer.path": "where you have it; joiners get it from the swarm",
    "tokenizer.digest": "filled in for you: names the file's bytes",
    "start.kind": "random, or weights that `spesd import` wrote",
    "start.path": "where you have the weights; joiners get them from the swarm",
    "start.digest": "filled in: names the weights' bytes",
}


def preset_names() -> list[str]:
    """Return the presets there are."""
    return list(_PRESETS)


def preset_toml(name: str, scale: float = 1.0) -> str:
    """Return a preset as a commented run.toml; UsageError for a name or scale that is none.

    With a scale below 1 it is the same architecture to try out: width, depth and expert width are
    multiplied by it, and it trains on the built-in corpus in bytes.
    """
    if name not in _PRESETS:
        raise UsageError(f"there is no preset {name!r}; there are {', '.join(_PRESETS)}.")
    if not 0.0 < scale <= 1.0:
        raise UsageError(f"--scale is {scale}: it lies above 0 and at most at 1.")
    chosen = _PRESETS[name] if scale == 1.0 else _scaled(_PRESETS[name], scale)
    return commented_toml(f"preset {name}", f"my-{name}-run", chosen)


def imported_toml(name: str, chosen: dict[str, Any]) -> str:
    """Return the commented run.toml of imported weights; `chosen` are its sections."""
    rest = {"optimizer": {"lr": 1e-4}}  # small: the weights have learned already
    return commented_toml("imported weights", name, {**rest, **chosen})


def commented_toml(what: str, run_name: str, chosen: dict[str, Any]) -> str:
    """Return a run.toml with every setting and its comment; `chosen` differ from the defaults."""
    defaults = dataclasses.asdict(RunConfig())
    lines = [
        f"# A spesd run, {what}. Every setting is here with its value; a change of any of",
        "# them makes another run. Start it with: spesd start FILE",
        "",
        _line("name", run_name),
        _line("seed", 0),
    ]
    sources: list[dict[str, Any]] = []
    for section, values in defaults.items():
        if not isinstance(values, dict):
            continue
        lines += ["", f"[{section}]"]
        for key, value in (values | chosen.get(section, {})).items():
            if key == "sources":
                sources = [dict(s) for s in value]
                continue
            lines.append(_line(f"{section}.{key}", value))
        if section == "data":
            template = defaults["data"]["sources"][0]
            for source in sources:
                lines += ["", "[[data.sources]]"]
                filled = template | source
                lines += [_line(f"data.sources.{k}", v) for k, v in filled.items()]
    return "\n".join(lines) + "\n"


def _scaled(preset: dict[str, Any], scale: float) -> dict[str, Any]:
    """Shrink a preset; experts, top-k, norms and the ratio of key/value heads stay."""
    defaults = dataclasses.asdict(RunConfig())
    model = defaults["model"] | preset.get("model", {})
    group = model["n_heads"] // model["n_kv_heads"]
    kv_heads = max(1, round(model["n_kv_heads"] * scale))
    head_dim = max(8, 2 * round(model["head_dim"] * scale**0.5 / 2))
    heads = kv_heads * group
    small = {
        "vocab_size": defaults["model"]["vocab_size"],
        "d_model": heads * head_dim,
        "n_layers": max(2, round(model["n_layers"] * scale)),
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn": max(16, 8 * round(model["ffn"] * scale / 8)),
    }
    return {
        **preset,
        "model": model | small,
        "optimizer": {"lr": 3e-3},
        "schedule": {"warmup_tokens": 20_000, "total_tokens": 20_000_000},
        "round": {"local_steps": 20, "deadline_s": 30.0},
        "merging": {**preset.get("merging", {}), "decay_tokens": 2_000_000},
        "data": {},
        "tokenizer": {},
    }


def _line(dotted: str, value: Any) -> str:
    text = f"{dotted.rpartition('.')[2]} = {json.dumps(value)}"
    return f"{text:<34} # {COMMENTS[dotted]}"
