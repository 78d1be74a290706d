"""Captures the kernels that a model's forward launches, by running it on traced arrays.

A small step costs as much in Python, between its launches, as in the kernels. But steps differ
only in their numbers and in how many rows they have, so the launches are captured once, as a CUDA
graph captures those of a stream, and replayed by one call (``graph_replay``).

A forward whose code does what no kernel does raises ``NotCapturable``, and runs as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.cpu import graph_ops
from labkit.cpu.traced_array import (
    TRACED_ROWS,
    NotCapturable,
    Operand,
    TracedArray,
    TracedPositions,
    per_row,
)

Array = NDArray[Any]
Parameter = TracedArray | TracedPositions | Operand | int | float

TOKEN_IDS, POSITIONS = 0, 1  # buffers of the inputs, both int32 [rows]


@dataclass(frozen=True, slots=True)
class Node:
    """A launch of a kernel: a code of ``graph_ops``, and its parameters by name."""

    op: int
    params: Mapping[str, Operand | float]

    @property
    def out(self) -> Operand:
        """The address that it writes."""
        out = self.params["out"]
        assert isinstance(out, Operand)
        return out

    @property
    def buffers(self) -> set[int]:
        """The buffers that it reads and writes."""
        operands = [value for value in self.params.values() if isinstance(value, Operand)]
        return {operand.buffer for operand in operands if operand.buffer is not None}


@dataclass(frozen=True, slots=True)
class CapturedAttention:
    """An attention launch: ``node`` of the graph, the layer, and the options of its ``bind``.

    ``shapes``: [heads, head_dim] of the queries and, if it has new keys, of these.
    """

    node: int
    layer: int
    scale: float
    heads: int
    window: int | None
    sinks: Any
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """The launches of a forward, in order, for any number of rows.

    Parameters
    ----------
    nodes
        The launches; the last writes the logits.
    row_bytes
        Bytes that each buffer has per row; the first two are ``TOKEN_IDS`` and ``POSITIONS``.
    vocabulary
        Token ids that the model has.
    logits_width
        Logits of a row.
    attention
        The attention launches, in order.
    rotary_tables
        Tables of cosines and sines, with the nodes that read each: a table moves when it grows.
    keep_alive
        The arrays to which operands point.
    """

    nodes: tuple[Node, ...]
    row_bytes: tuple[int, ...]
    vocabulary: int
    logits_width: int
    attention: tuple[CapturedAttention, ...]
    rotary_tables: tuple[tuple[Any, tuple[int, ...]], ...]
    keep_alive: tuple[Any, ...]


class GraphCapture:
    """Collects the launches of one forward.

    ``buffers`` holds an array for each ``new_array``, with ``TRACED_ROWS`` rows: its numbers are
    never read. ``vocabulary`` is the least number of rows of the tables in which token ids are
    looked up; ``rotary_tables`` the nodes that read each table of cosines and sines.
    """

    def __init__(self) -> None:
        self.buffers: list[Array] = [np.empty((TRACED_ROWS, 1), np.int32) for _ in range(2)]
        self.vocabulary = 1 << 31
        self.rotary_tables: dict[Any, list[int]] = {}
        self._nodes: list[Node] = []
        self._attention: list[CapturedAttention] = []
        self._keep_alive: list[Any] = []

    def token_ids(self) -> TracedArray:
        """Return the token ids, int32 [rows, 1]."""
        return TracedArray(self, TOKEN_IDS, self.buffers[TOKEN_IDS])

    def positions(self) -> TracedPositions:
        """Return the positions of the tokens."""
        return TracedPositions(Operand(0, 0, POSITIONS))

    def new_array(self, shape: tuple[int, ...]) -> TracedArray:
        """Return an array of float32 in a buffer of its own; the first axis is the rows."""
        if shape[0] != TRACED_ROWS:
            raise NotCapturable("it moves the rows to another axis")
        self.buffers.append(np.empty(shape, np.float32))
        return TracedArray(self, len(self.buffers) - 1, self.buffers[-1])

    def add_node(self, op: int, out: TracedArray | None, **params: Parameter) -> int:
        """Add a launch to the graph, and return its number.

        ``out`` must not overlap an array that the launch reads. None: it writes the KV pools.
        """
        names = graph_ops.PARAMS[op].names or ()
        if {"out", *params} != set(names):
            raise ValueError(
                f"operation {op} has the parameters {names}, not {sorted({'out', *params})}"
            )
        operands = {"out": Operand(0, 0) if out is None else out.operand}
        self._nodes.append(Node(op, operands | {k: _operand(v) for k, v in params.items()}))
        return len(self._nodes) - 1

    def attend(
        self, layer: int, q: TracedArray, k: TracedArray | None, v: Any, options: dict[str, Any]
    ) -> TracedArray:
        """Add a layer's attention, after the launch that stores new keys and values if there are.

        ``options``: as ``Attention.bind`` takes them.
        """
        launch, shapes = len(self._attention), [q.shape[1:]]
        if k is not None:
            self.add_node(graph_ops.STORE_KV, None, k=k, v=v, launch=launch)
            shapes.append(k.shape[1:])
        out = self.new_array(q.shape)
        node = self.add_node(graph_ops.ATTENTION, out, q=q, launch=launch)
        self._attention.append(CapturedAttention(node, layer, shapes=tuple(shapes), **options))
        return out

    def keep(self, *arrays: Any) -> None:
        """Keep arrays alive whose addresses are operands."""
        self._keep_alive += arrays

    def finish(self, logits: Any) -> CapturedGraph:
        """Return the graph; ``logits`` is what the forward returned.

        Raises
        ------
        NotCapturable
            They are not float32 [rows, 1, vocabulary], written by the last launch.
        """
        if not isinstance(logits, TracedArray) or logits.operand != self._nodes[-1].out:
            raise NotCapturable("its logits are not the last that it computes")
        if logits.shape[1:-1] != (1,):
            raise NotCapturable(f"it returns logits of shape {logits.shape}")
        return CapturedGraph(
            nodes=tuple(self._nodes),
            row_bytes=tuple(per_row(buffer.nbytes) for buffer in self.buffers),
            vocabulary=self.vocabulary,
            logits_width=logits.row_size,
            attention=tuple(self._attention),
            rotary_tables=tuple((t, tuple(nodes)) for t, nodes in self.rotary_tables.items()),
            keep_alive=tuple(self._keep_alive),
        )


def _operand(value: Parameter) -> Operand | float:
    if isinstance(value, TracedArray | TracedPositions):
        return value.operand
    return Operand(value, 0) if isinstance(value, int) else value
