"""The operations of a captured graph: a code for each, and a struct of its parameters.

A node of a graph (``NODE``) is an operation's code and the address of its parameters. Parameters
take 8 bytes each, so those of all nodes together are one array of words, and a step's words are
``constants + num_rows * per_row`` (``graph_replay.ExecutableGraph``).

Every struct begins with ``out``, the address of the array that the operation writes. Other names
without a remark are addresses of arrays: float32 [rows, ...], weights, or int32 [rows] for
``token_ids`` and ``positions``.
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
    ACTIVATION,
    ADD,
    MULTIPLY,
    SCALE,
    STORE_KV,
    ATTENTION,
    GREEDY,
) = range(14)


def _struct(*names: str, floats: tuple[str, ...] = ()) -> np.dtype[np.void]:
    """Return a struct of int64, and of float64 for ``floats``, that begins with ``out``."""
    kinds = [(name, np.float64 if name in floats else np.int64) for name in ("out", *names)]
    return np.dtype(kinds)


# How ``low_precision_matmul`` reads its weights: the address of its compiled functions' addresses,
# records of a span, packs of a record, bytes of a span.
_LOW_PRECISION = ("functions", "records", "packs", "span_bytes")
_MATMUL = ("x", "depth", "weights", "bias", "columns", "num_panels", "out_width")
_ELEMENTWISE = _struct("a", "b", "size")  # size: elements of each array

PARAMS = {
    EMBEDDING: _struct("token_ids", "width", "weights"),
    PACKED_EMBEDDING: _struct("token_ids", "width", "weights", "num_panels"),
    LOW_PRECISION_EMBEDDING: _struct("token_ids", "width", "weights", *_LOW_PRECISION),
    # num_rows: rows that are normalised, one or several of each token.
    RMS_NORM: _struct("x", "num_rows", "width", "weights", "eps", floats=("eps",)),
    # half: pairs of elements that are rotated in a head of ``width`` elements.
    ROPE: _struct(
        *("x", "heads", "width", "positions", "cos", "sin", "half", "input_scale", "traditional"),
        floats=("input_scale",),
    ),
    # columns: int64 [num_panels, 3], see ``gemm.matmul``; out_width: columns of all matrices.
    MATMUL: _struct(*_MATMUL),
    LOW_PRECISION_MATMUL: _struct(*_MATMUL, *_LOW_PRECISION),
    # kind: of ``activations``; gate: as ``x`` where the activation is not gated.
    ACTIVATION: _struct("x", "gate", "size", "kind"),
    ADD: _ELEMENTWISE,
    MULTIPLY: _ELEMENTWISE,
    SCALE: _struct("a", "factor", "size", floats=("factor",)),
    # launch: number of the layer's attention launch in the graph. Keys and values are written to
    # its KV pools, and ``out`` is 0.
    STORE_KV: _struct("k", "v", "launch"),
    ATTENTION: _struct("q", "launch"),
    # out: ``greedy_sampling.CANDIDATE`` of each part of each row.
    GREEDY: _struct("logits", "vocabulary"),
}
NODE = np.dtype([("op", np.int64), ("params", np.int64)])


def word_of(op: int, name: str) -> int:
    """Return which word of an operation's parameters ``name`` is: 0 for ``out``."""
    return (PARAMS[op].names or ()).index(name)


def num_words(op: int) -> int:
    """Return how many words an operation's parameters take."""
    return PARAMS[op].itemsize // WORD_BYTES
