"""The tensors of a model that is built from a shape.

The model is mlx_lm's qwen3, its hybrid qwen3_next, with latent attention its deepseek_v3, or with
sliding windows its llama.

The module imports nothing heavy, because memory budgets are planned with these sizes too.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from labkit.config import ModelShape

CONV_KERNEL = 4  # tokens that a convolution of a recurrent layer mixes
EXPERTS_PER_TOKEN = 2
Matrices = Iterator[tuple[str, tuple[int, ...]]]


def matrices(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the size of each matrix by name, without ``.weight``: ``[..., out, in]``."""
    hidden = shape.hidden_size
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (shape.vocab_size, hidden)}
    for index in range(shape.num_layers):
        layer = f"model.layers.{index}"
        mixer = _attention(shape) if shape.has_attention(index) else _delta_net(shape)
        blocks = _feed_forward(shape) if shape.num_experts is None else _experts(shape)
        sizes |= {f"{layer}.{name}": size for name, size in (*mixer, *blocks)}
    sizes["lm_head"] = (shape.vocab_size, hidden)
    return sizes


def _attention(shape: ModelShape) -> Matrices:
    if shape.kv_lora_rank is not None:
        for name, size in latent_projections(shape).items():
            yield f"self_attn.{name}", size
        return
    hidden, heads = shape.hidden_size, shape.num_heads * shape.head_dim
    kv_heads = shape.num_kv_heads * shape.head_dim
    # qwen3_next's query projection also computes a gate for the output.
    yield "self_attn.q_proj", (2 * heads if shape.is_hybrid else heads, hidden)
    yield "self_attn.k_proj", (kv_heads, hidden)
    yield "self_attn.v_proj", (kv_heads, hidden)
    yield "self_attn.o_proj", (hidden, heads)


def _delta_net(shape: ModelShape) -> Matrices:
    hidden, values = shape.hidden_size, shape.num_heads * shape.head_dim
    yield "linear_attn.in_proj_qkvz", (convolved_width(shape) + values, hidden)
    yield "linear_attn.in_proj_ba", (2 * shape.num_heads, hidden)
    yield "linear_attn.out_proj", (hidden, values)


def _feed_forward(shape: ModelShape, block: str = "mlp") -> Matrices:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    yield f"{block}.gate_proj", (inner, hidden)
    yield f"{block}.up_proj", (inner, hidden)
    yield f"{block}.down_proj", (hidden, inner)


def _experts(shape: ModelShape) -> Matrices:
    assert shape.num_experts is not None
    for name, size in _feed_forward(shape, "mlp.switch_mlp"):
        yield name, (shape.num_experts, *size)
    yield from _feed_forward(shape, "mlp.shared_expert")
    yield "mlp.gate", (shape.num_experts, shape.hidden_size)
    yield "mlp.shared_expert_gate", (1, shape.hidden_size)


def num_weights(shape: ModelShape) -> int:
    """Return the number of weights of a model."""
    mixed = _num_recurrent(shape) * (CONV_KERNEL * convolved_width(shape) + 2 * shape.num_heads)
    return sum(map(prod, matrices(shape).values())) + sum(vectors(shape).values()) + mixed


def num_unused_weights(shape: ModelShape) -> int:
    """Return the number of weights that no matrix product of a given token reads.

    They are the input embedding, which is looked up, and the experts that the router does not
    choose.
    """
    unused = shape.vocab_size * shape.hidden_size
    if shape.num_experts is not None:
        expert = 3 * shape.hidden_size * shape.intermediate_size
        unused += shape.num_layers * (shape.num_experts - EXPERTS_PER_TOKEN) * expert
    return unused


def num_attention_layers(shape: ModelShape) -> int:
    """Return the number of layers with attention."""
    return sum(map(shape.has_attention, range(shape.num_layers)))


def _num_recurrent(shape: ModelShape) -> int:
    return shape.num_layers - num_attention_layers(shape)


def convolved_width(shape: ModelShape) -> int:
    """Return the channels of a recurrent layer's convolution: its queries, keys and values."""
    return (2 * shape.num_kv_heads + shape.num_heads) * shape.head_dim


def vectors(shape: ModelShape) -> dict[str, int]:
    """Return the length of every norm's weight vector by name, without ``.weight``."""
    hidden = shape.hidden_size
    sizes = {"model.norm": hidden}
    for index in range(shape.num_layers):
        layer = f"model.layers.{index}"
        sizes[f"{layer}.input_layernorm"] = hidden
        sizes[f"{layer}.post_attention_layernorm"] = hidden
        if shape.kv_lora_rank is not None:
            sizes[f"{layer}.self_attn.kv_a_layernorm"] = shape.kv_lora_rank
            continue
        if shape.sliding_window is not None:
            continue  # llama has no norms of queries and keys
        norms = ("self_attn.q_norm", "self_attn.k_norm")
        for name in norms if shape.has_attention(index) else ("linear_attn.norm",):
            sizes[f"{layer}.{name}"] = shape.head_dim
    return sizes


def state_bytes(shape: ModelShape) -> int:
    """Return the bytes of a request's recurrent states (float32) in all layers."""
    convolution = (CONV_KERNEL - 1) * convolved_width(shape)
    return 4 * _num_recurrent(shape) * (convolution + shape.num_heads * shape.head_dim**2)


def latent_dim(shape: ModelShape) -> int:
    """Return how many numbers a layer caches per token: the latent and the rotary part."""
    return (shape.kv_lora_rank or 0) + rotary_dim(shape)


def rotary_dim(shape: ModelShape) -> int:
    """Return the width of the rotary part of queries and keys."""
    return shape.head_dim // 2


def latent_config_entries(shape: ModelShape) -> dict[str, Any]:
    """Return what differs in config.json with latent attention (deepseek_v3, without experts)."""
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


def latent_projections(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Return the rows and columns of a layer's latent attention matrices by name."""
    rank, hidden, values = shape.kv_lora_rank or 0, shape.hidden_size, shape.head_dim
    return {
        "q_proj": (shape.num_heads * (values + rotary_dim(shape)), hidden),
        "kv_a_proj_with_mqa": (latent_dim(shape), hidden),
        "kv_b_proj": (shape.num_heads * 2 * values, rank),
        "o_proj": (hidden, shape.num_heads * values),
    }
