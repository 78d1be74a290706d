"""Captures the kernel launches of a model's forward pass, by running it on traced arrays.

A small step spends as much time in Python, between its launches, as in the kernels. Steps differ
only in their data and their number of rows. So the launches are captured once, as a CUDA graph
captures the launches of a stream, and each step replays them in one call (``graph_replay``).

If the forward's code computes something without a kernel, the capture raises ``NotCapturable``, and
the engine runs the forward without a graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.cpu.capture import graph_ops
from labkit.cpu.capture.traced_array import (
    TRACED_ROWS,
    NotCapturable,
    Operand,
    TracedArray,
    TracedPositions,
    per_row,
)
from labkit.cpu.runtime.aligned_memory import CACHE_LINE_BYTES

Array = NDArray[Any]
Parameter = TracedArray | TracedPositions | Operand | int | float

TOKEN_IDS, POSITIONS = 0, 1  # numbers of the input buffers, both int32 [rows]


@dataclass(frozen=True, slots=True)
class Node:
    """A kernel launch: an operation code of ``graph_ops``, and the parameters by name."""

    op: int
    params: Mapping[str, Operand | float]

    @property
    def out(self) -> Operand:
        """The address of the array that the launch writes."""
        out = self.params["out"]
        assert isinstance(out, Operand)
        return out

    @property
    def buffers(self) -> set[int]:
        """The numbers of the buffers that the launch reads or writes."""
        operands = [value for value in self.params.values() if isinstance(value, Operand)]
        return {operand.buffer for operand in operands if operand.buffer is not None}


@dataclass(frozen=True, slots=True)
class CapturedAttention:
    """An attention launch: its node's index, the layer, and the options of ``Attention.bind``.

    ``shapes`` contains [heads, head_dim] of the queries and, if the layer stores new keys and
    values, of the keys.
    """

    node: int
    layer: int
    scale: float
    heads: int
    window: int | None
    softcap: float | None
    sinks: Any
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """The launches of a forward pass, in order. They can be replayed with any number of rows."""

    nodes: tuple[Node, ...]  # The launches. The last one writes the logits.
    # Bytes per row of each buffer. The first two buffers are ``TOKEN_IDS`` and ``POSITIONS``.
    row_bytes: tuple[int, ...]
    vocabulary: int  # number of token ids that the model can embed
    logits_width: int  # number of logits per row
    attention: tuple[CapturedAttention, ...]  # the attention launches, in order
    # (table of cosines and sines, indices of the nodes that read the table). The nodes are needed
    # because the table's address changes when it grows.
    rotary_tables: tuple[tuple[Any, tuple[int, ...]], ...]
    # Arrays whose addresses are parameters of the nodes. The graph keeps them alive.
    keep_alive: tuple[Any, ...]


class GraphCapture:
    """Collects the launches of one forward pass.

    ``buffers`` contains the two input arrays and one array for each call of ``new_array``. Each has
    ``TRACED_ROWS`` rows, whose values are never read. ``vocabulary`` is the number of rows of the
    smallest embedding table. ``rotary_tables`` maps each table of cosines and sines to the indices
    of the nodes that read it.
    """

    def __init__(self) -> None:
        self.buffers: list[Array] = [np.empty((TRACED_ROWS, 1), np.int32) for _ in range(2)]
        self.vocabulary = 1 << 31
        self.rotary_tables: dict[Any, list[int]] = {}
        self._nodes: list[Node] = []
        self._attention: list[CapturedAttention] = []
        self._keep_alive: list[Any] = []

    def token_ids(self) -> TracedArray:
        """Return the traced token ids, int32 [rows, 1]."""
        return TracedArray(self, TOKEN_IDS, self.buffers[TOKEN_IDS])

    def positions(self) -> TracedPositions:
        """Return the traced positions of the tokens, int32 [rows]."""
        return TracedPositions(Operand(0, 0, POSITIONS))

    def new_array(self, shape: tuple[int, ...], dtype: Any = np.float32) -> TracedArray:
        """Return an array in a new buffer. Its first axis must be the rows."""
        if shape[0] != TRACED_ROWS:
            raise NotCapturable(
                f"the model makes an array of shape {shape}, whose first axis is not the step's "
                "rows"
            )
        self.buffers.append(np.empty(shape, dtype))
        return TracedArray(self, len(self.buffers) - 1, self.buffers[-1])

    def add_node(self, op: int, out: TracedArray | None, **params: Parameter) -> int:
        """Add a launch to the graph and return the index of its node.

        ``out`` must not overlap an array that the launch reads. It is None if the launch writes to
        the KV pools instead.
        """
        names = graph_ops.PARAMS[op].names or ()
        if {"out", *params} != set(names):
            raise ValueError(
                f"operation {op} was given the parameters {', '.join(sorted({'out', *params}))}; "
                f"it requires {', '.join(sorted(names))}"
            )
        operands = {"out": Operand(0, 0) if out is None else out.operand}
        self._nodes.append(Node(op, operands | {k: _operand(v) for k, v in params.items()}))
        return len(self._nodes) - 1

    def attend(
        self, layer: int, q: TracedArray, k: TracedArray | None, v: Any, options: dict[str, Any]
    ) -> TracedArray:
        """Add a layer's attention launch and return its output.

        If ``k`` is not None, another launch stores the new keys and values first. ``options``
        are the keyword arguments of ``Attention.bind``.
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
        """Keep arrays alive as long as the graph, whose nodes contain their addresses."""
        self._keep_alive += arrays

    def finish(self, logits: Any) -> CapturedGraph:
        """Return the graph. ``logits`` is the return value of the forward pass.

        Raises ``NotCapturable`` if ``logits`` is not a traced array [rows, 1, vocabulary] that the
        last launch writes.
        """
        if not isinstance(logits, TracedArray) or logits.operand != self._nodes[-1].out:
            raise NotCapturable("the model's logits are not the result of its last operation")
        if logits.shape[1:-1] != (1,):
            raise NotCapturable(
                f"the model returns logits of shape {logits.shape}, not (rows, 1, vocabulary)"
            )
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


