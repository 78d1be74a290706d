"""The operations of a captured graph: their codes, and the structs of their parameters.

A node of a graph (``NODE``) has an operation's code and the address of its parameters.
Every parameter takes 8 bytes, so the parameters of all nodes form one array of words. A step with
``num_rows`` rows uses the words ``constants + num_rows * per_row``
(``graph_replay.ExecutableGraph``).

Every struct begins with ``out``, the address of the array that the operation writes. Fields without
a comment are counts or addresses of arrays: ``token_ids`` and ``positions`` are int32 [rows], the
other inputs float32 [rows, ...] unless a comment names another type.
"""

from __future__ import annotations

import numpy as np

WORD_BYTES = 8

(
    EMBEDDING,
    PACKED_EMBEDDING,
    LOW_PRECISION_EMBEDDING,
    RMS_NORM,
    ROPE,
    MATMUL,
    LOW_PRECISION_MATMUL,
    QUANTIZE,
    INT8_MATMUL,
    ACTIVATION,
    ADD,
    MULTIPLY,
    SCALE,
    STORE_KV,
    ATTENTION,
    GREEDY,
) = range(16)


def _struct(*names: str, floats: tuple[str, ...] = ()) -> np.dtype[np.void]:
    """Return a struct dtype: ``out`` and ``names``, all int64 except ``floats`` (float64)."""
    kinds = [(name, np.float64 if name in floats else np.int64) for name in ("out", *names)]
    return np.dtype(kinds)


# Additional parameters of ``quantized_matmul``: the address of an array with the addresses of
# the compiled functions, records per span, packs per record, bytes per span.
_LOW_PRECISION = ("functions", "records", "packs", "span_bytes")
# Additional parameters of ``int8_matmul``: the address of an array with the addresses of the
# compiled functions, groups along the depth, and the bytes of a group of an unpacked panel, of a
# quantised row and of a span.
_INT8 = ("functions", "groups", "group_bytes", "row_bytes", "span_bytes")
_MATMUL = ("x", "depth", "weights", "bias", "columns", "num_panels", "out_width")
_ELEMENTWISE = _struct("a", "b", "size")  # size: number of elements of each array

PARAMS = {
    EMBEDDING: _struct("token_ids", "width", "weights"),
    PACKED_EMBEDDING: _struct("token_ids", "width", "weights", "num_panels"),
    LOW_PRECISION_EMBEDDING: _struct("token_ids", "width", "weights", *_LOW_PRECISION),
    # num_rows: number of normalised rows, one or several per token.
    RMS_NORM: _struct("x", "num_rows", "width", "weights", "eps", floats=("eps",)),
    # half: number of rotated pairs of elements in a head of ``width`` elements.
    ROPE: _struct(
        *("x", "heads", "width", "positions", "cos", "sin", "half", "input_scale", "traditional"),
        floats=("input_scale",),
    ),
    # columns: see ``gemm.multiply_panels``; out_width: total columns of the matrices.
    MATMUL: _struct(*_MATMUL),
    LOW_PRECISION_MATMUL: _struct(*_MATMUL, *_LOW_PRECISION),
    # out: uint8 [rows, row_bytes], which INT8_MATMUL reads as x.
    QUANTIZE: _struct("x", "depth", "groups", "row_bytes", "functions"),
    INT8_MATMUL: _struct(*_MATMUL, *_INT8),
    # kind: a constant of ``activations``; gate: equal to ``x`` if the activation is not gated.
    ACTIVATION: _struct("x", "gate", "size", "kind"),
    ADD: _ELEMENTWISE,
    MULTIPLY: _ELEMENTWISE,
    SCALE: _struct("a", "factor", "size", floats=("factor",)),
    # launch: index of the layer's attention launch in the graph. Keys and values are written to the
    # KV pools of that launch, and ``out`` is 0.
    STORE_KV: _struct("k", "v", "launch"),
    ATTENTION: _struct("q", "launch"),
    # out: an array with a ``top_two_logits.CANDIDATE`` for each part of each row.
    GREEDY: _struct("logits", "vocabulary"),
}
# unit: the address of the compiled function that computes one of the node's units, or 0 if the node
# is an attention launch.
NODE = np.dtype([("op", np.int64), ("params", np.int64), ("unit", np.int64)])


def word_of(op: int, name: str) -> int:
    """Return the index of parameter ``name`` among an operation's words. ``out`` has index 0."""
    return (PARAMS[op].names or ()).index(name)


def num_words(op: int) -> int:
    """Return the number of words that an operation's parameters take."""
    return PARAMS[op].itemsize // WORD_BYTES
