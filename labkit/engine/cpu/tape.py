"""Replays a recorded forward: all launches of a step in one call, without Python between them.

Every thread of the pool walks the launches in order. A launch is so many units, taken by ticket;
the next one begins when all units of those before are done, whoever did them. So a thread that the
system keeps from its core holds up nothing that it has not begun, as in the pool itself.

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

from labkit.engine.cpu import activations, norms, rope
from labkit.engine.cpu.activations import activate
from labkit.engine.cpu.attention_launches import decode_share, write_token
from labkit.engine.cpu.gemm import (
    ROW_BLOCK,
    SERIAL_BELOW,
    WEIGHT_COST,
    WIDTH,
    multiply_group,
    take_packed,
)
from labkit.engine.cpu.intrinsics import call_body, take_ticket
from labkit.engine.cpu.jit import inlined, inner, intrinsic, kernel
from labkit.engine.cpu.norms import rms_row
from labkit.engine.cpu.products import QUAD
from labkit.engine.cpu.recording import (
    ACTIVATE,
    ADD,
    AHEAD,
    AHEAD_BYTES,
    ATTEND,
    BODY,
    ELEMENT,
    FIELDS,
    HEADS,
    K_POOL,
    KV_HEADS,
    LAUNCH_FIELDS,
    LAYER,
    LOOK_UP,
    LOOK_UP_PACKED,
    LOOK_UP_STORED,
    MULTIPLY,
    NONCE,
    OUT,
    PRODUCT,
    RMS_NORM,
    ROTATE,
    SCALE,
    SCATTER,
    SLOT_NUMBERS,
    STORED_PRODUCT,
    V_POOL,
    Attention,
    Recording,
)
from labkit.engine.cpu.rope import rotate_row
from labkit.engine.cpu.simd import I32, I64, LINE, POINTER, Emitter
from labkit.engine.cpu.stored import PANELS, SPAN
from labkit.engine.cpu.stored_product import MOST, multiply_task, take_row

SHARES = 4  # units per thread of a launch that is cut evenly: a late thread costs so much less
CHUNK = 4096  # numbers of a unit that combines two arrays
PATIENCE = 20_000  # looks, each some 20 ns, before a thread leaves its core to another
FUNCTIONS = 5  # of a form of stored weights
STRIDE = 4 * LINE  # bytes that a thread asks for at once while it waits
COSINES, SINES = 6, 7  # of a rotation's operands


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
        for line in range(0, STRIDE, LINE):
            code.prefetch(builder.add(arguments[0], I64(line)))
        return context.get_dummy_value()

    return types.void(types.int64), emit


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
        return panels // PANELS if rows <= MOST else panels
    step = QUAD if rows == 1 else 1
    return (panels + step - 1) // step * ((rows + ROW_BLOCK - 1) // ROW_BLOCK)


@inner
def _units(op: Any, rows: int, workers: int) -> int:
    """Return into how many units a launch is cut; a small one is not."""
    code, units = int(op[0]), rows
    if code == ATTEND:
        units = workers
    elif code in (PRODUCT, STORED_PRODUCT):
        cost = op[7] * WIDTH * op[3] * (rows + WEIGHT_COST)
        units = 1 if cost < SERIAL_BELOW else min(_tasks(op, rows), SHARES * workers)
    elif code == ACTIVATE:
        units = 1 if op[4] < activations.SERIAL_BELOW else (op[4] + CHUNK - 1) // CHUNK
    elif code in (ADD, MULTIPLY, SCALE):
        units = (op[4] + 4 * CHUNK - 1) // (4 * CHUNK)
    elif code == RMS_NORM:
        units = 1 if op[3] * op[4] < norms.SERIAL_BELOW else rows
    elif code == ROTATE:
        units = 1 if rows * op[3] * op[4] < rope.SERIAL_BELOW else rows
    return units


@inner
def _share(unit: int, units: int, count: int) -> Any:
    """Return the first and the last but one of a unit's part of ``count``."""
    return count * unit // units, count * (unit + 1) // units


