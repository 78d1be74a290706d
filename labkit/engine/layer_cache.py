"""How an unedited mlx_lm model reaches the KV memory: one duck-typed cache per layer.

The model is fed ids of shape [T, 1], every token a batch entry of its own, so RoPE takes
a position per token.  ``update_and_fetch`` returns a ``KVHandle`` with the new keys and
values, and the model hands it on to ``scaled_dot_product_attention``: labkit's own in the
modules that its models are made of (``model_loader``), which asks a handle to attend.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.engine.compute_dtype import dtype_name
from labkit.engine.engine_protocol import EngineError
from labkit.engine.kv_layout.kv_shape import KVShape

if TYPE_CHECKING:
    from labkit.engine.attention.attention_protocol import Attention


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What the layers of one forward share.

    ``owner``: the attention that keeps what a layer is bound to; ``attention``: the same, or
    a bridge to it.
    """

    owner: Attention
    attention: Attention
    plan: Any
    positions: Any


class LayerCache:
    """One layer's cache as the model sees it; ``step`` is set before each forward."""

    def __init__(self, layer: int, window: int | None) -> None:
        self.layer = layer
        self.window = window
        self.step: ForwardContext | None = None
        self._owner: Callable[[], Attention | None] = lambda: None
        self._bound: tuple[Any, ...] = ()
        self._handle: KVHandle | None = None

    def current(self) -> ForwardContext:
        """Return the step that is running."""
        if self.step is None:
            raise EngineError("the model read its cache outside a step")
        return self.step

    @property
    def offset(self) -> Any:
        """Positions of the step's tokens, int32 [T]."""
        return self.current().positions

    def make_mask(
        self, _length: int, return_array: bool = False, window_size: int | None = None
    ) -> None:
        """Return no mask: causality and this layer's own window are the backend's."""
        if window_size not in (None, self.window):
            raise EngineError(f"it masks a window of {window_size} that its cache does not have")
        return None

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[KVHandle, KVHandle]:
        """Take new keys and values [T, kv_heads, 1, head_dim]; return what attends to them."""
        self._handle = KVHandle(self, keys, values)
        return self._handle, self._handle

    def keys_and_values(self) -> tuple[KVHandle, KVHandle]:
        """Return what this layer's ``update_and_fetch`` gave, to a layer that shares its keys."""
        if self._handle is None:
            raise EngineError("a layer shares the keys of one that has none yet")
        return self._handle, self._handle

    def bind(self, scale: float, heads: int, sinks: Any) -> None:
        """Tell the step's attention what this layer is, if it does not know."""
        step, bound = self.current(), self._bound
        if self._owner() is not step.owner or bound[:2] != (scale, heads) or bound[2] is not sinks:
            step.attention.bind(
                self.layer, scale=float(scale), heads=heads, window=self.window, sinks=sinks
            )
            # Weakly: a model outlives the KV memory of its engines.
            self._owner, self._bound = weakref.ref(step.owner), (scale, heads, sinks)


class KVHandle:
    """New keys and values on their way to the KV memory; written by the first attention."""

    __slots__ = ("cache", "dtype", "keys", "values")

    def __init__(self, cache: LayerCache, keys: Any, values: Any) -> None:
        self.cache = cache
        self.keys = keys
        self.values = values
        # To which some models cast what attention returns.
        self.dtype = values.dtype

    def attend(self, queries: Any, scale: float, mask: Any, sinks: Any) -> Any:
        """Attend over each sequence's whole context; queries and result [T, heads, 1, dim]."""
        if mask is not None:
            raise EngineError("its attention builds a mask of its own")
        cache = self.cache
        cache.bind(scale, queries.shape[1], sinks)
        step: Any = cache.step
        k = v = None
        if self.keys is not None:
            k, v = self.keys.squeeze(2), self.values.squeeze(2)
            self.keys = self.values = None
        out = step.attention.forward(cache.layer, queries.squeeze(2), k, v, step.plan)
        return out[:, :, None]


class ShapeRecorder:
    """A cache that only notes the shape of what a layer caches, for sizing the pools."""

    offset = 0

    def __init__(self) -> None:
        self.shape: KVShape | None = None
        self.dtype = ""
        self._cached: tuple[Any, Any] = (None, None)

    def make_mask(self, *_args: Any, **_options: Any) -> None:
        """Return no mask: the recorder sees one token."""
        return None

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Note the shapes and return the arrays as they are."""
        self.shape = KVShape(int(keys.shape[1]), int(keys.shape[3]), int(values.shape[3]))
        self.dtype = dtype_name(keys.dtype)
        self._cached = keys, values
        return self._cached

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return the arrays, to a layer that shares them."""
        return self._cached
