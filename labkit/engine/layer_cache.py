"""How an unedited mlx_lm model reaches the KV cache: one duck-typed cache per layer.

The model is fed ids of shape [T, 1], every token a batch entry of its own, so RoPE takes
a position per token.  ``update_and_fetch`` returns a ``Handle`` with the new keys and
values, and the model hands it on to ``scaled_dot_product_attention``, which labkit has
replaced by one that asks a handle to attend (``model_loader``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from labkit.engine.base import EngineError, StaleLaunchError
from labkit.engine.dtype import word
from labkit.engine.kv_layout.base import LayerShape
from labkit.engine.stats import Counters

if TYPE_CHECKING:
    from labkit.engine.kv_layout.base import StepAttention

Array = NDArray[np.float32]


class ArrayBridge(Protocol):
    """Moves a forward's own arrays to NumPy and back: MLX or NumPy."""

    def to_numpy(self, *arrays: Any) -> tuple[Array, ...]:
        """Return views, all evaluated at once."""

    def from_numpy(self, array: NDArray[Any], like: Any = None) -> Any:
        """Return the forward's own kind of array; ``like``: of this array's type."""


@dataclass(slots=True)
class Step:
    """What the layers of one forward share: the batch's attention, positions and counters.

    ``handles``: what each layer's attention was given, for layers that share its keys.
    """

    attention: StepAttention
    counters: Counters
    positions: Any
    handles: dict[int, Handle] = field(default_factory=dict)


class LayerCache:
    """One layer's cache as the model sees it; ``step`` is set before each forward."""

    def __init__(self, layer: int, window: int | None, bridge: ArrayBridge) -> None:
        self.layer = layer
        self.window = window
        self.bridge = bridge
        self.step: Step | None = None

    def current(self) -> Step:
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
        self.current().handles[self.layer] = handle
        return handle, handle

    def keys_and_values(self) -> tuple[Handle, Handle]:
        """Return what this layer's ``update_and_fetch`` gave, to a layer that shares its keys."""
        handle = self.current().handles.get(self.layer)
        if handle is None:
            raise EngineError("a layer shares the keys of one that has none yet")
        return handle, handle


class Handle:
    """New keys and values on their way to the KV memory; written by the first attention.

    That attention lets go of them: a layer that shares them reads the memory.
    """

    __slots__ = ("_new", "cache", "dtype")

    def __init__(self, cache: LayerCache, keys: Any, values: Any) -> None:
        self.cache = cache
        self.dtype = values.dtype  # to which some models cast what attention returns
        self._new: tuple[Any, ...] = keys, values

    def attend(self, queries: Any, scale: float, mask: Any, sinks: Any) -> Any:
        """Attend over each sequence's whole context; queries and result [T, heads, 1, dim]."""
        if mask is not None:
            raise EngineError("its attention builds a mask of its own")
        step, bridge, layer = self.cache.current(), self.cache.bridge, self.cache.layer
        extra = () if sinks is None else (sinks,)
        q, *rest = bridge.to_numpy(queries, *extra, *self._new)
        if self._new:
            *rest, k, v = rest
            step.attention.write(layer, k[:, :, 0], v[:, :, 0])
            self._new = ()
        out, report = step.attention.attend(
            layer,
            q[:, :, 0],
            scale=float(scale),
            window=self.cache.window,
            sinks=rest[0] if rest else None,
        )
        if report.stale:
            raise StaleLaunchError(f"layer {layer}: the launch left another's stamp: {report}")
        step.counters.add_all(report.counters())
        return bridge.from_numpy(out[:, :, None], like=queries)


class ShapeRecorder:
    """A cache that only notes the shape of what a layer caches, for sizing the pools."""

    offset = 0

    def __init__(self) -> None:
        self.shape: LayerShape | None = None
        self.dtype = ""
        self._cached: tuple[Any, Any] = (None, None)

    def make_mask(self, *_args: Any, **_options: Any) -> None:
        """Return no mask: the recorder sees one token."""
        return None

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Note the shapes and return the arrays as they are."""
        self.shape = LayerShape(int(keys.shape[1]), int(keys.shape[3]), int(values.shape[3]))
        self.dtype = word(keys.dtype)
        self._cached = keys, values
        return self._cached

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return the arrays, to a layer that shares them."""
        return self._cached
