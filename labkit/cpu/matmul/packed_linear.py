"""Linear layers with packed weights: x[M, K] @ W[N, K].T + bias, for float32 x.

``PackedLinear`` packs one or more matrices that are applied to the same input, in float32
(``gemm``) or in low precision, and multiplies by all of them in one launch. With low-precision
weights it computes in float32 (``quantized_matmul``) or, with quantised weights, in int8
(``int8_matmul``).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.cpu.capture import graph_ops
from labkit.cpu.capture.traced_array import NotCapturable, TracedArray
from labkit.cpu.matmul import int8_dot, int8_matmul, quantized_matmul
from labkit.cpu.matmul.gemm import PANEL_COLUMNS, pack_panels
from labkit.cpu.matmul.matmul_op_kernels import Product, int8_product, product
from labkit.cpu.matmul.quantized_weights import (
    SPAN_COLUMNS,
    SPAN_PANELS,
    LowPrecisionMatrix,
    QuantizedMatrix,
)
from labkit.cpu.runtime.address_views import address_of
from labkit.cpu.runtime.aligned_memory import SlabAllocator
from labkit.cpu.runtime.forward_clock import FORWARD_CLOCK

Array = NDArray[np.float32]
# A weight matrix [N, K].
WeightMatrix = Array | LowPrecisionMatrix


class PackedPanels(ABC):
    """The packed weights of one or more matrices that multiply the same input.

    Each subclass packs them in the layout of one kernel.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Bytes of the packed weights."""

    def product(self, shared: dict[str, int]) -> Product:
        """Return the function that multiplies an input by the matrices.

        ``shared``: the node's parameters that do not depend on the weights' format.
        """
        op, weights = self.matmul_node()
        return product(op, shared | weights)

    @abstractmethod
    def matmul_node(self) -> tuple[int, dict[str, int]]:
        """Return the node of a captured graph that does the work of ``multiply``.

        The node is an operation code of ``graph_ops`` and those of its parameters that describe the
        weights.
        """

    def capture_input(self, x: TracedArray) -> TracedArray:
        """Return the array that the node of ``matmul_node`` reads: x, or x quantised."""
        return x

    @abstractmethod
    def embedding_node(self) -> tuple[int, dict[str, int]]:
        """Return the node of a captured graph that does the work of ``take``.

        The result is as in ``matmul_node``.
        """

    @property
    @abstractmethod
    def arrays(self) -> tuple[Any, ...]:
        """The arrays whose addresses are parameters of the two nodes."""


class FloatPanels(PackedPanels):
    """Matrices in float32, packed for ``gemm``."""

    __slots__ = ("_panels",)

    def __init__(
        self, weights: Sequence[Array], first: Sequence[int], count: int, slabs: SlabAllocator
    ) -> None:
        self._panels: Array = slabs.zeros((count, weights[0].shape[1], PANEL_COLUMNS), np.float32)
        for weight, panel in zip(weights, first, strict=True):
            pack_panels(np.ascontiguousarray(weight), self._panels, panel)

    @property
    def bytes(self) -> int:
        return self._panels.nbytes

    def matmul_node(self) -> tuple[int, dict[str, int]]:
        return graph_ops.MATMUL, {"weights": address_of(self._panels)}

    def embedding_node(self) -> tuple[int, dict[str, int]]:
        params = {"weights": address_of(self._panels), "num_panels": len(self._panels)}
        return graph_ops.PACKED_EMBEDDING, params

    @property
    def arrays(self) -> tuple[Any, ...]:
        return (self._panels,)


class LowPrecisionPanels(PackedPanels):
    """Matrices of one low-precision format, packed in spans for ``quantized_matmul``."""

    __slots__ = ("_arguments", "_spans")

    def __init__(
        self,
        weights: Sequence[LowPrecisionMatrix],
        first: Sequence[int],
        count: int,
        slabs: SlabAllocator,
    ) -> None:
        record, depth, group = weights[0].record_dtype, weights[0].shape[1], weights[0].group_size
        size = depth // group * record.itemsize
        self._spans: NDArray[np.uint8] = slabs.zeros((count // SPAN_PANELS, size), np.uint8)
        for weight, panel in zip(weights, first, strict=True):
            weight.write_records(self._spans[panel // SPAN_PANELS :].view(record))
        functions = quantized_matmul.format_functions(
            *weights[0].kernel_format, all(weight.mantissa_exact for weight in weights)
        )
        # The first arguments of the kernels: functions, records per span, packs per record.
        self._arguments = functions.addresses, depth // group, group // functions.pack_steps

    @property
    def bytes(self) -> int:
        return self._spans.nbytes

    def matmul_node(self) -> tuple[int, dict[str, int]]:
        return graph_ops.LOW_PRECISION_MATMUL, self._params()

    def embedding_node(self) -> tuple[int, dict[str, int]]:
        return graph_ops.LOW_PRECISION_EMBEDDING, self._params()

    def _params(self) -> dict[str, int]:
        functions, records, packs = self._arguments
        return {
            "weights": address_of(self._spans),
            "functions": address_of(functions),
            "records": records,
            "packs": packs,
            "span_bytes": self._spans.shape[1],
        }

    @property
    def arrays(self) -> tuple[Any, ...]:
        return self._spans, self._arguments[0]


class Int8Panels(LowPrecisionPanels):
    """Quantised matrices in the spans of ``LowPrecisionPanels``, for activations in int8."""

    __slots__ = ("_depth", "_functions", "_groups")

    def __init__(
        self,
        weights: Sequence[QuantizedMatrix],
        first: Sequence[int],
        count: int,
        slabs: SlabAllocator,
    ) -> None:
        super().__init__(weights, first, count, slabs)
        element, bits = weights[0].kernel_format
        self._depth, group_size = weights[0].shape[1], weights[0].group_size
        self._groups = self._depth // group_size
        self._functions = int8_matmul.int8_functions(element, bits, group_size)

    def product(self, shared: dict[str, int]) -> Product:
        return int8_product(shared, self._quantize_params(), self.matmul_node()[1])

    def matmul_node(self) -> tuple[int, dict[str, int]]:
        return graph_ops.INT8_MATMUL, {
            "weights": address_of(self._spans),
            "functions": address_of(self._functions.addresses),
            "groups": self._groups,
            "group_bytes": self._functions.spec.panel_group_bytes,
            "row_bytes": self._functions.row_bytes(self._depth),
            "span_bytes": self._spans.shape[1],
        }

    def capture_input(self, x: TracedArray) -> TracedArray:
        """Add the quantisation of x as a node, and return its result."""
        rows, row_bytes = x.shape[0], self._functions.row_bytes(self._depth)
        out = x.capture.new_array((rows, row_bytes), np.uint8)
        x.capture.add_node(
            graph_ops.QUANTIZE,
            out,
            x=x,
            **self._quantize_params(),
        )
        return out

    def _quantize_params(self) -> dict[str, int]:
        return {
            "depth": self._depth,
            "groups": self._groups,
            "row_bytes": self._functions.row_bytes(self._depth),
            "functions": address_of(self._functions.addresses),
        }

    @property
    def arrays(self) -> tuple[Any, ...]:
        return *super().arrays, self._functions.addresses


def _layout(weight: WeightMatrix) -> tuple[Any, ...]:
    if isinstance(weight, np.ndarray):
        return ("float32",)
    return (*weight.kernel_format, weight.group_size)


def share_format(weights: Sequence[WeightMatrix]) -> bool:
    """Return whether the matrices can be packed together: all have the same depth K and format."""
    return len({(weight.shape[1], _layout(weight)) for weight in weights}) == 1


class PackedLinear:
    """Linear layers for the same input, whose weights are packed together and used in one launch.

    ``weights``: the matrices, [N_i, K] each, which are copied. ``biases``: one per matrix,
    float32 [N_i] or None. ``slabs``: allocator of the packed weights; None: a separate allocation.
    ``activations``: with ``int8``, the input is quantised if the weights have 4 or 8 bits
    (``int8_matmul``); with ``float32``, it never is. Raises ``ValueError`` if the matrices differ
    in depth or format.
    """

    __slots__ = (
        *("_bias", "_columns", "_multiply", "_panels", "_shared", "_take", "activations", "depth"),
        *("total", "weight_format", "widths"),
    )

    def __init__(
        self,
        weights: Sequence[WeightMatrix],
        biases: Sequence[Array | None],
        slabs: SlabAllocator | None = None,
        activations: str = "float32",
    ) -> None:
        if not share_format(weights):
            depths = sorted({weight.shape[1] for weight in weights})
            raise ValueError(
                "the matrices of a product must have the same depth and format; the depths are "
                f"{', '.join(map(str, depths))}"
            )
        self.depth = weights[0].shape[1]
        first_weight = weights[0]
        self.weight_format = (
            "float32" if isinstance(first_weight, np.ndarray) else first_weight.weight_format
        )
        self.widths = tuple(weight.shape[0] for weight in weights)
        self.total = sum(self.widths)
        counts = [_panel_count(weight) for weight in weights]
        first = [sum(counts[:i]) for i in range(len(counts))]
        slabs = slabs or SlabAllocator(slab_bytes=0)
        self._panels = _pack(weights, first, sum(counts), slabs, activations == "int8")
        self.activations = "int8" if isinstance(self._panels, Int8Panels) else "float32"
        self._bias: Array = np.zeros(sum(counts) * PANEL_COLUMNS, np.float32)
        self._columns = np.zeros((sum(counts), 3), np.int64)
        start = 0
        for bias, width, panel, count in zip(biases, self.widths, first, counts, strict=True):
            if bias is not None:
                self._bias[panel * PANEL_COLUMNS : panel * PANEL_COLUMNS + width] = bias
            for i in range(count):
                self._columns[panel + i] = start, width, i * PANEL_COLUMNS
            start += width
        self._shared = {
            "depth": self.depth,
            "bias": address_of(self._bias),
            "columns": address_of(self._columns),
            "num_panels": len(self._columns),
            "out_width": self.total,
        }
        self._multiply = self._panels.product(self._shared)
        self._take: Product | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the packed weights."""
        return self._panels.bytes

    def take(self, rows: NDArray[np.integer]) -> Array:
        """Return rows of the matrix, widened: float32 [*rows.shape, K].

        There must be exactly one matrix.
        """
        if isinstance(rows, TracedArray):
            return self._capture_take(rows)
        if rows.size and not 0 <= rows.min() <= rows.max() < self.total:
            raise IndexError(
                f"rows {rows.min()} to {rows.max()} are out of range: the matrix has {self.total} "
                "rows"
            )
        out = np.empty((*rows.shape, self.depth), np.float32)
        if self._take is None:
            op, weights = self._panels.embedding_node()
            self._take = product(op, {"width": self.depth, **weights})
        indices = np.ascontiguousarray(rows, np.int32).reshape(-1, 1)
        self._take(indices.view(np.float32), out.reshape(-1))
        return out

    def multiply(self, x: Array) -> list[Array]:
        """Return x @ W_i.T + b_i for each matrix: float32 [..., N_i], each contiguous.

        ``x``: float32 [..., K]. A ``TracedArray`` adds the product to the graph that is being
        captured, and the results are then traced, too. Raises ``ValueError`` if the last axis is
        not K, and ``NotCapturable`` if the graph cannot have the product.
        """
        lead, depth = x.shape[:-1], x.shape[-1]
        if depth != self.depth:
            raise ValueError(f"the input has shape {x.shape}; it must be [..., {self.depth}]")
        if isinstance(x, TracedArray):
            return self._capture(x)
        if not x.flags.c_contiguous:
            x = np.ascontiguousarray(x)
        rows = x.size // depth
        out = np.empty(rows * self.total, np.float32)
        clock = FORWARD_CLOCK.get()
        start = 0.0 if clock is None else time.perf_counter()
        self._multiply(x.reshape(rows, depth), out)
        if clock is not None:
            clock.products += time.perf_counter() - start
        if len(self.widths) == 1:
            return [out.reshape(*lead, self.total)]
        parts, start = [], 0
        for width in self.widths:
            end = start + rows * width
            parts.append(out[start:end].reshape(*lead, width))
            start = end
        return parts

    def _capture(self, x: TracedArray) -> list[Any]:
        """Add ``multiply`` as a node to the graph that is being captured."""
        capture, rows, *between = x.capture, *x.shape[:-1]
        if any(size != 1 for size in between):
            raise NotCapturable("the model multiplies more rows than there are tokens")
        capture.keep(*self._panels.arrays, self._bias, self._columns)
        op, weights = self._panels.matmul_node()
        out = capture.new_array((rows, self.total))
        capture.add_node(
            op,
            out,
            x=self._panels.capture_input(x),
            **self._shared,
            **weights,
        )
        flat = out.reshape(-1)
        ends = [rows * sum(self.widths[: i + 1]) for i in range(len(self.widths))]
        return [
            flat[end - rows * width : end].reshape(*x.shape[:-1], width)
            for end, width in zip(ends, self.widths, strict=True)
        ]

    def _capture_take(self, rows: TracedArray) -> Any:
        """Add ``take`` as a node to the graph that is being captured."""
        capture = rows.capture
        capture.keep(*self._panels.arrays)
        capture.vocabulary = min(capture.vocabulary, self.total)
        op, weights = self._panels.embedding_node()
        out = capture.new_array((*rows.shape, self.depth))
        capture.add_node(op, out, token_ids=rows, width=self.depth, **weights)
        return out


def _panel_count(weight: WeightMatrix) -> int:
    """Return the number of panels of a packed matrix.

    A low-precision matrix fills entire spans, so its last panels may be empty.
    """
    width = int(weight.shape[0])
    if isinstance(weight, np.ndarray):
        return -(-width // PANEL_COLUMNS)
    return -(-width // SPAN_COLUMNS) * SPAN_PANELS


def _pack(
    weights: Sequence[WeightMatrix],
    first: Sequence[int],
    count: int,
    slabs: SlabAllocator,
    int8_activations: bool,
) -> PackedPanels:
    floats = [weight for weight in weights if isinstance(weight, np.ndarray)]
    if floats:
        return FloatPanels(floats, first, count, slabs)
    quantized = [weight for weight in weights if isinstance(weight, QuantizedMatrix)]
    if int8_activations and quantized and quantized[0].bits in int8_dot.BITS:
        return Int8Panels(quantized, first, count, slabs)
    low_precision = [weight for weight in weights if not isinstance(weight, np.ndarray)]
    return LowPrecisionPanels(low_precision, first, count, slabs)
