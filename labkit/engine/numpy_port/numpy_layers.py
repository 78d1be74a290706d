"""NumPy counterparts of the layers of mlx_lm's models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.cpu.capture import graph_ops
from labkit.cpu.capture.traced_array import NotCapturable, TracedArray
from labkit.cpu.layers.rope import RotaryTable
from labkit.cpu.matmul.packed_linear import PackedLinear, WeightMatrix
from labkit.cpu.matmul.quantized_weights import LowPrecisionMatrix
from labkit.cpu.runtime.address_intrinsics import address_of
from labkit.cpu.runtime.aligned_memory import SlabAllocator

Array = NDArray[np.float32]


class LayerWeights(NamedTuple):
    """The format and the bytes of a layer's weights, and the type of their activations.

    ``activations`` is ``float32`` or ``int8``: the type of the inputs that the weights multiply. It
    is None if the layer has multiplied nothing by the weights yet.
    """

    format: str
    bytes: int
    activations: str | None


class PackedLayer:
    """A layer whose weights are a ``PackedLinear``."""

    __slots__ = ("_packed",)
    _packed: PackedLinear

    @property
    def weights(self) -> LayerWeights:
        packed = self._packed
        return LayerWeights(packed.weight_format, packed.bytes, packed.activations)


class Linear(PackedLayer):
    """``x @ weight.T + bias`` for float32 x [..., K]."""

    __slots__ = ()

    def __init__(
        self, weight: WeightMatrix, bias: Array | None, slabs: SlabAllocator, activations: str
    ) -> None:
        self._packed = PackedLinear([weight], [bias], slabs, activations)

    def __call__(self, x: Array) -> Array:
        return self._packed.multiply(x)[0]


class SummedLinear(PackedLayer):
    """A linear layer sharded over its inputs: ``all_sum`` adds the ranks' products, then bias."""

    __slots__ = ("_all_sum", "_bias")

    def __init__(
        self,
        weight: WeightMatrix,
        bias: Array | None,
        slabs: SlabAllocator,
        activations: str,
        all_sum: Callable[[Array], Array],
    ) -> None:
        self._packed = PackedLinear([weight], [None], slabs, activations)
        self._bias = bias
        self._all_sum = all_sum

    def __call__(self, x: Array) -> Array:
        """Return float32 [..., N], equal in all ranks, for this rank's inputs x [..., K]."""
        if isinstance(x, TracedArray):
            raise NotCapturable("the model's layers are summed over the ranks")
        total = self._all_sum(self._packed.multiply(x)[0])
        return total if self._bias is None else total + self._bias


class ProjectionGroup(PackedLayer):
    """Projections of the same input (q, k, v; gate, up), computed together at the first call.

    The results of the other members are kept until these are called with the same array object. A
    call with another array computes the whole group again.
    """

    __slots__ = ("_input", "_ready", "_waiting")

    def __init__(
        self,
        weights: Sequence[WeightMatrix],
        biases: Sequence[Array | None],
        slabs: SlabAllocator,
        activations: str,
    ) -> None:
        self._packed = PackedLinear(weights, biases, slabs, activations)
        self._input: Array | None = None
        self._ready: list[Array | None] = []
        self._waiting = 0

    def project(self, member: int, x: Array) -> Array:
        if x is not self._input or self._ready[member] is None:
            self._input = x
            self._ready = [*self._packed.multiply(x)]
            self._waiting = len(self._ready)
        out = self._ready[member]
        assert out is not None
        self._ready[member] = None
        self._waiting -= 1
        if not self._waiting:
            self._input = None
        return out


class GroupedLinear:
    """One member of a ``ProjectionGroup``."""

    __slots__ = ("_group", "_member")

    def __init__(self, group: ProjectionGroup, member: int) -> None:
        self._group = group
        self._member = member

    def __call__(self, x: Array) -> Array:
        return self._group.project(self._member, x)


