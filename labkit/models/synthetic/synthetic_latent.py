"""The parts of a synthetic model with latent attention (mlx_lm's deepseek_v3, without experts)."""

from __future__ import annotations

from typing import Any

from labkit.config import ModelShape


def latent_dim(shape: ModelShape) -> int:
    """Return how many numbers a layer caches per token: the latent and the rotary part."""
    return (shape.kv_lora_rank or 0) + rotary_dim(shape)


def rotary_dim(shape: ModelShape) -> int:
    """Return the width of the rotary part of queries and keys."""
    return shape.head_dim // 2


def config_entries(shape: ModelShape) -> dict[str, Any]:
    """Return the entries of config.json that differ from those of a qwen3 model."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": shape.num_heads,
        "kv_lora_rank": shape.kv_lora_rank,
        "q_lora_rank": None,
        "qk_nope_head_dim": shape.head_dim,
        "qk_rope_head_dim": rotary_dim(shape),
        "v_head_dim": shape.head_dim,
        "n_routed_experts": None,
        "n_shared_experts": None,
        "first_k_dense_replace": shape.num_layers,
        "rope_scaling": None,
    }


def projections(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Return the rows and columns of a layer's attention matrices by name."""
    rank, hidden, values = shape.kv_lora_rank or 0, shape.hidden_size, shape.head_dim
    return {
        "q_proj": (shape.num_heads * (values + rotary_dim(shape)), hidden),
        "kv_a_proj_with_mqa": (latent_dim(shape), hidden),
        "kv_b_proj": (shape.num_heads * 2 * values, rank),
        "o_proj": (hidden, shape.num_heads * values),
    }
