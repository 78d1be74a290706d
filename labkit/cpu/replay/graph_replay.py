"""Replays a captured graph: all launches of a step in one call, without Python between them.

Every thread of the pool goes through the nodes in order. A node's work is divided into units, which
threads take from a shared counter. A node begins when all units of the preceding nodes are done. A
thread that the operating system suspends delays only the unit that it has begun. Successive nodes
with only one unit are run as one task, because synchronising the threads costs more than most of
these nodes.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numba import prange, types
from numpy.typing import NDArray

from labkit.cpu.attention.attention_intrinsics import take_ticket
from labkit.cpu.attention.kernel_entry_points import AttentionLaunch, run_decode_worker
from labkit.cpu.capture import graph_capture, graph_ops
from labkit.cpu.capture.graph_capture import POSITIONS, TOKEN_IDS, CapturedGraph
from labkit.cpu.capture.traced_array import Operand
from labkit.cpu.layers.top_two_logits import CANDIDATE, MAX_PARTS, merge_candidates
from labkit.cpu.matmul.quantized_matmul import call_function
from labkit.cpu.replay.graph_attention_structs import (
    LAUNCH_BYTES,
    AttentionInputs,
    audit_launches,
    launch_at,
)
from labkit.cpu.replay.graph_op_kernels import attention_at, greedy_at, num_units, unit_address
from labkit.cpu.runtime.address_intrinsics import (
    address_of,
    fetch_add,
    float_array,
    int32_array,
    int64_array,
    load_atomic,
    struct_at,
)
from labkit.cpu.runtime.aligned_memory import aligned_zeros
from labkit.cpu.runtime.forward_clock import CLOCK_ID, FORWARD_CLOCK, ForwardClock
from labkit.cpu.runtime.jit import inner, kernel

MAX_REPLAY_ROWS = 64  # larger steps are not replayed, because Python's share of them is small
# Reads of the counter (some 20 ns each) before a waiting thread yields its core.
READS_BEFORE_YIELD = 20_000
# The addresses and counts of an ``ExecutableGraph``.
GRAPH = np.dtype(
    [
        ("nodes", np.int64),  # array of ``graph_ops.NODE``; the last two are the logits and GREEDY
        ("num_nodes", np.int64),
        ("progress", np.int64),  # int64 [1 + num_nodes]: finished units, then each node's tickets
        ("token_ids", np.int64),  # int32 [rows]
        ("positions", np.int64),  # int32 [rows]
        ("slots", np.int64),  # int64 [rows]: KV pool slots of the new keys and values
        ("vocabulary", np.int64),
        ("best_tokens", np.int64),  # int64 [rows]
        ("leads", np.int64),  # float32 [rows]
        ("began", np.int64),  # timespec [num_nodes], or 0: when each node began
    ]
)
_NODE_BYTES = graph_ops.NODE.itemsize

graph_at = struct_at("Graph", GRAPH)
node_at = struct_at("GraphNode", graph_ops.NODE)
# The field with which the parameters of every operation begin.
out_at = struct_at("GraphOut", np.dtype([("out", np.int64)]))


_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))
_TIMESPEC = np.dtype([("s", np.int64), ("ns", np.int64)])
_PRODUCTS = (
    graph_ops.MATMUL,
    graph_ops.LOW_PRECISION_MATMUL,
    graph_ops.QUANTIZE,
    graph_ops.INT8_MATMUL,
)


@inner
def _wait_until(counter: int, count: int) -> None:
    """Wait until the int64 at address ``counter`` has reached ``count``."""
    reads = 0
    while load_atomic(counter) < count:
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
    """Compute one unit of node ``i``. For an attention launch, ``unit`` is the worker's index."""
    node = node_at(graph.nodes + i * _NODE_BYTES)
    if node.op != graph_ops.ATTENTION:
        arguments = node.op, node.params, unit, units, rows, attention.launches, graph.slots
        call_function(node.unit, arguments)
        return
    number = attention_at(node.params).launch
    params = launch_at(attention.launches + number * LAUNCH_BYTES)
    launch = AttentionLaunch(
        attention.nonce + number, params.body, params.params, attention.scratch,
        attention.counters[number], attention.cu_seqlens_q, attention.seq_lens,
        params.num_q_heads, params.heads_per_unit, 1,
    )  # fmt: skip
    run_decode_worker(unit, launch, lookup)


@inner
def _run_thread(
    graph: Any, rows: int, workers: int, lookup: Any, attention: AttentionInputs
) -> None:
    """Run one thread's part of a replay: go through all nodes in order and take units of each."""
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
                if graph.began != 0 and unit == 0:
                    _clock_gettime(CLOCK_ID, graph.began + 16 * node)
                _run_node(graph, node, unit, units, rows, lookup, attention)
            fetch_add(graph.progress, 1)
            unit = take_ticket(tickets)
        due += units
        i = after