class MultiLinear:
    """mlx_lm's linear layer with a matrix for each head: ``x[:, h] @ weights[h].T``."""

    __slots__ = ("_packed",)

    def __init__(self, weights: Sequence[WeightMatrix], slabs: SlabAllocator) -> None:
        self._packed = [PackedLinear([weight], [None], slabs) for weight in weights]

    @property
    def weights(self) -> LayerWeights:
        size = sum(packed.bytes for packed in self._packed)
        first = self._packed[0]
        return LayerWeights(first.weight_format, size, first.activations)

    def __call__(self, x: Array) -> Array:
        """Return the projections of x [tokens, heads, 1, K], float32 [tokens, heads, 1, N]."""
        if isinstance(x, TracedArray):
            raise NotCapturable("the model multiplies each head by a matrix of its own")
        out = np.empty((*x.shape[:3], self._packed[0].total), np.float32)
        for head, packed in enumerate(self._packed):
            out[:, head] = packed.multiply(x[:, head])[0]
        return out


class Embedding:
    """A float32 embedding table, which is also the output projection of tied models.

    The first product packs the table into a new array and frees the table. From then on lookups
    read the packed copy too.
    """

    __slots__ = ("_packed", "_table")

    def __init__(self, weight: Array) -> None:
        self._table: Array | None = weight
        self._packed: PackedLinear | None = None

    @property
    def weight(self) -> Array:
        """The table, float32 [N, D]."""
        if self._table is not None:
            return self._table
        assert self._packed is not None
        return self._packed.take(np.arange(self._packed.total))

    @property
    def weights(self) -> LayerWeights:
        packed, table = self._packed, self._table
        if table is not None:
            return LayerWeights("float32", table.nbytes, None)
        assert packed is not None
        return LayerWeights(packed.weight_format, packed.bytes, packed.activations)

    def __call__(self, ids: NDArray[np.integer]) -> Array:
        """Return the embeddings of ids as a new array, float32 [*ids.shape, D]."""
        if self._packed is not None:
            return self._packed.take(ids)
        assert self._table is not None
        if isinstance(ids, TracedArray):
            return self._capture(ids, self._table)
        return self._table.take(ids, axis=0)

    def _capture(self, ids: TracedArray, table: Array) -> Any:
        capture, (rows, width) = ids.capture, table.shape
        capture.keep(table)
        capture.vocabulary = min(capture.vocabulary, rows)
        out = capture.new_array((*ids.shape, width))
        weights = address_of(table)
        capture.add_node(graph_ops.EMBEDDING, out, token_ids=ids, width=width, weights=weights)
        return out

    def as_linear(self, x: Array) -> Array:
        """Return ``x @ weight.T``. The first call packs the table."""
        if self._packed is None:
            self._packed = PackedLinear([self.weight], [None])
            self._table = None
        return self._packed.multiply(x)[0]


class StoredEmbedding(PackedLayer):
    """An embedding in low precision. Lookups and products read the same packed copy."""

    __slots__ = ("_is_output",)

    def __init__(self, weight: LowPrecisionMatrix, slabs: SlabAllocator, activations: str) -> None:
        self._packed = PackedLinear([weight], [None], slabs, activations)
        self._is_output = False  # until the first product

    @property
    def weights(self) -> LayerWeights:
        weights = super().weights
        return weights if self._is_output else weights._replace(activations=None)

    def __call__(self, ids: NDArray[np.integer]) -> Array:
        """Return the embeddings of ids as a new array, float32 [*ids.shape, D]."""
        return self._packed.take(ids)

    def as_linear(self, x: Array) -> Array:
        """Return ``x @ weight.T``."""
        self._is_output = True
        return self._packed.multiply(x)[0]


class RoPE:
    """Rotary embedding of x [B, heads, L, head_dim] at positions offset, offset + 1, ..."""

    __slots__ = ("_input_scale", "_table", "_traditional")

    def __init__(self, table: RotaryTable, traditional: bool, input_scale: float) -> None:
        self._table = table
        self._traditional = traditional
        self._input_scale = input_scale

    def __call__(self, x: Array, offset: NDArray[np.int32] | int = 0) -> Array:
        """Return x rotated. ``offset`` is int32 [B], or one integer for all entries."""
        return self._table.rotate(
            x, offset, traditional=self._traditional, input_scale=self._input_scale
        )
