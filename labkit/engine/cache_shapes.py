"""Run one token through a plain model, to learn the shapes of what its layers cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.engine.compute_dtype import dtype_name
from labkit.engine.engine_protocol import EngineError
from labkit.engine.kv_layout.cache_spec import AttentionSpec, CacheSpec
from labkit.engine.kv_layout.kv_shape import KVShape
from labkit.engine.model_loader import LoadedModel


@dataclass(frozen=True, slots=True)
class CacheShapes:
    """The shapes of what the layers of a model cache.

    Attributes
    ----------
    attention
        The shape of a token's key and value, for each layer that caches them.
    dtype
        The dtype of the cached arrays, as MLX names it.
    """

    attention: tuple[KVShape, ...]
    dtype: str


def cache_shapes(loaded: LoadedModel) -> CacheShapes:
    """Run one token through the model and record what its layers cache.

    Raises
    ------
    EngineError
        A layer does not use its cache.
    """
    import mlx.core as mx

    recorders = CacheRecorders(loaded.caches)
    loaded.model(mx.zeros((1, 1), mx.int32), cache=recorders.layers)
    attention = [recorder for recorder in recorders.attention if recorder.shape is not None]
    if len(attention) != len(recorders.attention):
        raise EngineError(f"model_type={loaded.model_type}: a layer does not use its cache")
    shapes = tuple(recorder.shape for recorder in attention if recorder.shape is not None)
    return CacheShapes(shapes, attention[0].dtype)


class CacheRecorders:
    """A recorder in place of every cache of a model."""

    def __init__(self, specs: Sequence[CacheSpec]) -> None:
        self.attention: list[ShapeRecorder] = []
        self.layers = [self._create(spec) for spec in specs]

    def _create(self, spec: CacheSpec) -> Any:
        if isinstance(spec, tuple):
            return tuple(self._create(part) for part in spec)
        assert isinstance(spec, AttentionSpec)
        self.attention.append(ShapeRecorder())
        return self.attention[-1]


class ShapeRecorder:
    """A cache of one token that records the shape and dtype of a layer's keys and values."""

    offset = 0

    def __init__(self) -> None:
        self.shape: KVShape | None = None
        self.dtype = ""
        self._cached: tuple[Any, Any] = (None, None)

    def make_mask(self, *_args: Any, **_options: Any) -> None:
        """Return None, because one token needs no mask."""
        return None

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Record the shapes and the dtype, and return the arrays unchanged."""
        self.shape = KVShape(int(keys.shape[1]), int(keys.shape[3]), int(values.shape[3]))
        self.dtype = dtype_name(keys.dtype)
        self._cached = keys, values
        return self._cached

    def record_attention(self, keys: Any, values: Any) -> None:
        """Record a call of ``scaled_dot_product_attention`` with this cache.

        A layer that passes the same array as keys and values attends to latents. It has cached
        the latents as keys, and the rotary part of the keys as values.
        """
        if self.shape is not None and keys is values:
            latents, rotary = self._cached
            key_dim = int(latents.shape[3] + rotary.shape[3])
            self.shape = KVShape(self.shape.num_kv_heads, key_dim, int(latents.shape[3]), True)

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return the last arrays, for a layer that shares them."""
        return self._cached