@inner
def _begin(
    graph: Any, tokens: NDArray[Any], logits: NDArray[Any], attention: AttentionInputs
) -> bool:
    """Set a step's inputs: token ids, positions, KV slots, the logits' address and the counters.

    Returns False if a token id is not in the model's vocabulary.
    """
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
    greedy = greedy_at(node_at(graph.nodes + (graph.num_nodes - 1) * _NODE_BYTES).params)
    tokens, leads = int64_array(graph.best_tokens, rows), float_array(graph.leads, rows)
    merge_candidates(greedy.out, greedy.vocabulary, tokens, leads)


# All writes to memory are in separate functions: in a parallel kernel, numba removes assignments to
# arrays that are neither arguments nor read afterwards as dead code.
@kernel
def replay(
    graph_address: int,  # of a ``GRAPH``
    tokens: NDArray[Any],  # int32 [rows]: the token ids
    logits: NDArray[Any],  # float32 [rows, vocabulary]: the output
    lookup: Any,
    attention: AttentionInputs,
) -> int:
    """Run the launches of a step and return the number of attention launches with a wrong stamp.

    If a token id is not in the model's vocabulary, nothing is run and -1 is returned. The type of
    ``lookup`` selects the resolver at compile time, as in ``kernel_entry_points.decode``.
    """
    if not _begin(graph_at(graph_address), tokens, logits, attention):
        return -1
    rows, workers = len(tokens), attention.counters.shape[1] - 1
    for _ in prange(workers):
        _run_thread(graph_at(graph_address), rows, workers, lookup, attention)
    _choose_greedily(graph_at(graph_address), rows)
    return audit_launches(attention)


class ExecutableGraph:
    """A captured graph with its own memory, for steps of up to ``MAX_REPLAY_ROWS`` rows.

    Only one step may run at a time. After a step, ``best_tokens`` contains the token id with the
    largest logit of each row (of equal logits, the lowest id), and ``leads`` the difference to the
    second-largest logit.
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
        self._nodes["unit"] = [unit_address(op) for op in self._ops]
        self._nodes["params"] = address_of(self._words) + graph_ops.WORD_BYTES * self._starts[:-1]
        self._progress = np.zeros(1 + len(self._ops), np.int64)
        self._began = np.zeros(len(self._ops), _TIMESPEC)
        self._is_attention = np.isin(self._ops, (graph_ops.STORE_KV, graph_ops.ATTENTION))
        self._is_product = np.isin(self._ops, _PRODUCTS)
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
        """Place the buffers, and set the constant and the per-row part of every parameter."""
        graph = self.captured
        lifetimes = graph_capture.lifetimes([node.buffers for node in graph.nodes])
        elsewhere = (TOKEN_IDS, POSITIONS, graph.nodes[-1].out.buffer)  # the last one: the logits
        lifetimes = {b: span for b, span in lifetimes.items() if b not in elsewhere}
        num_bytes = {buffer: MAX_REPLAY_ROWS * size for buffer, size in enumerate(graph.row_bytes)}
        offsets, size = graph_capture.place_buffers(lifetimes, num_bytes)
        self._arena = aligned_zeros(1, size)
        start = address_of(self._arena)
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
        """Return the indices of parameter ``name`` of the given nodes in the array of words."""
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
        struct["vocabulary"] = self.captured.vocabulary
        return struct

    def set_shape(self, rows: int, num_positions: int) -> None:
        """Set the parameters for a step of ``rows`` rows at positions below ``num_positions``."""
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
        """The address of each attention launch's queries, for the shape set by ``set_shape``."""
        addresses: NDArray[np.int64] = self._words[self._query_words]
        return addresses

    @property
    def output_addresses(self) -> NDArray[np.int64]:
        """The address of each attention launch's output, for the shape set by ``set_shape``."""
        addresses: NDArray[np.int64] = self._words[self._output_words]
        return addresses

    def run(
        self,
        tokens: NDArray[np.int32],
        logits: NDArray[np.float32],
        lookup: Any,
        attention: AttentionInputs,
    ) -> int:
        """Run a step of the shape set by ``set_shape`` and return the result of ``replay``."""
        clock = FORWARD_CLOCK.get()
        self._struct["began"] = 0 if clock is None else address_of(self._began)
        num_wrong: int = replay(self._address, tokens, logits, lookup, attention)
        if clock is not None and num_wrong >= 0:
            self._add_times(clock, time.clock_gettime_ns(CLOCK_ID))
        return num_wrong

    def _add_times(self, clock: ForwardClock, end_ns: int) -> None:
        """Add the times of the last step's nodes. A node ends when the next one begins."""
        began = self._began["s"] * 1_000_000_000 + self._began["ns"]
        seconds = np.diff(began, append=end_ns) / 1e9
        clock.attention += float(seconds[self._is_attention].sum())
        clock.products += float(seconds[self._is_product].sum())
        clock.sample += float(seconds[-1])
        clock.nodes += len(seconds)
