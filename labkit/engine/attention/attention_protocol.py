"""The interface between a model's layers and the attention over the KV memory.

An engine calls ``bind`` once for each layer. In every step it calls ``forward`` for each layer and
then ``report``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from labkit.engine.attention.launch_evidence import Reports, merge_reports

if TYPE_CHECKING:
    from labkit.engine.attention.paged_backend_base import PagedBackend

Arrays = Literal["numpy", "mlx"]


class Attention(Protocol):
    """Writes a layer's new keys and values to the KV memory, and attends over the cached ones."""

    @property
    def arrays(self) -> Arrays | Literal["any"]:
        """``numpy``, ``mlx`` or ``any``: the kind of arrays that ``forward`` takes and returns."""

    @property
    def is_lazy(self) -> bool:
        """Whether ``forward`` on MLX arrays returns before its result is computed."""

    def bind(
        self,
        layer: int,
        *,
        scale: float,
        heads: int,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Any = None,
    ) -> None:
        """Set the constants of a layer. ``heads`` is its number of query heads.

        The other arguments are described in ``AttentionLayer``. Raises ``ValueError`` if the
        attention does not support the layer. The message gives the reason.
        """

    def forward(self, layer: int, q: Any, k: Any, v: Any, metadata: Any, out: Any = None) -> Any:
        """Write a layer's new keys and values, then attend over the cached ones.

        ``q``: [total_q, num_q_heads, head_dim], the packed queries of the step. ``k``, ``v``:
        [total_q, num_kv_heads, head_dim], or None if the pools already have them; ``v`` is None if
        the layer's values are a part of its keys (``KVShape.latent``). ``metadata``: the step's
        ``AttentionMetadata`` or, for KV layouts without blocks, an ``SdpaStep``. ``out``: NumPy
        only, the array to write the result to (None: a new array). Returns the result, [total_q,
        num_q_heads, value_dim], with the dtype of ``q``. Raises ``ValueError`` if shapes or dtypes
        do not fit; nothing was launched then.
        """

    def report(self, metadata: Any) -> Reports:
        """Return the reports of the evaluated launches since the last call, identical summed."""

    def pending(self, metadata: Any) -> list[Any]:
        """Return the lazy arrays that must be evaluated with the outputs at the step's end."""


class NoAttention:
    """The ``Attention`` of a model without keys and values: no layer calls it."""

    arrays: Literal["any"] = "any"
    is_lazy = True

    def bind(self, layer: int, **_options: Any) -> None:
        raise ValueError(f"layer {layer}: the model has no layers with keys and values")

    def forward(self, layer: int, q: Any, k: Any, v: Any, metadata: Any, out: Any = None) -> Any:
        raise ValueError(f"layer {layer}: the model has no layers with keys and values")

    def report(self, metadata: Any) -> Reports:
        return merge_reports([])

    def pending(self, metadata: Any) -> list[Any]:
        return []


class CacheGroupAttention:
    """An ``Attention`` over a backend for each KV cache group. Its metadata are those of each.

    ``places`` has, for each layer, its group and its index among the group's layers.
    """

    def __init__(self, backends: Sequence[PagedBackend], places: Sequence[tuple[int, int]]) -> None:
        self.backends = backends
        self.arrays: Arrays | Literal["any"] = backends[0].arrays
        self.is_lazy = backends[0].is_lazy
        self._places = places

    def bind(self, layer: int, **constants: Any) -> None:
        group, own = self._places[layer]
        self.backends[group].bind(own, **constants)

    def forward(self, layer: int, q: Any, k: Any, v: Any, metadata: Any, out: Any = None) -> Any:
        group, own = self._places[layer]
        return self.backends[group].forward(own, q, k, v, metadata[group], out)

    def report(self, metadata: Any) -> Reports:
        pairs = self._with_metadata(metadata)
        return tuple(report for backend, own in pairs for report in backend.report(own))

    def pending(self, metadata: Any) -> list[Any]:
        pairs = self._with_metadata(metadata)
        return [array for backend, own in pairs for array in backend.pending(own)]

    def _with_metadata(self, metadata: Any) -> list[tuple[PagedBackend, Any]]:
        """Return the backends that have layers, each with its own metadata."""
        pairs = zip(self.backends, metadata, strict=True)
        return [(backend, own) for backend, own in pairs if own is not None]


class ArrayAdapter:
    """An ``Attention`` for a model on the other kind of arrays, NumPy's (float32) or MLX's.

    In every layer the arrays are converted, lazy arrays are evaluated, and the result is converted
    back. ``conversions`` is the number of calls of ``forward``. Each evaluates MLX's graph once.
    """

    is_lazy = False

    def __init__(self, inner: Attention) -> None:
        self._inner = inner
        self.arrays: Arrays = "numpy" if inner.arrays == "mlx" else "mlx"
        self.conversions = 0

    def bind(self, layer: int, *, sinks: Any = None, **options: Any) -> None:
        import mlx.core as mx

        if isinstance(sinks, mx.array) and self._inner.arrays == "numpy":
            sinks = np.array(sinks.astype(mx.float32))
        self._inner.bind(layer, sinks=sinks, **options)

    def forward(self, layer: int, q: Any, k: Any, v: Any, metadata: Any, out: Any = None) -> Any:
        import mlx.core as mx

        self.conversions += 1
        arrays = [array for array in (q, k, v) if array is not None]
        if self.arrays == "mlx":
            dtype, arrays = q.dtype, [array.astype(mx.float32) for array in arrays]
            mx.eval(arrays)
            q, k, v = [*map(np.asarray, arrays), None, None][:3]
            return mx.array(self._inner.forward(layer, q, k, v, metadata)).astype(dtype)
        q, k, v = [*map(mx.array, arrays), None, None][:3]
        result = self._inner.forward(layer, q, k, v, metadata)
        mx.eval(result, self._inner.pending(metadata))
        if out is None:
            return np.array(result)
        np.copyto(out, np.asarray(result))
        return out

    def report(self, metadata: Any) -> Reports:
        return self._inner.report(metadata)

    def pending(self, metadata: Any) -> list[Any]:
        return []
