"""Linear layers with packed weights: x[M, K] @ W[N, K].T + bias, for float32 x.

``PackedLinear`` packs one or more matrices that are applied to the same input, in float32
(``gemm``) or in low precision, and multiplies by all of them in one launch. With low-precision
weights it computes in float32 (``quantized_matmul``) or, with quantised weights, in int8
(``int8_matmul``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.cpu.capture import graph_ops
from labkit.cpu.capture.traced_array import NotCapturable, TracedArray
from labkit.cpu.matmul import int8_dot, int8_matmul, quantized_matmul
from labkit.cpu.matmul.gemm import PANEL_COLUMNS, pack_panels
from labkit.cpu.matmul.matmul_launch import Product, int8_product, product
from labkit.cpu.matmul.quantized_weights import (
    SPAN_COLUMNS,
    SPAN_PANELS,
    LowPrecisionMatrix,
    QuantizedMatrix,
)
from labkit.cpu.runtime.address_intrinsics import address_of
from labkit.cpu.runtime.aligned_memory import SlabAllocator
from labkit.cpu.runtime.forward_clock import FORWARD_CLOCK

Array = NDArray[np.float32]
# A weight matrix [N, K].
WeightMatrix = Array | LowPrecisionMatrix
Params = dict[str, int]


class PackedPanels(NamedTuple):
    """The packed weights of one or more matrices that multiply the same input.

    A node is an operation code of ``graph_ops``, and those of its parameters that describe the
    weights.
    """

    matmul: tuple[int, Params]  # the node of ``PackedLinear.multiply``
    embedding: tuple[int, Params]  # the node of ``PackedLinear.take``
    # The arrays whose addresses are parameters of the nodes. The first one is the packed weights.
    arrays: tuple[NDArray[Any], ...]
    quantize: Params | None = None  # of the node that quantises the input of ``matmul``


def _pack_floats(
    weights: Sequence[Array], first: Sequence[int], count: int, slabs: SlabAllocator
) -> PackedPanels:
    """Pack matrices in float32 for ``gemm``."""
    panels = slabs.zeros((count, weights[0].shape[1], PANEL_COLUMNS), np.float32)
    for weight, panel in zip(weights, first, strict=True):
        pack_panels(np.ascontiguousarray(weight), panels, panel)
    params = {"weights": address_of(panels)}
    embedding = graph_ops.PACKED_EMBEDDING, {**params, "num_panels": count}
    return PackedPanels((graph_ops.MATMUL, params), embedding, (panels,))


def _pack_spans(
    weights: Sequence[LowPrecisionMatrix], first: Sequence[int], count: int, slabs: SlabAllocator
) -> PackedPanels:
    """Pack matrices of one low-precision format in spans for ``quantized_matmul``."""
    record, depth, group = weights[0].record_dtype, weights[0].shape[1], weights[0].group_size
    spans = slabs.zeros((count // SPAN_PANELS, depth // group * record.itemsize), np.uint8)
    for weight, panel in zip(weights, first, strict=True):
        weight.write_records(spans[panel // SPAN_PANELS :].view(record))
    functions = quantized_matmul.format_functions(
        *weights[0].kernel_format, all(weight.mantissa_exact for weight in weights)
    )
    params = {
        "weights": address_of(spans),
        "functions": address_of(functions.addresses),
        "records": depth // group,
        "packs": group // functions.pack_steps,
        "span_bytes": spans.shape[1],
    }
    matmul = graph_ops.LOW_PRECISION_MATMUL, params
    embedding = graph_ops.LOW_PRECISION_EMBEDDING, params
    return PackedPanels(matmul, embedding, (spans, functions.addresses))


def _for_int8(packed: PackedPanels, weight: QuantizedMatrix) -> PackedPanels:
    """Return quantised matrices in spans, one of which is ``weight``, for activations in int8."""
    functions = int8_matmul.int8_functions(*weight.kernel_format, weight.group_size)
    params, depth = packed.matmul[1], weight.shape[1]
    shared = {
        "functions": address_of(functions.addresses),
        "groups": depth // weight.group_size,
        "row_bytes": functions.row_bytes(depth),
    }
    matmul = {
        "weights": params["weights"],
        "group_bytes": functions.spec.panel_group_bytes,
        "span_bytes": params["span_bytes"],
    }
    return packed._replace(
        matmul=(graph_ops.INT8_MATMUL, matmul | shared),
        arrays=(*packed.arrays, functions.addresses),
        quantize={"depth": depth, **shared},
    )


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
        *("_bias", "_columns", "_multiply", "_panels", "_params", "_take", "activations", "depth"),
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
        first_weight = weights[0]
        self.depth = first_weight.shape[1]
        self.weight_format = (
            "float32" if isinstance(first_weight, np.ndarray) else first_weight.weight_format
        )
        self.widths = tuple(weight.shape[0] for weight in weights)
        self.total = sum(self.widths)
        counts = [_panel_count(weight) for weight in weights]
        *first, num_panels = accumulate(counts, initial=0)
        slabs = slabs or SlabAllocator(slab_bytes=0)
        self._panels = _pack(weights, first, num_panels, slabs, activations == "int8")
        self._bias: Array = np.zeros(num_panels * PANEL_COLUMNS, np.float32)
        self._columns = np.zeros((num_panels, 3), np.int64)
        start = 0
        for bias, width, panel, count in zip(biases, self.widths, first, counts, strict=True):
            if bias is not None:
                self._bias[panel * PANEL_COLUMNS : panel * PANEL_COLUMNS + width] = bias
            for i in range(count):
                self._columns[panel + i] = start, width, i * PANEL_COLUMNS
            start += width
        op, params = self._panels.matmul
        self._params = params | {
            "depth": self.depth,
            "bias": address_of(self._bias),
            "columns": address_of(self._columns),
            "num_panels": num_panels,
            "out_width": self.total,
        }
        quantize = self._panels.quantize
        self.activations = "float32" if quantize is None else "int8"
        self._multiply = (
            product(op, self._params) if quantize is None else int8_product(quantize, self._params)
        )
        self._take: Product | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the packed weights."""
        return self._panels.arrays[0].nbytes

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
            op, weights = self._panels.embedding
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
        return self._parts(out, rows, lead)

    def _parts(self, flat: Any, rows: int, lead: tuple[int, ...]) -> list[Any]:
        """Divide the flat results of ``rows`` rows into those of each matrix, [*lead, N_i]."""
        if len(self.widths) == 1:
            return [flat.reshape(*lead, self.total)]
        ends = accumulate(rows * width for width in self.widths)
        return [
            flat[end - rows * width : end].reshape(*lead, width)
            for end, width in zip(ends, self.widths, strict=True)
        ]

    def _capture(self, x: TracedArray) -> list[Any]:
        """Add ``multiply`` as a node to the graph that is being captured."""
        capture, lead, quantize = x.capture, x.shape[:-1], self._panels.quantize
        rows, *between = lead
        if any(size != 1 for size in between):
            raise NotCapturable("the model multiplies more rows than there are tokens")
        capture.keep(*self._panels.arrays, self._bias, self._columns)
        out = capture.new_array((rows, self.total))
        if quantize is not None:
            quantized = capture.new_array((rows, quantize["row_bytes"]), np.uint8)
            capture.add_node(graph_ops.QUANTIZE, quantized, x=x, **quantize)
            x = quantized
        capture.add_node(self._panels.matmul[0], out, x=x, **self._params)
        return self._parts(out.reshape(-1), rows, lead)

    def _capture_take(self, rows: TracedArray) -> Any:
        """Add ``take`` as a node to the graph that is being captured."""
        capture = rows.capture
        capture.keep(*self._panels.arrays)
        capture.vocabulary = min(capture.vocabulary, self.total)
        op, weights = self._panels.embedding
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
        return _pack_floats(floats, first, count, slabs)
    low_precision = [weight for weight in weights if not isinstance(weight, np.ndarray)]
    packed, weight = _pack_spans(low_precision, first, count, slabs), low_precision[0]
    if int8_activations and isinstance(weight, QuantizedMatrix) and weight.bits in int8_dot.BITS:
        return _for_int8(packed, weight)
    return packed