class Lifetime(NamedTuple):
    """The indices of the first and the last node that use a buffer."""

    first: int
    last: int


def lifetimes(buffers_of_nodes: Sequence[set[int]]) -> dict[int, Lifetime]:
    """Return the lifetime of every buffer, ordered by first use.

    ``buffers_of_nodes[i]`` contains the buffers that node ``i`` reads or writes.
    """
    spans: dict[int, Lifetime] = {}
    for node, buffers in enumerate(buffers_of_nodes):
        for buffer in sorted(buffers):
            first = spans[buffer].first if buffer in spans else node
            spans[buffer] = Lifetime(first, node)
    return spans


def place_buffers(
    buffers: Mapping[int, Lifetime], num_bytes: Mapping[int, int]
) -> tuple[dict[int, int], int]:
    """Return the offset of every buffer in the arena, and the arena's size in bytes.

    A buffer reuses the memory of a buffer that is no longer in use and has the same size (rounded
    up to cache lines). If there is none, it is appended to the arena. Buffers that one node uses
    never overlap. For example, three buffers of 64 bytes, used by the nodes 0 to 1, 1 to 2 and 2 to
    3, get the offsets 0, 64 and 0.
    """
    lines = {buffer: -(-num_bytes[buffer] // CACHE_LINE_BYTES) for buffer in buffers}
    free: defaultdict[int, list[int]] = defaultdict(list)  # offsets, by the size in cache lines
    offsets: dict[int, int] = {}
    end = 0
    for node in range(1 + max((span.last for span in buffers.values()), default=-1)):
        for buffer in (b for b, span in buffers.items() if span.first == node):
            if free[lines[buffer]]:
                offsets[buffer] = free[lines[buffer]].pop(0)
            else:
                offsets[buffer], end = end, end + lines[buffer] * CACHE_LINE_BYTES
        for buffer in (b for b, span in buffers.items() if span.last == node):
            free[lines[buffer]].append(offsets[buffer])
    return offsets, end
