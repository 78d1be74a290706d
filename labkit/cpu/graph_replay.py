"""Replays a captured graph: all launches of a step in one call, without Python between them.

Every thread of the pool goes through the nodes in order. A node's work is cut into units that
threads take by ticket. A node begins when all units of the nodes before are done, by any thread:
a thread that the system suspends holds up only what it has begun, as in the pool itself.
Successive nodes of one unit are one task, because a meeting of the threads costs more than most
such nodes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numpy.typing import NDArray

from labkit.cpu import graph_memory, graph_ops
from labkit.cpu.address_views import (
    address_of,
    float_array,
    int32_array,
    int64_array,
    struct_at,
)
from labkit.cpu.aligned_memory import CACHE_LINE_BYTES
from labkit.cpu.attention_intrinsics import call_body, take_ticket
from labkit.cpu.attention_launch import AttentionLaunch, run_decode_worker
from labkit.cpu.graph_attention import LAUNCH_BYTES, AttentionInputs, launch_at
from labkit.cpu.graph_capture import POSITIONS, TOKEN_IDS, CapturedGraph
from labkit.cpu.graph_op_kernels import attention_at, compute_unit, greedy_at, num_units
from labkit.cpu.greedy_sampling import CANDIDATE, MAX_PARTS, merge_candidates
from labkit.cpu.jit import inner, intrinsic, kernel
from labkit.cpu.launch_stamps import audit_launches
from labkit.cpu.simd_emitter import POINTER
from labkit.cpu.traced_array import Operand

MAX_REPLAY_ROWS = 64  # of a step that is replayed: in larger ones Python's share is small
# Reads of the counter, of some 20 ns each, before a waiting thread lets another have its core.
READS_BEFORE_YIELD = 20_000
# The addresses and counts of an executable graph, see ``ExecutableGraph``.
GRAPH = np.dtype(
    [
        ("nodes", np.int64),  # array of ``graph_ops.NODE``: the last two write logits and GREEDY
        ("num_nodes", np.int64),
        ("compute_unit", np.int64),
        ("progress", np.int64),  # int64 [1 + num_nodes]: units that are done, each node's tickets
        ("token_ids", np.int64),  # int32 [rows]
        ("positions", np.int64),  # int32 [rows]
        ("slots", np.int64),  # int64 [rows]: of the KV pools, for new keys and values
        ("vocabulary", np.int64),
        ("best_tokens", np.int64),  # int64 [rows]
        ("leads", np.int64),  # float32 [rows]
    ]
)
_NODE_BYTES = graph_ops.NODE.itemsize

graph_at = struct_at("Graph", GRAPH)
node_at = struct_at("GraphNode", graph_ops.NODE)
out_at = struct_at("GraphOut", np.dtype([("out", np.int64)]))  # with which all parameters begin


@intrinsic
def _add_one(typing_context: Any, counter: Any) -> Any:
    """Add one to the int64 at an address, after all that was written before."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], POINTER)
        builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "seq_cst")
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def _read(typing_context: Any, counter: Any) -> Any:
    """Read the int64 at an address, before all that is read after."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.int64), emit


_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@inner
def _wait_until(counter: int, count: int) -> None:
    """Wait until the int64 at an address has reached ``count``."""
    reads = 0
    while _read(counter) < count:
        reads += 1
        if reads > READS_BEFORE_YIELD:
            _sched_yield()


@inner
def _units_of(graph: Any, i: int, rows: int, workers: int) -> int:
    node = node_at(graph.nodes + i * _NODE_BYTES)
    units: int = num_units(node.op, node.params, rows, workers)
    return units


@inner
def _run_node(
    graph: Any, i: int, unit: int, units: int, rows: int, lookup: Any, attention: AttentionInputs
) -> None:
    """Compute one unit of a node; of an attention launch, ``unit`` is the worker."""
    node = node_at(graph.nodes + i * _NODE_BYTES)
    if node.op != graph_ops.ATTENTION:
        call_body(
            graph.compute_unit, node.op, node.params, unit, units, rows, attention.launches,
            graph.slots,
        )  # fmt: skip
        return
    number = attention_at(node.params).launch
    params = launch_at(attention.launches + number * LAUNCH_BYTES)
    launch = AttentionLaunch(
        attention.nonce + number, params.body, params.params, attention.scratch,
        attention.counters[number], attention.cu_seqlens_q, attention.seq_lens,
        params.num_kv_heads, params.kv_heads_per_unit, 1,
    )  # fmt: skip
    run_decode_worker(unit, launch, lookup)


@inner
def _run_thread(
    graph: Any, rows: int, workers: int, lookup: Any, attention: AttentionInputs
) -> None:
    """Be one thread of a replay: go through the nodes, and take their units by ticket."""
    due, i = 0, 0  # units of all nodes before node i
    while i < graph.num_nodes:
        units, after = _units_of(graph, i, rows, workers), i + 1
        if units == 1:
            while after < graph.num_nodes and _units_of(graph, after, rows, workers) == 1:
                after += 1
        _wait_until(graph.progress, due)
        tickets = graph.progress + 8 * (1 + i)
        unit = take_ticket(tickets)
        while unit < units:
            for node in range(i, after):
                _run_node(graph, node, unit, units, rows, lookup, attention)
            _add_one(graph.progress)
            unit = take_ticket(tickets)
        due += units
        i = after


@inner
def _begin(
    graph: Any, tokens: NDArray[Any], logits: NDArray[Any], attention: AttentionInputs
) -> bool:
    """Set what a step begins with; return False where the model lacks one of its tokens."""
    rows = len(tokens)
    token_ids, positions = int32_array(graph.token_ids, rows), int32_array(graph.positions, rows)
    for row in range(rows):
        if not 0 <= tokens[row] < graph.vocabulary:
            return False
        token_ids[row] = tokens[row]
    slots, size = int64_array(graph.slots, rows), attention.block_size
    for i in range(len(attention.seq_lens)):
        begin, end = attention.cu_seqlens_q[i], attention.cu_seqlens_q[i + 1]
        for row in range(begin, end):
            position = positions[row] = attention.seq_lens[i] - end + row
            slots[row] = attention.block_tables[i, position // size] * size + position % size
    last = graph.nodes + (graph.num_nodes - 2) * _NODE_BYTES
    out_at(node_at(last).params).out = logits.ctypes.data
    greedy_at(node_at(last + _NODE_BYTES).params).logits = logits.ctypes.data
    int64_array(graph.progress, 1 + graph.num_nodes)[:] = 0
    attention.counters[:, -1, 0] = 0  # the queues
    return True


@inner
def _choose_greedily(graph: Any, rows: int) -> None:
    """Write the greedy choice of each row, from the candidates that the last node found."""
    greedy = greedy_at(node_at(graph.nodes + (graph.num_nodes - 1) * _NODE_BYTES).params)
    tokens, leads = int64_array(graph.best_tokens, rows), float_array(graph.leads, rows)
    merge_candidates(greedy.out, greedy.vocabulary, tokens, leads)


# What writes to memory is in functions of its own: in a parallel kernel numba takes an assignment
# to an array that is neither an argument nor read afterwards for dead code.
@kernel
def replay(
    graph_address: int,
    tokens: NDArray[Any],
    logits: NDArray[Any],
    lookup: Any,
    attention: AttentionInputs,
) -> int:
    """Run the launches of a step; return how many attention launches left a wrong stamp.

    -1 where the model lacks one of the tokens: nothing was run.

    Parameters
    ----------
    graph_address
        Of a ``GRAPH``.
    tokens
        int32 [rows].
    logits
        float32 [rows, vocabulary], written.
    lookup
        As in ``attention_launch.decode``: its type says which resolver the kernel is compiled for.
    attention
        The inputs to the attention launches.
    """
    if not _begin(graph_at(graph_address), tokens, logits, attention):
        return -1
    rows, workers = len(tokens), attention.counters.shape[1] - 1
    for _ in prange(workers):
        _run_thread(graph_at(graph_address), rows, workers, lookup, attention)
    _choose_greedily(graph_at(graph_address), rows)
    return audit_launches(attention)


class ExecutableGraph:
    """A captured graph with memory of its own, for steps of up to ``MAX_REPLAY_ROWS`` rows.

    It runs one step at a time. After a step ``best_tokens`` and ``leads`` hold the greedy choice
    of its rows: the best token, the lowest of equals, and its lead over the next best.
    """

    def __init__(self, graph: CapturedGraph) -> None:
        self.captured = graph
        self.best_tokens = np.zeros(MAX_REPLAY_ROWS, np.int64)
        self.leads = np.zeros(MAX_REPLAY_ROWS, np.float32)
        self._token_ids = np.zeros(MAX_REPLAY_ROWS, np.int32)
        self._positions = np.zeros(MAX_REPLAY_ROWS, np.int32)
        self._slots = np.zeros(MAX_REPLAY_ROWS, np.int64)
        self._candidates = np.zeros(MAX_REPLAY_ROWS * MAX_PARTS, CANDIDATE)
        self._ops = [*(node.op for node in graph.nodes), graph_ops.GREEDY]
        self._starts = np.cumsum([0, *map(graph_ops.num_words, self._ops)])
        self._set_words()
        self._nodes = np.zeros(len(self._ops), graph_ops.NODE)
        self._nodes["op"] = self._ops
        self._nodes["params"] = address_of(self._words) + graph_ops.WORD_BYTES * self._starts[:-1]
        self._progress = np.zeros(1 + len(self._ops), np.int64)
        self._struct = self._new_struct()
        self._address = address_of(self._struct)
        self._rows = 0
        self._tables = [
            (table, self._words_of(nodes, "cos"), self._words_of(nodes, "sin"))
            for table, nodes in graph.rotary_tables
        ]
        self._table_addresses: list[tuple[int, int]] = []
        attention = [launch.node for launch in graph.attention]
        self._query_words = self._words_of(attention, "q")
        self._output_words = self._words_of(attention, "out")

    def _set_words(self) -> None:
        """Place the buffers, and fill in the parameters by the number of rows."""
        graph = self.captured
        lifetimes = graph_memory.lifetimes([node.buffers for node in graph.nodes])
        elsewhere = (TOKEN_IDS, POSITIONS, graph.nodes[-1].out.buffer)  # logits are the caller's
        lifetimes = {b: span for b, span in lifetimes.items() if b not in elsewhere}
        num_bytes = {buffer: MAX_REPLAY_ROWS * size for buffer, size in enumerate(graph.row_bytes)}
        offsets, size = graph_memory.place_buffers(lifetimes, num_bytes)
        self._arena = np.empty(size + CACHE_LINE_BYTES, np.uint8)
        start = -(-address_of(self._arena) // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        addresses = {buffer: start + offset for buffer, offset in offsets.items()}
        addresses[TOKEN_IDS] = address_of(self._token_ids)
        addresses[POSITIONS] = address_of(self._positions)
        self._constants, self._per_row = np.zeros((2, self._starts[-1]), np.int64)
        self._words = np.zeros_like(self._constants)
        floats = self._constants.view(np.float64)
        for node, first in zip(graph.nodes, self._starts, strict=False):
            for name, value in node.params.items():
                word = first + graph_ops.word_of(node.op, name)
                if isinstance(value, Operand):
                    base = 0 if value.buffer is None else addresses.get(value.buffer, 0)
                    self._constants[word] = value.constant + base
                    self._per_row[word] = value.per_row
                else:
                    floats[word] = value
        greedy = {"out": address_of(self._candidates), "vocabulary": graph.logits_width}
        for name, number in greedy.items():
            self._constants[self._words_of([-1], name)] = number

    def _words_of(self, nodes: Any, name: str) -> NDArray[np.int64]:
        """Return where the parameter ``name`` of some nodes lies among the words."""
        numbers = [range(len(self._ops))[node] for node in nodes]
        words = [self._starts[i] + graph_ops.word_of(self._ops[i], name) for i in numbers]
        return np.array(words, np.int64)

    def _new_struct(self) -> NDArray[Any]:
        arrays = {
            "nodes": self._nodes,
            "progress": self._progress,
            "token_ids": self._token_ids,
            "positions": self._positions,
            "slots": self._slots,
            "best_tokens": self.best_tokens,
            "leads": self.leads,
        }
        struct = np.zeros(1, GRAPH)
        for name, array in arrays.items():
            struct[name] = address_of(array)
        struct["num_nodes"] = len(self._nodes)
        struct["compute_unit"] = compute_unit.address
        struct["vocabulary"] = self.captured.vocabulary
        return struct

    def set_shape(self, rows: int, num_positions: int) -> None:
        """Set the parameters for a step of ``rows`` tokens at positions below ``num_positions``."""
        tables = [table.hold(num_positions) for table, _, _ in self._tables]
        if rows == self._rows and tables == self._table_addresses:
            return
        np.multiply(self._per_row, rows, out=self._words)
        self._words += self._constants
        for (_, cos_words, sin_words), (cos, sin) in zip(self._tables, tables, strict=True):
            self._words[cos_words], self._words[sin_words] = cos, sin
        self._rows, self._table_addresses = rows, tables

    @property
    def query_addresses(self) -> NDArray[np.int64]:
        """The addresses of the queries of each attention launch, in the shape that was set."""
        addresses: NDArray[np.int64] = self._words[self._query_words]
        return addresses

    @property
    def output_addresses(self) -> NDArray[np.int64]:
        """The addresses of the outputs of each attention launch, in the shape that was set."""
        addresses: NDArray[np.int64] = self._words[self._output_words]
        return addresses

    def run(
        self,
        tokens: NDArray[np.int32],
        logits: NDArray[np.float32],
        lookup: Any,
        attention: AttentionInputs,
    ) -> int:
        """Run a step of the shape that was set; return what ``replay`` returns."""
        num_wrong: int = replay(self._address, tokens, logits, lookup, attention)
        return num_wrong
