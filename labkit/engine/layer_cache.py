"""How an unedited mlx_lm model reaches the KV memory: one duck-typed cache per layer.

The model is fed ids of shape [T, 1], every token a batch entry of its own, so RoPE takes
a position per token.  ``update_and_fetch`` returns a ``Handle`` with the new keys and
values, and the model hands it on to ``scaled_dot_product_attention``, which labkit has
replaced by one that asks a handle to attend (``model_loader``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.engine.base import EngineError
from labkit.engine.kv_layout.base import LayerShape

if TYPE_CHECKING:
    from labkit.engine.attention.base import Attention


@dataclass(frozen=True, slots=True)
class Running:
    """What the layers of one forward share: the step's attention and plan, and positions."""

    attention: Attention
    plan: Any
    positions: Any


class LayerCache:
    """One layer's cache as the model sees it; ``step`` is set before each forward."""

    def __init__(self, layer: int, window: int | None) -> None:
        self.layer = layer
        self.window = window
        self.step: Running | None = None
        self._bound: tuple[Any, ...] = ()

    def current(self) -> Running:
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

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Handle, Handle]:
        """Take new keys and values [T, kv_heads, 1, head_dim]; return what attends to them."""
        handle = Handle(self, keys, values)
        return handle, handle

    def bind(self, scale: float, heads: int, sinks: Any) -> None:
        """Tell the step's attention what this layer is, if it does not know."""
        asked = (self.current().attention, scale, heads)
        if self._bound[:3] != asked or self._bound[3] is not sinks:
            asked[0].bind(
                self.layer, scale=float(scale), heads=heads, window=self.window, sinks=sinks
            )
            self._bound = (*asked, sinks)


class Handle:
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
        self.shape: LayerShape | None = None

    def make_mask(self, *_args: Any, **_options: Any) -> None:
        """Return no mask: the recorder sees one token."""
        return None

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Note the shapes and return the arrays as they are."""
        self.shape = LayerShape(int(keys.shape[1]), int(keys.shape[3]), int(values.shape[3]))
        return keys, values