@inner
def _product(op: Any, rows: int, first: int, end: int) -> None:
    depth, panels, total = op[3], op[7], op[8]
    x, out = _rows(op[2], rows, depth), _floats(op[1], rows * total)
    bias = _floats(op[5], panels * WIDTH)
    columns = carray(_pointer(op[6]), (panels, 3), np.int64)
    if op[0] == PRODUCT:
        packed = carray(_pointer(op[4]), (panels, depth, WIDTH), np.float32)
        step = QUAD if rows == 1 else 1
        groups = (panels + step - 1) // step
        for task in range(first, end):
            multiply_group(task % groups * step, task // groups, x, packed, bias, columns, out)
    else:
        functions = carray(_pointer(op[9]), (FUNCTIONS,), np.int64)
        spans = carray(_pointer(op[4]), (panels // PANELS, op[12]), np.uint8)
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
        take_packed(token, carray(_pointer(op[4]), (op[7], width, WIDTH), np.float32), out)
    else:
        functions = carray(_pointer(op[9]), (FUNCTIONS,), np.int64)
        spans = carray(_pointer(op[4]), (token // SPAN + 1, op[12]), np.uint8)
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
    elif code in (LOOK_UP, LOOK_UP_PACKED, LOOK_UP_STORED):
        first, end = _share(unit, units, rows)
        for row in range(first, end):
            _look_up(op, int(_int32s(op[2], rows)[row]), row)
    else:
        first, end = _share(unit, units, rows)
        for token in range(first, end):
            write_token(
                token, mine[ELEMENT], op[2], op[3], mine[K_POOL], mine[V_POOL], slots,
                mine[SLOT_NUMBERS],
            )  # fmt: skip


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
    body: int,
    ops: NDArray[Any],
    rows: int,
    state: NDArray[Any],
    lookup: Any,
    launches: NDArray[Any],
    memory: NDArray[Any],
    counters: NDArray[Any],
    slots: NDArray[Any],
    cu_seqlens_q: NDArray[Any],
    seq_lens: NDArray[Any],
) -> None:
    """Run the launches of a step of so many rows.

    Parameters
    ----------
    body
        The address of ``compute``.
    ops
        int64 [launches, fields], as in ``recording``.
    state
        int64 [1 + launches] of zeros: units that are done, and each launch's next ticket.
    lookup, memory, cu_seqlens_q, seq_lens
        As in ``attention_launches.decode``; of ``memory``'s workers each is one of the threads'.
    launches
        int64 [launches of attention, ``LAUNCH_FIELDS``].
    counters
        int64 [launches of attention, workers + 1, ``NUM_COUNTERS``] of zeros.
    slots
        int64 [rows]: where new keys and values go.
    """
    workers, slots_at = len(memory), slots.ctypes.data
    done = np.int64(state.ctypes.data)
    for _ in prange(workers):
        before, target, at, end = 0, 0, 0, 0
        for i in range(len(ops)):
            op = ops[i]
            units = _units(op, rows, workers)
            if op[AHEAD] != target:
                target = at = op[AHEAD]
                end = at + op[AHEAD_BYTES]
            looks = 0
            while _finished(done) < before:
                if at < end:
                    _prefetch(at)
                    at += STRIDE
                looks += 1
                if looks > PATIENCE:
                    _sched_yield()
            ticket = done + 8 * (1 + i)
            unit = take_ticket(ticket)
            while unit < units:
                if op[0] == ATTEND:
                    mine = launches[op[3]]
                    decode_share(
                        unit, mine[NONCE], lookup, mine[BODY], mine[LAYER], memory,
                        counters[op[3]], cu_seqlens_q, seq_lens, mine[KV_HEADS], mine[HEADS], 1,
                    )  # fmt: skip
                else:
                    mine_at = launches[op[4]].ctypes.data if op[0] == SCATTER else 0
                    call_body(body, op.ctypes.data, unit, units, rows, mine_at, slots_at, 0)
                _finish(done)
                unit = take_ticket(ticket)
            before += units


class Tape:
    """A recording, ready for steps of any number of rows up to ``recording.MOST_ROWS``."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._rows = 0
        self._ops = recording.constants

    def ops(self, rows: int, positions: int, out: NDArray[np.float32]) -> NDArray[np.int64]:
        """Return the launches of a step whose last one writes ``out``.

        ``positions``: more than any token's.
        """
        made = self.recording
        if rows != self._rows:
            self._ops, self._rows = made.constants + rows * made.per_row, rows
        for table, launches in made.tables:
            self._ops[launches, COSINES : SINES + 1] = table.hold(positions)
        self._ops[-1, OUT] = out.ctypes.data
        return self._ops

    def run(self, ops: NDArray[np.int64], rows: int, attention: Attention) -> None:
        """Run them."""
        replay(compute.address, ops, rows, np.zeros(1 + len(ops), np.int64), *attention)
