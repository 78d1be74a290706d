"""Replays a recorded forward: all launches of a step in one call, without Python between them.

Every thread of the pool walks the launches in order. A launch is so many units, taken by ticket;
the next one begins when all units of those before are done, whoever did them. So a thread that the
system keeps from its core holds up nothing that it has not begun, as in the pool itself. Launches
of one unit that follow each other are one to the threads: to meet costs more than most of them.

What a unit computes is what the launch of its own computes, by the same functions: a row's bits
are the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, prange, types
from numba.core import cgutils
from numpy.typing import NDArray

from labkit.cpu import activations, norms, rope
from labkit.cpu.activations import activate
from labkit.cpu.attention_intrinsics import call_body, load_float, take_ticket
from labkit.cpu.attention_launch import AttentionLaunch, KVWrite, run_decode_worker, write_token_kv
from labkit.cpu.gemm import (
    BLOCK_ROWS,
    MIN_PARALLEL_FMAS,
    PANEL_COLUMNS,
    WEIGHT_COST,
    multiply_panels,
    take_packed_row,
)
from labkit.cpu.graph_capture import (
    ACTIVATE,
    ADD,
    ATTEND,
    BODY,
    CHOOSE,
    CODE,
    ELEMENT,
    EXPECTED,
    FIELDS,
    FIRST,
    HEADS,
    K_POOL,
    KIND,
    KV_HEADS,
    LAUNCH_FIELDS,
    LAYER,
    LEFT_BLOCKS,
    LEFT_ITERATIONS,
    LEFT_SURPLUS,
    LOOK_UP,
    LOOK_UP_PACKED,
    LOOK_UP_STORED,
    MAX_REPLAY_ROWS,
    MULTIPLY,
    OFF,
    OUT,
    PRODUCT,
    RMS_NORM,
    ROTATE,
    SCALE,
    SCATTER,
    SHOWN,
    SLOT_NUMBERS,
    STORED_PRODUCT,
    V_POOL,
    CapturedGraph,
    address_of,
)
from labkit.cpu.jit import inlined, inner, intrinsic, kernel
from labkit.cpu.low_precision_matmul import MAX_FUSED_ROWS, multiply_task, take_row
from labkit.cpu.low_precision_weights import SPAN_COLUMNS, SPAN_PANELS
from labkit.cpu.microkernels import ROW_PANELS
from labkit.cpu.norms import rms_row
from labkit.cpu.rope import rotate_row
from labkit.cpu.simd_emitter import CACHE_LINE_BYTES, I32, I64, POINTER, VECTOR_BYTES, Emitter
from labkit.cpu.vector_registers import LANES
from labkit.kernel_abi import (
    BLOCKS_COLUMN,
    ITERATIONS_COLUMN,
    STAMP_COLUMN,
    STAMP_FACTORS,
    STAMP_MASK,
    SURPLUS_COLUMN,
)

SHARES = 4  # units per thread of a large product: a late thread costs so much less
# Multiplications, with ``WEIGHT_COST``, below which a product is one unit per thread: where memory
# is read anew, what is read first is waited for, and that took a tenth of a step.
SHARED_ABOVE = 1 << 27
CHUNK = 4096  # numbers of a unit that combines two arrays
PATIENCE = 20_000  # looks, each some 20 ns, before a thread leaves its core to another
FUNCTIONS = 5  # of a form of stored weights
FIRST_BYTES = 8192  # of a unit's weights, asked for at once; what follows its product asks for
STRIDE = 4 * CACHE_LINE_BYTES  # bytes that are asked for at once
COSINES, SINES = 6, 7  # of a rotation's operands
LOOK = 64  # logits that are looked through at once
PART = 4096  # logits of a unit, at least, that looks for the best
MOST_PARTS = 8  # of a row
BEST, SECOND, PLACE, FOUND = range(4)  # what a unit finds, float64; the last: how many
COMPUTE, IDS, PLACES, CHOSEN, LEADS, VOCABULARY = range(6)  # what is told once, for all steps


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    """Return an address as a pointer to anything."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), emit


@intrinsic
def _float(typing_context: Any, bits: Any) -> Any:
    """Return the float32 of these bits."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.trunc(arguments[0], I32), ir.FloatType())

    return types.float32(types.int64), emit


@intrinsic
def _double(typing_context: Any, bits: Any) -> Any:
    """Return the float64 of these bits."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), emit


@intrinsic
def _finish(typing_context: Any, counter: Any) -> Any:
    """Add one to the int64 at an address, after all that was written before."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], POINTER)
        builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "seq_cst")
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def _finished(typing_context: Any, counter: Any) -> Any:
    """Read the int64 at an address, before all that is read after."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.int64), emit


