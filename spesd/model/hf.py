"""The Hugging Face `config.json` of an exported model.

Decides which class loads an export and states every value that class would otherwise default
(rms_norm_eps, rope, end-of-text id: what other exporters lose). It never touches a weight.
"""

from typing import Any

from spesd.config import ModelConfig
from spesd.errors import ConfigError


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
    raise ConfigError(
        'a model with qk_norm = "none" cannot be exported: no Hugging Face class that reads this '
        'format goes without QK-norm; train with qk_norm = "full" or "per_head".'
    )
