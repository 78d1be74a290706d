"""Arrays that stand for a step's while its graph is captured: places and shapes, no numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from labkit.cpu import graph_ops

if TYPE_CHECKING:
    from labkit.cpu.graph_capture import GraphCapture

Array = NDArray[Any]

# Rows of the traced forward, each of one token. Two is the fewest that has a stride from row to
# row: with one row ``x[..., 8:]`` is contiguous, with two or more it is a view that no kernel can
# read, and must be refused.
TRACED_ROWS = 2


class NotCapturable(TypeError):
    """A forward cannot be captured; the message is one line that says why."""


def per_row(count: int) -> int:
    """Return what one row has of ``count`` bytes or elements of the traced forward.

    Rows are the first axis of every array, so sizes and the offsets of contiguous views grow in
    proportion to their number: 24 elements of the traced forward are 12 per row, and 60 of a
    step of 5 rows.
    """
    share, rest = divmod(count, TRACED_ROWS)
    if rest:
        raise NotCapturable("it reads a part of the rows")
    return share


@dataclass(frozen=True, slots=True)
class Operand:
    """An integer parameter: ``constant + num_rows * per_row``.

    Where ``buffer`` is the number of a buffer, it is an address, and counts from its start.
    """

    constant: int
    per_row: int
    buffer: int | None = None


class _NotNumPy:
    """Refuses what NumPy would make of an object that is no array: an array of objects."""

    __slots__ = ()
    __array_ufunc__ = None

    def __array__(self, *_args: Any, **_options: Any) -> NoReturn:
        raise NotCapturable("it computes with NumPy what no kernel computes")

    def __array_function__(self, *_args: Any, **_options: Any) -> NoReturn:
        raise NotCapturable("it computes with NumPy what no kernel computes")


class TracedPositions(_NotNumPy):
    """The positions of a step's tokens, int32 [rows]: RoPE alone can read them."""

    __slots__ = ("operand",)

    def __init__(self, operand: Operand) -> None:
        self.operand = operand


class TracedArray(_NotNumPy):
    """An array [rows, ...] of the step that ``capture`` captures, in one of its buffers.

    ``view`` is a NumPy array with the shape and the strides of this one for ``TRACED_ROWS`` rows,
    inside the buffer's memory; nobody reads or writes its numbers. Views are taken of it, and
    arithmetic adds a node to the graph.
    """

    __slots__ = ("_buffer", "_view", "capture")

    def __init__(self, capture: GraphCapture, buffer: int, view: Array) -> None:
        self.capture = capture
        self._buffer = buffer
        self._view = view

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of its elements."""
        return self._view.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape, with ``TRACED_ROWS`` rows."""
        return self._view.shape

    @property
    def ndim(self) -> int:
        """The number of its axes."""
        return self._view.ndim

    @property
    def row_size(self) -> int:
        """Elements of one row."""
        return per_row(self._view.size)

    @property
    def num_elements(self) -> Operand:
        """Elements of all rows."""
        return Operand(0, self.row_size)

    @property
    def operand(self) -> Operand:
        """Its address.

        Raises
        ------
        NotCapturable
            It is not contiguous.
        """
        if not self._view.flags.c_contiguous:
            raise NotCapturable("its code needs a copy of an array")
        offset = _address(self._view) - _address(self.capture.buffers[self._buffer])
        return Operand(0, per_row(offset), self._buffer)

    def _as_view(self, view: Array) -> TracedArray:
        if not np.may_share_memory(view, self.capture.buffers[self._buffer]):
            raise NotCapturable("its code needs a copy of an array")
        return TracedArray(self.capture, self._buffer, view)

    def __getitem__(self, key: Any) -> TracedArray:
        return self._as_view(self._view[key])

    def reshape(self, *shape: Any) -> TracedArray:
        """Return a view with another shape."""
        return self._as_view(self._view.reshape(*shape))

    def transpose(self, *axes: Any) -> TracedArray:
        """Return a view with the axes in another order."""
        return self._as_view(self._view.transpose(*axes))

    def swapaxes(self, a: int, b: int) -> TracedArray:
        """Return a view with two axes exchanged."""
        return self._as_view(self._view.swapaxes(a, b))

    def squeeze(self, axis: Any = None) -> TracedArray:
        """Return a view without an axis of length one."""
        return self._as_view(self._view.squeeze(axis))

    def astype(self, dtype: Any) -> TracedArray:
        """Return itself; NotCapturable for any other type than its own."""
        if np.dtype(dtype) != self.dtype:
            raise NotCapturable(f"it converts to {dtype}")
        return self

    def __add__(self, other: Any) -> TracedArray:
        return self._elementwise(graph_ops.ADD, other)

    def __mul__(self, other: Any) -> TracedArray:
        if isinstance(other, TracedArray):
            return self._elementwise(graph_ops.MULTIPLY, other)
        number = np.asarray(other)
        # A scalar of NumPy's own gives the product its type.
        typed = isinstance(other, np.generic | np.ndarray) and number.dtype != np.float32
        if number.ndim or typed:
            raise NotCapturable("it multiplies by an array that is not of the step")
        out = self.capture.new_array(self.shape)
        factor = float(np.float32(number))
        self.capture.add_node(graph_ops.SCALE, out, a=self, factor=factor, size=self.num_elements)
        return out

    __rmul__ = __mul__

    def _elementwise(self, op: int, other: Any) -> TracedArray:
        if not isinstance(other, TracedArray) or other.shape != self.shape:
            raise NotCapturable("it combines arrays of other kinds or shapes")
        out = self.capture.new_array(self.shape)
        self.capture.add_node(op, out, a=self, b=other, size=self.num_elements)
        return out


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