@intrinsic
def _prefetch(typing_context: Any, address: Any) -> Any:
    """Ask for ``STRIDE`` bytes."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code = Emitter(builder)
        for line in range(0, STRIDE, CACHE_LINE_BYTES):
            code.prefetch(builder.add(arguments[0], I64(line)))
        return context.get_dummy_value()

    return types.void(types.int64), emit


@intrinsic
def _any_above(typing_context: Any, address: Any, bound: Any) -> Any:
    """Tell whether one of ``LOOK`` float32 at an address is not below or at a bound."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        code, above = Emitter(builder), None
        limit = code.splat(arguments[1])
        for vector in range(LOOK // LANES):
            one = builder.fcmp_unordered(">", code.load(arguments[0], VECTOR_BYTES * vector), limit)
            above = one if above is None else builder.or_(above, one)
        mask = ir.IntType(LANES)
        return builder.icmp_unsigned("!=", builder.bitcast(above, mask), mask(0))

    return types.boolean(types.int64, types.float32), emit


_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@inlined
def _floats(address: int, size: int) -> Any:
    return carray(_pointer(address), (size,), np.float32)


@inlined
def _rows(address: int, rows: int, width: int) -> Any:
    return carray(_pointer(address), (rows, width), np.float32)


@inlined
def _int32s(address: int, size: int) -> Any:
    return carray(_pointer(address), (size,), np.int32)


@inner
def _tasks(op: Any, rows: int) -> int:
    """Return into how many tasks a product falls."""
    panels: int = op[7]
    if op[0] == STORED_PRODUCT:
        return panels // SPAN_PANELS if rows <= MAX_FUSED_ROWS else panels
    step = ROW_PANELS if rows == 1 else 1
    return (panels + step - 1) // step * ((rows + BLOCK_ROWS - 1) // BLOCK_ROWS)


@inner
def _parts(width: int) -> int:
    """Return into how many parts a row of logits is cut."""
    return max(1, min(MOST_PARTS, width // PART))


@inner
def _units(op: Any, rows: int, workers: int) -> int:
    """Return into how many units a launch is cut; a small one is not."""
    code, units = int(op[0]), rows
    if code == ATTEND:
        units = workers
    elif code in (PRODUCT, STORED_PRODUCT):
        cost = op[7] * PANEL_COLUMNS * op[3] * (rows + WEIGHT_COST)
        shares = 1 if cost < SHARED_ABOVE else SHARES
        units = 1 if cost < MIN_PARALLEL_FMAS else min(_tasks(op, rows), shares * workers)
    elif code == ACTIVATE:
        units = 1 if op[4] < activations.MIN_PARALLEL_NUMBERS else (op[4] + CHUNK - 1) // CHUNK
    elif code in (ADD, MULTIPLY, SCALE):
        units = (op[4] + 4 * CHUNK - 1) // (4 * CHUNK)
    elif code == RMS_NORM:
        units = 1 if op[3] * op[4] < norms.MIN_PARALLEL_NUMBERS else rows
    elif code == CHOOSE:
        units = rows * _parts(op[3])
    elif code == ROTATE:
        units = 1 if rows * op[3] * op[4] < rope.MIN_PARALLEL_NUMBERS else rows
    return units


@inner
def _share(unit: int, units: int, count: int) -> Any:
    """Return the first and the last but one of a unit's part of ``count``."""
    return count * unit // units, count * (unit + 1) // units


@inner
def _product(op: Any, rows: int, first: int, end: int) -> None:
    depth, panels, total = op[3], op[7], op[8]
    x, out = _rows(op[2], rows, depth), _floats(op[1], rows * total)
    bias = _floats(op[5], panels * PANEL_COLUMNS)
    columns = carray(_pointer(op[6]), (panels, 3), np.int64)
    if op[0] == PRODUCT:
        packed = carray(_pointer(op[4]), (panels, depth, PANEL_COLUMNS), np.float32)
        step = ROW_PANELS if rows == 1 else 1
        groups = (panels + step - 1) // step
        for task in range(first, end):
            multiply_panels(task % groups * step, task // groups, x, packed, bias, columns, out)
    else:
        functions = carray(_pointer(op[9]), (FUNCTIONS,), np.int64)
        spans = carray(_pointer(op[4]), (panels // SPAN_PANELS, op[12]), np.uint8)
        if rows <= MAX_FUSED_ROWS:
            for at in range(0, FIRST_BYTES, STRIDE):
                _prefetch(op[4] + first * op[12] + at)
        for task in range(first, end):
            multiply_task(task, functions, op[10], op[11], x, spans, bias, columns, out)


@inner
def _look_up(op: Any, token: int, row: int) -> None:
    width = op[3]
    out = _floats(op[1] + 4 * row * width, width)
    if op[0] == LOOK_UP:
        table = _floats(op[4] + 4 * token * width, width)
        for i in range(width):
            out[i] = table[i]
    elif op[0] == LOOK_UP_PACKED:
        take_packed_row(
            token, carray(_pointer(op[4]), (op[7], width, PANEL_COLUMNS), np.float32), out
        )
    else:
        functions = carray(_pointer(op[9]), (FUNCTIONS,), np.int64)
        spans = carray(_pointer(op[4]), (token // SPAN_COLUMNS + 1, op[12]), np.uint8)
        take_row(token, functions, op[10], op[11], spans, out)


@inner
def _rotate(op: Any, first: int, end: int) -> None:
    heads, width, half = op[3], op[4], op[8]
    x, out = _rows(op[2], end * heads, width), _rows(op[1], end * heads, width)
    positions = _int32s(op[5], end)
    cos, sin = _rows(op[6], 1 << 30, half), _rows(op[7], 1 << 30, half)
    scale, traditional = _float(op[9]), op[10] != 0
    for token in range(first, end):
        for head in range(heads):
            row, at = token * heads + head, positions[token]
            rotate_row(x, row, cos, sin, at, scale, traditional, out)


@inner
def _combine(op: Any, first: int, end: int) -> None:
    size, code = end - first, op[0]
    a, out = _floats(op[2] + 4 * first, size), _floats(op[1] + 4 * first, size)
    if code == SCALE:
        factor = _float(op[3])
        for i in range(size):
            out[i] = a[i] * factor
        return
    b = _floats(op[3] + 4 * first, size)
    if code == ADD:
        for i in range(size):
            out[i] = a[i] + b[i]
    elif code == MULTIPLY:
        for i in range(size):
            out[i] = a[i] * b[i]
    else:
        activate(op[5], a, b, out)


@inner
def _normalise(op: Any, first: int, end: int) -> None:
    width = op[4]
    weight, eps = _floats(op[5], width), _double(op[6])
    for row in range(first, end):
        offset = 4 * row * width
        rms_row(_floats(op[2] + offset, width), weight, eps, _floats(op[1] + offset, width))


@inner
def _choose(op: Any, unit: int) -> None:
    """Find the best of a part of a row, and the next best; a NaN makes both NaN."""
    width = op[3]
    parts = _parts(width)
    first, end = _share(unit % parts, parts, width)
    row = op[2] + 4 * (unit // parts) * width
    best, second, place = np.float32(-np.inf), np.float32(-np.inf), first
    while first < end:
        stop = first + LOOK
        # Most logits are not better than the second: they are passed by all at once.
        if stop > end or _any_above(row + 4 * first, second):
            for i in range(first, min(stop, end)):
                value = load_float(row + 4 * i)
                if value > best:
                    best, second, place = value, best, i
                elif value > second:
                    second = value
                elif value != value:
                    best = second = value
        first = stop
    found = carray(_pointer(op[1]), (unit + 1, FOUND), np.float64)
    found[unit, BEST], found[unit, SECOND], found[unit, PLACE] = best, second, place


@inner
def _best(op: Any, rows: int, tokens: NDArray[Any], leads: NDArray[Any]) -> None:
    """Say of each row which token is the best (the lowest of equals), and its lead."""
    parts = _parts(op[3])
    found = carray(_pointer(op[1]), (rows * parts, FOUND), np.float64)
    for row in range(rows):
        best, second, place = found[row * parts, 0], found[row * parts, 1], found[row * parts, 2]
        for i in range(row * parts + 1, (row + 1) * parts):
            if found[i, BEST] > best:
                second = max(best, found[i, SECOND])
                best, place = found[i, BEST], found[i, PLACE]
            elif found[i, BEST] > second:
                second = found[i, BEST]
            elif found[i, BEST] != found[i, BEST]:
                best = second = found[i, BEST]
        tokens[row], leads[row] = place, np.float32(best) - np.float32(second)


@inner
def _audit(first: int, launches: NDArray[Any], counters: NDArray[Any], left: NDArray[Any]) -> int:
    """Return how many launches' stamps are not the host's; add up what the workers counted."""
    wrong = 0
    left[:, SHOWN], left[:, OFF] = -1, 0
    for i in range(len(launches)):
        expected, mine = (first + i * STAMP_FACTORS[0]) & STAMP_MASK, left[launches[i, KIND]]
        off = 0
        for worker in range(counters.shape[1] - 1):
            if off == 0:
                off = (counters[i, worker, STAMP_COLUMN] - worker - expected) & STAMP_MASK
            mine[LEFT_ITERATIONS] += counters[i, worker, ITERATIONS_COLUMN]
            mine[LEFT_BLOCKS] += counters[i, worker, BLOCKS_COLUMN]
            mine[LEFT_SURPLUS] += counters[i, worker, SURPLUS_COLUMN]
        wrong += off != 0
        if mine[SHOWN] < 0 or (off != 0 and mine[OFF] == 0):
            mine[EXPECTED], mine[SHOWN], mine[OFF] = expected, i, off
    return wrong


@inner
def _compute(op: Any, unit: int, units: int, rows: int, mine: Any, slots: Any) -> None:
    """Compute one unit of a launch that is not attention's; ``mine``: of a layer, for its keys."""
    code = op[0]
    if code in (PRODUCT, STORED_PRODUCT):
        first, end = _share(unit, units, _tasks(op, rows))
        _product(op, rows, first, end)
    elif code in (ADD, MULTIPLY, SCALE, ACTIVATE):
        first, end = _share(unit, units, op[4])
        _combine(op, first, end)
    elif code == RMS_NORM:
        first, end = _share(unit, units, op[3])
        _normalise(op, first, end)
    elif code == ROTATE:
        first, end = _share(unit, units, rows)
        _rotate(op, first, end)
    elif code == CHOOSE:
        _choose(op, unit)
    elif code in (LOOK_UP, LOOK_UP_PACKED, LOOK_UP_STORED):
        first, end = _share(unit, units, rows)
        for row in range(first, end):
            _look_up(op, int(_int32s(op[2], rows)[row]), row)
    else:
        first, end = _share(unit, units, rows)
        for token in range(first, end):
            write = KVWrite(
                mine[ELEMENT], op[2], op[3], mine[K_POOL], mine[V_POOL], slots, mine[SLOT_NUMBERS]
            )
            write_token_kv(write, token)


@cfunc("int64(int64, int64, int64, int64, int64, int64, int64)", cache=True, error_model="numpy")
def compute(op, unit, units, rows, mine, slots, _unused):  # type: ignore[no-untyped-def]
    """Compute one unit, by addresses: compiled once, for every lookup."""
    _compute(
        carray(_pointer(op), (FIELDS,), np.int64),
        unit,
        units,
        rows,
        carray(_pointer(mine), (LAUNCH_FIELDS,), np.int64),
        carray(_pointer(slots), (rows,), np.int64),
    )
    return 0


@kernel
def replay(
    fixed: NDArray[Any],
    ops: NDArray[Any],
    state: NDArray[Any],
    tokens: NDArray[Any],
    logits: NDArray[Any],
    nonce: int,
    stamp: int,
    lookup: Any,
    launches: NDArray[Any],
    memory: NDArray[Any],
    counters: NDArray[Any],
    left: NDArray[Any],
    tables: NDArray[Any],
    block_size: int,
    cu_seqlens_q: NDArray[Any],
    seq_lens: NDArray[Any],
) -> int:
    """Run the launches of a step; return how many left another's stamp.

    -1: there is no such token, and nothing was run.

    Parameters
    ----------
    fixed
        int64: addresses, and how many tokens there are; see ``ExecutableGraph``.
    ops
        int64 [launches, fields], as in ``recording``; the last is ``CHOOSE``.
    state
        int64 [1 + launches]: units that are done, and each launch's next ticket.
    tokens
        int32 [rows].
    logits
        float32 [rows, vocabulary], written.
    nonce, stamp
        The first attention launch's number, and the stamp that the host expects of it; those after
        it count on.
    lookup, memory, cu_seqlens_q, seq_lens
        As in ``AttentionLaunch``.
    launches
        int64 [launches of attention, ``LAUNCH_FIELDS``].
    counters
        int64 [launches of attention, workers + 1, ``COUNTER_COLUMNS``]: as in
        ``AttentionLaunch``.
    left
        int64 [kinds of layers, ``LEFT_FIELDS``]: overwritten with what launches of the kind left.
        What they counted is added to what is there.
    tables
        int32 [sequences, max_blocks]: their blocks, of so many tokens each.
    """
    rows, workers = len(tokens), counters.shape[1] - 1
    body, ids, positions = fixed[COMPUTE], _int32s(fixed[IDS], rows), _int32s(fixed[PLACES], rows)
    for row in range(rows):
        if not 0 <= tokens[row] < fixed[VOCABULARY]:
            return -1
        ids[row] = tokens[row]
    slots = np.empty(rows, np.int64)
    for i in range(len(seq_lens)):  # where tokens are, and where new keys and values go
        begin, end = cu_seqlens_q[i], cu_seqlens_q[i + 1]
        for row in range(begin, end):
            at = positions[row] = seq_lens[i] - end + row
            slots[row] = tables[i, at // block_size] * block_size + at % block_size
    slots_at = slots.ctypes.data
    state[:] = 0
    ops[len(ops) - 2, OUT] = ops[len(ops) - 1, FIRST] = logits.ctypes.data
    counters[:, workers, 0] = 0  # the queues
    done = np.int64(state.ctypes.data)
    for _ in prange(workers):
        before, i = 0, 0
        while i < len(ops):
            op = ops[i]
            units, after = _units(op, rows, workers), i + 1
            if units == 1:  # with all of one unit that follow: nobody else could begin them
                while after < len(ops) and _units(ops[after], rows, workers) == 1:
                    after += 1
            looks = 0
            while _finished(done) < before:
                looks += 1
                if looks > PATIENCE:
                    _sched_yield()
            ticket = done + 8 * (1 + i)
            unit = take_ticket(ticket)
            while unit < units:
                for one in range(i, after):
                    op = ops[one]
                    if op[0] == ATTEND:
                        mine = launches[op[3]]
                        launch = AttentionLaunch(
                            nonce + op[3], mine[BODY], mine[LAYER], memory, counters[op[3]],
                            cu_seqlens_q, seq_lens, mine[KV_HEADS], mine[HEADS], 1,
                        )  # fmt: skip
                        run_decode_worker(unit, launch, lookup)
                    else:
                        mine_at = launches[op[4]].ctypes.data if op[0] == SCATTER else 0
                        call_body(body, op.ctypes.data, unit, units, rows, mine_at, slots_at, 0)
                _finish(done)
                unit = take_ticket(ticket)
            before += units
            i = after
    best, leads = carray(_pointer(fixed[CHOSEN]), (rows,), np.int64), _floats(fixed[LEADS], rows)
    _best(ops[len(ops) - 1], rows, best, leads)
    slots[0] = 0  # which so live until here
    return _audit(stamp, launches, counters, left)


class ExecutableGraph:
    """A recording, ready for steps of any number of rows up to ``recording.MAX_REPLAY_ROWS``.

    Not for two steps at once. After a step ``tokens`` and ``leads`` hold what greedy sampling
    takes of its rows: the best token, the lowest of equals, and its lead over the next best.
    """

    def __init__(self, recording: CapturedGraph) -> None:
        self.recording = recording
        self.tokens = np.zeros(MAX_REPLAY_ROWS, np.int64)
        self.leads = np.zeros(MAX_REPLAY_ROWS, np.float32)
        self._found = np.zeros((MAX_REPLAY_ROWS * MOST_PARTS, FOUND))
        choose = np.zeros((1, FIELDS), np.int64)
        choose[0, [CODE, OUT, 3]] = CHOOSE, address_of(self._found), recording.logits
        self._constants = np.concatenate([recording.constants, choose])
        self._per_row = np.concatenate([recording.per_row, np.zeros_like(choose)])
        self._state = np.zeros(1 + len(self._constants), np.int64)
        arrays = recording.tokens, recording.positions, self.tokens, self.leads
        places = [address_of(array) for array in arrays]
        self._fixed = np.array([compute.address, *places, recording.vocabulary], np.int64)
        self._rows = 0
        self._ops = self._constants
        self._tables: list[tuple[int, int]] = []

    def ops(self, rows: int, positions: int) -> NDArray[np.int64]:
        """Return the launches of a step; ``positions``: more than any token's."""
        tables = [table.hold(positions) for table, _ in self.recording.tables]
        if rows != self._rows or tables != self._tables:
            self._ops = self._constants + rows * self._per_row
            for (_, launches), where in zip(self.recording.tables, tables, strict=True):
                self._ops[launches, COSINES : SINES + 1] = where
            self._rows, self._tables = rows, tables
        return self._ops

    def run(
        self, ops: NDArray[np.int64], tokens: Any, logits: NDArray[np.float32], *attention: Any
    ) -> int:
        """Run them, with what ``replay`` takes from ``nonce`` on; return what it returns."""
        wrong: int = replay(self._fixed, ops, self._state, tokens, logits, *attention)
        return wrong
