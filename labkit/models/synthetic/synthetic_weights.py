"""Random weights from a seed, scaled so that attention is selective and logits are decisive.

A model with plain random weights repeats a single token for ever. Here every matrix has the scale
1/sqrt(fan-in), so each branch adds about as much to the residual stream as the embedding. The gains
of the query and key norms make attention select a few tokens instead of averaging all of them. The
output matrix is not tied to the embedding: if it were, the last token would get the largest logit
again. The heads of a recurrent layer forget at rates from ``SLOWEST`` to ``FASTEST``.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

from labkit.config import ModelShape
from labkit.models.synthetic import tensor_shapes

QK_GAIN = 2.0  # weight of q_norm and k_norm: attention logits get a standard deviation of 4
LOGIT_SCALE = 3.0  # standard deviation of the logits
# Rates at which the heads of a recurrent layer forget: at rate r a head remembers about 1/r tokens.
SLOWEST, FASTEST = 0.02, 2.0


def make_weights(shape: ModelShape, *, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """Return the weights of a model by name, in float32. Matrices are ``[..., out, in]``."""
    weights = {}
    for name, size in tensor_shapes.matrices(shape).items():
        deviation = size[-1] ** -0.5
        if name == "model.embed_tokens":
            deviation = 1.0
        elif name == "lm_head":
            deviation *= LOGIT_SCALE
        elif name.endswith(".q_proj") and (shape.kv_lora_rank or shape.sliding_window):
            deviation *= QK_GAIN**2  # neither has norms of queries and keys
        weights[f"{name}.weight"] = _draw_matrix(name, size, deviation, seed)
    for name, length in tensor_shapes.vectors(shape).items():
        gain = QK_GAIN if name.endswith(("q_norm", "k_norm")) else 1.0
        weights[f"{name}.weight"] = np.full(length, gain, np.float32)
    for index in range(shape.num_layers):
        if not shape.has_attention(index):
            weights |= _recurrence(shape, f"model.layers.{index}.linear_attn", seed)
    return weights


def _recurrence(shape: ModelShape, layer: str, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """Return a recurrent layer's convolution and the rates at which its heads forget, by name."""
    name, kernel = f"{layer}.conv1d", tensor_shapes.CONV_KERNEL
    size = (tensor_shapes.convolved_width(shape), kernel, 1)
    return {
        f"{name}.weight": _draw_matrix(name, size, kernel**-0.5, seed),
        f"{layer}.A_log": np.linspace(
            np.log(SLOWEST), np.log(FASTEST), shape.num_heads, dtype=np.float32
        ),
        f"{layer}.dt_bias": np.zeros(shape.num_heads, np.float32),
    }


def _draw_matrix(
    name: str, size: tuple[int, ...], deviation: float, seed: int
) -> npt.NDArray[np.float32]:
    """Draw a matrix from its own random stream, so that it does not depend on other matrices."""
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = generator.standard_normal(size, dtype=np.float32)
    values *= np.float32(deviation)
    return values
