"""The Hugging Face `config.json` of an exported model.

Decides which class loads an export and states every value that class would otherwise default
(rms_norm_eps, rope, end-of-text id: what other exporters lose). It never touches a weight.
"""

from typing import Any, Literal

from spesd.config import ModelConfig
from spesd.errors import ConfigError

Family = Literal["olmoe", "qwen3_moe", "mixtral"]
_FAMILIES: dict[str, Family] = {"full": "olmoe", "per_head": "qwen3_moe", "none": "mixtral"}


def family_of(config: ModelConfig) -> Family:
    """Return the model_type of the Hugging Face class that computes what this model does."""
    return _FAMILIES[config.qk_norm]


def hf_config(
    config: ModelConfig,
    *,
    max_positions: int,
    eos_id: int | None,
    pad_id: int | None,
    dtype: str = "float32",
) -> dict[str, Any]:
    """Return config.json for a model exported with `partition.to_hf`.

    `max_positions` is the longest sequence that it was trained on; `dtype` names the dtype of the
    written tensors. Raises ConfigError where no stock class computes what this model does.
    """
    common: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "initializer_range": config.init_std,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "num_experts_per_tok": config.top_k,
        "num_experts": config.n_experts,
        "norm_topk_prob": config.norm_topk_prob,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "pad_token_id": pad_id,
        "dtype": dtype,
    }
    if config.qk_norm == "full":
        if config.n_heads * config.head_dim != config.d_model:
            raise ConfigError(
                'OlmoeForCausalLM has no head_dim of its own: with qk_norm = "full", n_heads * '
                f"head_dim ({config.n_heads * config.head_dim}) must be d_model "
                f'({config.d_model}); use qk_norm = "per_head" for other head widths.'
            )
        return common | {
            "architectures": ["OlmoeForCausalLM"],
            "model_type": "olmoe",
            "intermediate_size": config.ffn,
            "clip_qkv": None,
        }
    if config.qk_norm == "per_head":
        return common | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "head_dim": config.head_dim,
            "intermediate_size": config.ffn,
            "moe_intermediate_size": config.ffn,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "use_sliding_window": False,
        }
    return _mixtral(config, common)


_NOT_MIXTRAL = ("num_experts", "norm_topk_prob", "attention_bias")


def _mixtral(config: ModelConfig, common: dict[str, Any]) -> dict[str, Any]:
    if not config.norm_topk_prob:
        raise ConfigError(
            "MixtralForCausalLM always makes the chosen experts' weights sum to 1: with "
            'qk_norm = "none", train with norm_topk_prob = true to be able to export.'
        )
    return {k: v for k, v in common.items() if k not in _NOT_MIXTRAL} | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn,
        "num_local_experts": config.n_experts,
        "sliding_window": None,
        "router_jitter_noise": 0.0,
    }


def generation_config(*, eos_id: int | None, pad_id: int | None) -> dict[str, Any]:
    """Return generation_config.json: where generation ends, and what fills up short rows."""
    return {
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "pad_token_id": eos_id if pad_id is None else pad_id,
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.95,
    }
