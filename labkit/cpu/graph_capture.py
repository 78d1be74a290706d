"""Records what a model's forward launches, by running it on arrays that hold no numbers.

A small step costs as much in Python, between its launches, as in them. But steps differ only in
their numbers and in how many rows there are, so the launches are written down once, from a
forward over symbols, and replayed by one call (``tape``). A launch is a row of int64: what it is,
where it writes, and operands. An operand is ``constant + rows * per_row``: an address, a count of
rows, a size.

A forward whose code asks for what cannot be recorded raises ``NotCapturable``, and is run as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

FLOAT_BYTES = 4
MAX_REPLAY_ROWS = 64  # of a step that is replayed: with more of them Python's share is small
TRACED_ROWS = 2  # of the forward that is recorded; of one, views could not be told from copies
ALIGNED = 64  # bytes: of a cache line, where every array begins

# What a launch is.
(LOOK_UP, LOOK_UP_PACKED, LOOK_UP_STORED, RMS_NORM, ROTATE, PRODUCT, STORED_PRODUCT, ACTIVATE, ADD,
 MULTIPLY, SCALE, SCATTER, ATTEND, CHOOSE) = range(14)  # fmt: skip
# A launch's row: what, where to, operands.
CODE, OUT, FIRST = 0, 1, 2
FIELDS = 13
# Columns of ``launches``: what attention's launches are told, one row each.
BODY, LAYER, KIND, KV_HEADS, HEADS, ELEMENT, SLOT_NUMBERS, K_POOL, V_POOL = range(9)
LAUNCH_FIELDS = 9
# Columns of ``left``: the stamp expected, of the launch that is shown, and by how much it is off;
# what was counted.
EXPECTED, SHOWN, OFF, LEFT_ITERATIONS, LEFT_BLOCKS, LEFT_SURPLUS = range(6)
LEFT_FIELDS = 6


def address_of(array: Array) -> int:
    """Return where an array's memory begins."""
    return int(array.__array_interface__["data"][0])


class NotCapturable(TypeError):
    """A forward cannot be recorded; one line that says why."""


class _Refusing:
    """Refuses what NumPy would make of it, which is arrays of objects."""

    __slots__ = ()
    __array_ufunc__ = None

    def __array__(self, *_args: Any, **_options: Any) -> NoReturn:
        raise NotCapturable("it computes with NumPy what no launch computes")

    def __array_function__(self, *_args: Any, **_options: Any) -> NoReturn:
        raise NotCapturable("it computes with NumPy what no launch computes")


