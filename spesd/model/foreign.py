"""What a Hugging Face `config.json` says of a model, in the words of our ModelConfig.

Decides which models our transformer computes exactly, and refuses all others by the setting that
it cannot express. A value that the file leaves out is the one that its class assumes.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from spesd.config import ModelConfig
from spesd.errors import ConfigError
from spesd.model.hf import Family

Tree = Mapping[str, Any]

_QK_NORM: dict[str, Literal["full", "per_head", "none"]] = {
    "olmoe": "full", "qwen3_moe": "per_head", "mixtral": "none", "qwen3": "per_head",
    "llama": "none",
}  # fmt: skip
DENSE = ("qwen3", "llama")
_EPS = {"olmoe": 1e-5, "mixtral": 1e-5}  # others: 1e-6
_THETA = {"mixtral": 1_000_000.0}  # others: 10,000
_REFUSED: dict[str, tuple[Any, ...]] = {  # settings, and the values of them that we compute
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "clip_qkv": (None,),
    "use_sliding_window": (None, False),
    "shared_expert_intermediate_size": (None, 0),
    "n_shared_experts": (None, 0),
    "num_shared_experts": (None, 0),
    "mlp_only_layers": (None, []),
    "decoder_sparse_step": (None, 1),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1.0),
}


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """A model as its config.json describes it; of a dense one, `model` has a single expert."""

    model: ModelConfig
    family: Family | Literal["dense"]
    max_positions: int


def read_config(tree: Tree) -> Foreign:
    """Translate a config.json; ConfigError, naming the setting, if our model is another."""
    kind = tree.get("model_type")
    if kind not in _QK_NORM:
        known = ", ".join(sorted(_QK_NORM))
        raise ConfigError(
            f"its model_type is {kind!r}, and only {known} can be imported; choose another model."
        )
    _refuse(tree, kind)
    dense = kind in DENSE
    width, heads = _whole(tree, "hidden_size"), _whole(tree, "num_attention_heads")
    head_dim = tree.get("head_dim") if kind != "olmoe" else None
    if head_dim is None:
        if kind == "qwen3":
            head_dim = 128
        elif width % heads:
            raise ConfigError(f"its hidden_size {width} is not a multiple of its {heads} heads.")
        else:
            head_dim = width // heads
    moe = {} if dense else _experts(tree, kind)
    model = ModelConfig(
        vocab_size=_whole(tree, "vocab_size"),
        d_model=width,
        n_layers=_whole(tree, "num_hidden_layers"),
        n_heads=heads,
        n_kv_heads=_kv_heads(tree, kind, heads),
        head_dim=_number("head_dim", head_dim, int),
        ffn=_whole(tree, "moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"),
        qk_norm=_QK_NORM[kind],
        tie_embeddings=tree.get("tie_word_embeddings", False) is True,
        rope_theta=_theta(tree, kind),
        rms_eps=_number("rms_norm_eps", tree.get("rms_norm_eps", _EPS.get(kind, 1e-6)), float),
        init_std=_number("initializer_range", tree.get("initializer_range", 0.02), float),
        **(moe or {"n_experts": 1, "top_k": 1, "norm_topk_prob": True}),
    )
    family: Family | Literal["dense"] = "dense" if dense else kind
    positions = _number("max_position_embeddings", tree.get("max_position_embeddings", 2048), int)
    return Foreign(model=model, family=family, max_positions=positions)


def upcycled(foreign: Foreign, n_experts: int, top_k: int) -> ModelConfig:
    """Return the shape of a dense model made into one of experts.

    The chosen experts' weights sum to 1: equal experts then compute what the dense model did.
    """
    return dataclasses.replace(foreign.model, n_experts=n_experts, top_k=top_k, norm_topk_prob=True)


def _refuse(tree: Tree, kind: str) -> None:
    """Raise ConfigError for the first setting that changes what is computed in a way we lack."""
    for name, computed in _REFUSED.items():
        if tree.get(name) not in computed:
            raise ConfigError(
                f"its {name} is {tree[name]!r}, which this architecture does not compute; choose "
                "a model without it."
            )
    if tree.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ConfigError(f"its hidden_act is {tree['hidden_act']!r}, and only silu is computed.")
    if kind == "mixtral" and tree.get("sliding_window") is not None:
        raise ConfigError(
            f"its sliding_window is {tree['sliding_window']!r}, and attention here is over all "
            "positions; choose a model without it."
        )
    layers = tree.get("layer_types") or []
    if any(one != "full_attention" for one in layers):
        raise ConfigError("its layer_types are not all full_attention; choose another model.")
    rope = tree.get("rope_parameters") or {}
    for name, given in (("rope_scaling", tree.get("rope_scaling")), ("rope_parameters", rope)):
        scaling = given or {}
        if not isinstance(scaling, dict):
            raise ConfigError(f"its {name} is no table.")
        form = scaling.get("rope_type", scaling.get("type", "default"))
        if form != "default" or scaling.get("partial_rotary_factor", 1.0) != 1.0:
            raise ConfigError(
                f"its {name} asks for {form!r} rotary positions, and only plain ones are "
                "computed; choose a model without it."
            )


def _experts(tree: Tree, kind: str) -> dict[str, Any]:
    count = "num_local_experts" if "num_local_experts" in tree else "num_experts"
    # Mixtral's class has no such setting, and always does it
    norm = True if kind == "mixtral" else tree.get("norm_topk_prob", False) is True
    return {
        "n_experts": _whole(tree, count),
        "top_k": _whole(tree, "num_experts_per_tok"),
        "norm_topk_prob": norm,
    }


def _kv_heads(tree: Tree, kind: str, heads: int) -> int:
    assumed = {"mixtral": 8, "qwen3": 32, "qwen3_moe": 4}.get(kind, heads)
    given = tree.get("num_key_value_heads", assumed)
    return heads if given is None else int(_number("num_key_value_heads", given, int))


def _theta(tree: Tree, kind: str) -> float:
    rope = tree.get("rope_parameters") or {}
    assumed = tree.get("rope_theta", _THETA.get(kind, 10_000.0))
    return float(_number("rope_theta", rope.get("rope_theta", assumed), float))


def _whole(tree: Tree, name: str) -> int:
    if name not in tree:
        raise ConfigError(f"its config.json lacks {name}; give the model's own config.json.")
    return int(_number(name, tree[name], int))


def _number(name: str, value: Any, kind: type[Any]) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"its {name} is {value!r}, which is no number above 0.")
    return value
