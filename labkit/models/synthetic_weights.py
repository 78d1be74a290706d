"""Random weights from a seed, scaled so that attention is selective and logits are decisive.

A model with plain random weights repeats a single token for ever. Here every matrix has the scale
1/sqrt(fan-in), so each branch adds about as much to the residual stream as the embedding. The gains
of the query and key norms make attention select a few tokens instead of averaging all of them. The
output matrix is not tied to the embedding: if it were, the last token would get the largest logit
again.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

from labkit.config import ModelShape
from labkit.models import synthetic_latent

QK_GAIN = 2.0  # weight of q_norm and k_norm: attention logits get a standard deviation of 4
LOGIT_SCALE = 3.0  # standard deviation of the logits


def make_weights(shape: ModelShape, *, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """Return the weights of a model by name, in float32. Matrices are ``[out, in]``.

    The model is a qwen3 or, with ``shape.kv_lora_rank``, a deepseek_v3.
    """
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, inner = shape.hidden_size, shape.intermediate_size
    matrices = {"model.embed_tokens": (shape.vocab_size, hidden, 1.0)}
    vectors = {"model.norm": (hidden, 1.0)}
    for index in range(shape.num_layers):
        layer = f"model.layers.{index}"
        for name, rows, columns in (
            ("self_attn.q_proj", heads, hidden),
            ("self_attn.k_proj", kv_heads, hidden),
            ("self_attn.v_proj", kv_heads, hidden),
            ("self_attn.o_proj", hidden, heads),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            matrices[f"{layer}.{name}"] = (rows, columns, columns**-0.5)
        vectors[f"{layer}.input_layernorm"] = (hidden, 1.0)
        vectors[f"{layer}.post_attention_layernorm"] = (hidden, 1.0)
        if shape.kv_lora_rank is not None:
            for name in ("q_proj", "k_proj", "v_proj"):
                del matrices[f"{layer}.self_attn.{name}"]
            for name, (rows, columns) in synthetic_latent.projections(shape).items():
                # Latents have no norms of queries and keys, so the query matrix has their gains.
                gain = QK_GAIN**2 if name == "q_proj" else 1.0
                matrices[f"{layer}.self_attn.{name}"] = (rows, columns, gain * columns**-0.5)
            vectors[f"{layer}.self_attn.kv_a_layernorm"] = (shape.kv_lora_rank, 1.0)
            continue
        vectors[f"{layer}.self_attn.q_norm"] = (shape.head_dim, QK_GAIN)
        vectors[f"{layer}.self_attn.k_norm"] = (shape.head_dim, QK_GAIN)
    matrices["lm_head"] = (shape.vocab_size, hidden, LOGIT_SCALE * hidden**-0.5)
    weights = {
        f"{name}.weight": _draw_matrix(name, (rows, columns), deviation, seed)
        for name, (rows, columns, deviation) in matrices.items()
    }
    for name, (size, value) in vectors.items():
        weights[f"{name}.weight"] = np.full(size, value, np.float32)
    return weights


def _draw_matrix(
    name: str, size: tuple[int, int], deviation: float, seed: int
) -> npt.NDArray[np.float32]:
    """Draw a matrix from its own random stream, so that it does not depend on other matrices."""
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = generator.standard_normal(size, dtype=np.float32)
    values *= np.float32(deviation)
    return values