class TracedPositions(_Refusing):
    """The positions of a step's tokens: int32 [rows], for ``rope`` alone."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address


class TracedArray(_Refusing):
    """An array [rows, ...] of a step that is being recorded: its place and shape, no numbers."""

    __slots__ = ("_buffer", "_view", "capture")

    def __init__(self, capture: GraphCapture, buffer: int, view: Array) -> None:
        self.capture = capture
        self._buffer = buffer
        self._view = view

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its type."""
        return self._view.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape, with ``TRACED_ROWS`` rows."""
        return self._view.shape

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return self._view.ndim

    @property
    def row_numbers(self) -> int:
        """Numbers of a row."""
        return self._view.size // TRACED_ROWS

    @property
    def operand(self) -> Operand:
        """Where it lies.

        Raises
        ------
        NotRecorded
            Its numbers do not lie side by side.
        """
        if not self._view.flags.c_contiguous:
            raise NotCapturable("its code needs a copy of an array")
        offset = self._address - self.capture.bases[self._buffer]
        return Operand(0, offset // TRACED_ROWS, self._buffer)

    @property
    def _address(self) -> int:
        return address_of(self._view)

    def _viewed(self, view: Array) -> TracedArray:
        lies = self.capture.memory[self._buffer]
        if not np.may_share_memory(view, lies):
            raise NotCapturable("its code needs a copy of an array")
        return TracedArray(self.capture, self._buffer, view)

    def __getitem__(self, key: Any) -> TracedArray:
        return self._viewed(self._view[key])

    def reshape(self, *shape: Any) -> TracedArray:
        """Return it in another shape."""
        return self._viewed(self._view.reshape(*shape))

    def transpose(self, *axes: Any) -> TracedArray:
        """Return it with its axes in another order."""
        return self._viewed(self._view.transpose(*axes))

    def swapaxes(self, a: int, b: int) -> TracedArray:
        """Return it with two axes exchanged."""
        return self._viewed(self._view.swapaxes(a, b))

    def squeeze(self, axis: Any = None) -> TracedArray:
        """Return it without an axis of one."""
        return self._viewed(self._view.squeeze(axis))

    def astype(self, dtype: Any) -> TracedArray:
        """Return itself: there is one type."""
        if np.dtype(dtype) != self.dtype:
            raise NotCapturable(f"it converts to {dtype}")
        return self

    def __add__(self, other: Any) -> TracedArray:
        return self._with(ADD, other)

    def __mul__(self, other: Any) -> TracedArray:
        if isinstance(other, TracedArray):
            return self._with(MULTIPLY, other)
        number = np.asarray(other)
        # NumPy's own numbers have a type, which the product would have too.
        typed = isinstance(other, np.generic | np.ndarray) and number.dtype != np.float32
        if number.ndim or typed:
            raise NotCapturable("it multiplies by an array that is not of the step")
        out = self.capture.array(self.shape)
        bits = int(np.float32(number).view(np.uint32))
        self.capture.launch(SCALE, out, self, bits, num_elements(self))
        return out

    __rmul__ = __mul__

    def _with(self, code: int, other: Any) -> TracedArray:
        if not isinstance(other, TracedArray) or other.shape != self.shape:
            raise NotCapturable("it combines arrays of other kinds or shapes")
        out = self.capture.array(self.shape)
        self.capture.launch(code, out, self, other, num_elements(self))
        return out


@dataclass(frozen=True, slots=True)
class Operand:
    """``constant + rows * per_row``; an address counts from where ``buffer`` begins, if any."""

    constant: int
    per_row: int
    buffer: int | None = None


ROWS = Operand(0, 1)


def num_elements(symbol: TracedArray) -> Operand:
    """Return how many numbers it has."""
    return Operand(0, symbol.row_numbers)


@dataclass(frozen=True, slots=True)
class CapturedAttention:
    """One launch of attention: the layer's, and what binds it; ``row``: of the launches.

    ``shapes``: of a query, and of a new key if there is one.
    """

    row: int
    layer: int
    scale: float
    heads: int
    window: int | None
    sinks: Any
    shapes: tuple[tuple[int, ...], ...]


class GraphCapture:
    """Takes down the launches of one forward.

    ``bases`` and ``memory``: where each array lies that was made; nobody touches it.
    """

    def __init__(self) -> None:
        self.memory: list[Array] = []
        self.bases: list[int] = []
        self.attended: list[CapturedAttention] = []
        # Tables of cosines and sines, which grow, and the launches that read each.
        self.tables: dict[Any, list[int]] = {}
        self.tokens = np.zeros(MAX_REPLAY_ROWS, np.int32)
        self.positions = np.zeros(MAX_REPLAY_ROWS, np.int32)
        # Rows of the tables that tokens are looked up in, at least.
        self.vocabulary = 1 << 31
        self._launches: list[list[Operand]] = []
        self._held: list[Any] = []

    def ids(self) -> TracedArray:
        """Return the token ids: int32 [rows, 1]."""
        return self._made(np.empty((TRACED_ROWS, 1), np.int32))

    def places(self) -> TracedPositions:
        """Return the positions."""
        return TracedPositions(address_of(self.positions))

    def array(self, shape: tuple[int, ...]) -> TracedArray:
        """Return a new array of float32, rows first."""
        if shape[0] != TRACED_ROWS:
            raise NotCapturable("it moves the rows to another axis")
        return self._made(np.empty(shape, np.float32))

    def _made(self, memory: Array) -> TracedArray:
        self.memory.append(memory)
        self.bases.append(address_of(memory))
        return TracedArray(self, len(self.bases) - 1, memory)

    def launch(
        self, code: int, out: TracedArray | None, *operands: TracedArray | Operand | int
    ) -> int:
        """Write a launch down; return its row. What is written is of no other operand."""
        fields = [Operand(code, 0), Operand(0, 0) if out is None else out.operand]
        for operand in operands:
            if isinstance(operand, TracedArray):
                fields.append(operand.operand)
            else:
                fields.append(operand if isinstance(operand, Operand) else Operand(operand, 0))
        fields += [Operand(0, 0)] * (FIELDS - len(fields))
        self._launches.append(fields)
        return len(self._launches) - 1

    def attend(
        self, layer: int, q: TracedArray, k: TracedArray | None, v: Any, bound: dict[str, Any]
    ) -> Any:
        """Record a layer's attention, and before it the writing of new keys and values.

        ``bound``: what ``Attention.bind`` is told.
        """
        number, shapes = len(self.attended), [q.shape[1:]]
        if k is not None:
            self.launch(SCATTER, None, k, v, number)
            shapes.append(k.shape[1:])
        out = self.array(q.shape)
        row = self.launch(ATTEND, out, q, number)
        self.attended.append(CapturedAttention(row, layer, shapes=tuple(shapes), **bound))
        return out

    def hold(self, *arrays: Any) -> None:
        """Keep what operands point to."""
        self._held += arrays

    def finish(self, logits: Any) -> CapturedGraph:
        """Give every array a place; ``logits`` [rows, 1, vocabulary] are what the forward returns.

        Raises
        ------
        NotRecorded
            They are not what the last launch wrote.
        """
        last = self._launches[-1]
        if not isinstance(logits, TracedArray) or logits.operand != last[OUT]:
            raise NotCapturable("its logits are not the last that it computes")
        if logits.shape[1:-1] != (1,) or logits.row_numbers * TRACED_ROWS != logits._view.size:
            raise NotCapturable(f"it returns logits of shape {logits.shape}")
        places = self._places()
        arena = np.empty(max(end for _, end in places.values()) + ALIGNED, np.uint8)
        first = -(-address_of(arena) // ALIGNED) * ALIGNED
        starts = {buffer: first + start for buffer, (start, _) in places.items()}
        starts[0] = address_of(self.tokens)
        constants, per_row = np.zeros((2, len(self._launches), FIELDS), np.int64)
        for i, fields in enumerate(self._launches):
            for j, field in enumerate(fields):
                start = 0 if field.buffer is None else starts.get(field.buffer, 0)
                constants[i, j], per_row[i, j] = field.constant + start, field.per_row
        return CapturedGraph(
            constants=constants,
            per_row=per_row,
            tokens=self.tokens,
            positions=self.positions,
            vocabulary=self.vocabulary,
            logits=logits.row_numbers,
            attended=tuple(self.attended),
            tables=tuple((table, np.array(rows)) for table, rows in self.tables.items()),
            held=(arena, *self._held),
        )

    def _places(self) -> dict[int, tuple[int, int]]:
        """Return where each array begins and ends; two that are never needed at once may share.

        The tokens, which come first, and the logits, which come last, lie elsewhere.
        """
        uses: dict[int, list[int]] = {}
        for i, fields in enumerate(self._launches):
            for field in fields:
                if field.buffer:
                    uses.setdefault(field.buffer, []).append(i)
        del uses[self._launches[-1][OUT].buffer or 0]
        free: list[tuple[int, int]] = []
        places: dict[int, tuple[int, int]] = {}
        end = 0
        for i in range(len(self._launches)):
            for buffer in [b for b, used in uses.items() if used[0] == i]:
                size = self.memory[buffer].nbytes // TRACED_ROWS * MAX_REPLAY_ROWS
                size = -(-size // ALIGNED) * ALIGNED
                place = next((p for p in free if p[1] - p[0] == size), None)
                if place is None:
                    place, end = (end, end + size), end + size
                else:
                    free.remove(place)
                places[buffer] = place
            free += [places[b] for b, used in uses.items() if used[-1] == i]
        return places


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """The launches of a forward.

    Parameters
    ----------
    constants, per_row
        int64 [launches, ``FIELDS``]: what operands are, by the number of rows.
    tokens, positions
        int32 [``MAX_REPLAY_ROWS``]: to be filled before a step.
    vocabulary
        Token ids there are.
    logits
        Numbers of a row of what the last launch writes, whose place is the caller's.
    attended
        The launches of attention, in order.
    tables
        What grows, with the launches that read it.
    held
        What keeps the operands in memory.
    """

    constants: NDArray[np.int64]
    per_row: NDArray[np.int64]
    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    vocabulary: int
    logits: int
    attended: tuple[CapturedAttention, ...]
    tables: tuple[tuple[Any, NDArray[np.int64]], ...]
    held: tuple[Any, ...]
