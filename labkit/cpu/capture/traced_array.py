"""Traced arrays: placeholders with an address and a shape but no data, for graph capture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from labkit.cpu.capture import graph_ops

if TYPE_CHECKING:
    from labkit.cpu.capture.graph_capture import GraphCapture

Array = NDArray[Any]

# Rows of the traced forward pass, each with one token. At least two are needed to detect
# non-contiguous views: ``x[..., 8:]`` is contiguous with one row. With two or more it is not, no
# kernel can read it, and the capture must be refused.
TRACED_ROWS = 2


class NotCapturable(TypeError):
    """The forward pass cannot be captured. The message is a single line with the reason."""


def per_row(count: int) -> int:
    """Return the bytes or elements per row, given the ``count`` of the traced forward pass.

    Rows are the first axis of every array, so sizes, and offsets of contiguous views, are
    proportional to the number of rows. For example, 24 elements with ``TRACED_ROWS`` rows are 12
    per row, hence 60 in a step with 5 rows.
    """
    share, rest = divmod(count, TRACED_ROWS)
    if rest:
        raise NotCapturable(
            "the model uses a part of the rows, which a captured graph cannot replay"
        )
    return share


@dataclass(frozen=True, slots=True)
class Operand:
    """An integer parameter of a launch, whose value is ``constant + num_rows * per_row``.

    If ``buffer`` is not None, the value is an offset in that buffer, and the parameter an address.
    """

    constant: int
    per_row: int
    buffer: int | None = None


class _NotNumPy:
    """Raises ``NotCapturable`` if NumPy is applied to the object.

    Without this class, NumPy would make an array of Python objects.
    """

    __slots__ = ()
    __array_ufunc__ = None

    def __array__(self, *_args: Any, **_options: Any) -> NoReturn:
        raise NotCapturable("the model calls a NumPy function that no kernel implements")

    __array_function__ = __array__


class TracedPositions(_NotNumPy):
    """The positions of a step's tokens, int32 [rows]. Only RoPE supports them."""

    __slots__ = ("operand",)

    def __init__(self, operand: Operand) -> None:
        self.operand = operand


class TracedArray(_NotNumPy):
    """A placeholder for an array [rows, ...] of the captured step, in one of the graph's buffers.

    ``view`` is a NumPy array in the buffer's memory, with the shape and strides of this array for
    ``TRACED_ROWS`` rows. Its elements are never read or written. Indexing and reshaping return
    traced views, and arithmetic adds a node to the graph.
    """

    __slots__ = ("_buffer", "_view", "capture")

    def __init__(self, capture: GraphCapture, buffer: int, view: Array) -> None:
        self.capture = capture
        self._buffer = buffer
        self._view = view

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._view.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape, with ``TRACED_ROWS`` rows."""
        return self._view.shape

    @property
    def ndim(self) -> int:
        return self._view.ndim

    @property
    def row_size(self) -> int:
        """The number of elements of one row."""
        return per_row(self._view.size)

    @property
    def num_elements(self) -> Operand:
        """The number of elements of all rows, as a parameter of a launch."""
        return Operand(0, self.row_size)

    @property
    def operand(self) -> Operand:
        """The array's address, as a parameter of a launch.

        Raises ``NotCapturable`` if the array is not contiguous.
        """
        if not self._view.flags.c_contiguous:
            raise NotCapturable("the model copies an array, which a captured graph cannot replay")
        offset = _address(self._view) - _address(self.capture.buffers[self._buffer])
        return Operand(0, per_row(offset), self._buffer)

    def _as_view(self, view: Array) -> TracedArray:
        if not np.may_share_memory(view, self.capture.buffers[self._buffer]):
            raise NotCapturable("the model copies an array, which a captured graph cannot replay")
        return TracedArray(self.capture, self._buffer, view)

    def __getitem__(self, key: Any) -> TracedArray:
        return self._as_view(self._view[key])

    def reshape(self, *shape: Any) -> TracedArray:
        return self._as_view(self._view.reshape(*shape))

    def transpose(self, *axes: Any) -> TracedArray:
        return self._as_view(self._view.transpose(*axes))

    def swapaxes(self, a: int, b: int) -> TracedArray:
        return self._as_view(self._view.swapaxes(a, b))

    def squeeze(self, axis: Any = None) -> TracedArray:
        return self._as_view(self._view.squeeze(axis))

    def astype(self, dtype: Any) -> TracedArray:
        """Return the array itself if it has this dtype, else raise ``NotCapturable``."""
        if np.dtype(dtype) != self.dtype:
            raise NotCapturable(
                f"the model converts an array to {dtype}, which a captured graph cannot replay"
            )
        return self

    def __add__(self, other: Any) -> TracedArray:
        return self._elementwise(graph_ops.ADD, other)

    def __mul__(self, other: Any) -> TracedArray:
        if isinstance(other, TracedArray):
            return self._elementwise(graph_ops.MULTIPLY, other)
        number = np.asarray(other)
        # A NumPy scalar, unlike a Python number, may change the dtype of the product.
        typed = isinstance(other, np.generic | np.ndarray) and number.dtype != np.float32
        if number.ndim or typed:
            raise NotCapturable("the model multiplies by an array that the step did not compute")
        out = self.capture.new_array(self.shape)
        factor = float(np.float32(number))
        self.capture.add_node(graph_ops.SCALE, out, a=self, factor=factor, size=self.num_elements)
        return out

    __rmul__ = __mul__

    def _elementwise(self, op: int, other: Any) -> TracedArray:
        if not isinstance(other, TracedArray) or other.shape != self.shape:
            raise NotCapturable(
                "the model combines arrays of different shapes, or one that the step did not make"
            )
        out = self.capture.new_array(self.shape)
        self.capture.add_node(op, out, a=self, b=other, size=self.num_elements)
        return out


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
