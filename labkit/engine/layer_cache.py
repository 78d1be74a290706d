"""Duck-typed mlx_lm caches, one per layer, that connect an unedited model with the KV memory.

The model is fed ids of shape [T, 1]: every token is a batch entry of its own, so RoPE takes a
position per token. A layer calls ``update_and_fetch`` with its new keys and values, gets a
``KVHandle``, and passes it to ``scaled_dot_product_attention`` as keys and values.
``model_loader`` has replaced that function by a function that calls ``KVHandle.attend``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.engine.engine_protocol import EngineError
from labkit.engine.kv_layout.cache_spec import CacheSpec, StateSpec

if TYPE_CHECKING:
    from labkit.engine.attention.attention_protocol import Attention
    from labkit.engine.kv_layout.state_memory import StateStep


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The data that all layers of one forward share.

    Attributes
    ----------
    owner
        The attention that owns the KV memory.
    attention
        The attention that the layers call: ``owner``, or an adapter that converts arrays for it.
    metadata
        The step's attention metadata.
    positions
        int32 [T], the position of each token.
    states
        The step's recurrent states (None: the model has none).
    """

    owner: Attention
    attention: Attention
    metadata: Any
    positions: Any
    states: StateStep | None = None


class LayerCache:
    """The cache of one layer as the model sees it. ``context`` is set during each forward only."""

    def __init__(self, layer: int, window: int | None) -> None:
        self.layer = layer
        self.window = window
        self.context: ForwardContext | None = None
        self._owner: Callable[[], Attention | None] = lambda: None
        self._bound: tuple[Any, ...] = ()
        self._handle: KVHandle | None = None

    def current_context(self) -> ForwardContext:
        """Return the context of the forward that is running."""
        if self.context is None:
            raise EngineError("the model read its cache outside a step")
        return self.context

    @property
    def offset(self) -> Any:
        """Positions of the step's tokens, int32 [T]."""
        return self.current_context().positions

    def make_mask(
        self, _length: int, return_array: bool = False, window_size: int | None = None
    ) -> None:
        """Return None, because the attention backend applies causality and the layer's window."""
        if window_size not in (None, self.window):
            raise EngineError(
                f"the model masks a window of {window_size} keys, but its cache has "
                f"{'none' if self.window is None else self.window}"
            )
        return None

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[KVHandle, KVHandle]:
        """Return a handle of new keys and values [T, kv_heads, 1, head_dim].

        The handle is returned twice, because the model expects a pair of keys and values.
        """
        self._handle = KVHandle(self, keys, values)
        return self._handle, self._handle

    def keys_and_values(self) -> tuple[KVHandle, KVHandle]:
        """Return the last handle twice, for a layer that shares this layer's keys and values."""
        if self._handle is None:
            raise EngineError("a layer shares the keys of another layer that has none yet")
        return self._handle, self._handle

    def bind(self, scale: float, heads: int, sinks: Any) -> None:
        """Bind this layer to the step's attention, unless it is bound already."""
        context, bound = self.current_context(), self._bound
        if (
            self._owner() is not context.owner
            or bound[:2] != (scale, heads)
            or bound[2] is not sinks
        ):
            context.attention.bind(
                self.layer, scale=float(scale), heads=heads, window=self.window, sinks=sinks
            )
            # A weak reference, because a shared model outlives the KV memory of an engine.
            self._owner, self._bound = weakref.ref(context.owner), (scale, heads, sinks)


class KVHandle:
    """New keys and values of one layer. The first ``attend`` writes them to the KV memory."""

    __slots__ = ("cache", "dtype", "keys", "values")

    def __init__(self, cache: LayerCache, keys: Any, values: Any) -> None:
        self.cache = cache
        self.keys = keys
        self.values = values
        self.dtype = values.dtype  # some models cast the attention's output to it

    def attend(self, queries: Any, scale: float, mask: Any, sinks: Any) -> Any:
        """Attend over each sequence's whole context.

        ``queries`` and the result are [T, heads, 1, dim].
        """
        if mask is not None:
            raise EngineError("the model's attention builds a mask that labkit does not support")
        cache = self.cache
        cache.bind(scale, queries.shape[1], sinks)
        context: Any = cache.context
        k = v = None
        if self.keys is not None:
            k, v = self.keys.squeeze(2), self.values.squeeze(2)
            self.keys = self.values = None
        out = context.attention.forward(cache.layer, queries.squeeze(2), k, v, context.metadata)
        return out[:, :, None]


class StateCache:
    """The state of one layer as the model sees it, before a ``SegmentMixer`` reads the arrays.

    ``layer`` is the layer's index among those with a state. ``context`` is set during each forward
    only.
    """

    def __init__(self, layer: int, num_arrays: int) -> None:
        self.layer = layer
        self.num_arrays = num_arrays
        self.context: ForwardContext | None = None

    def current_states(self) -> StateStep:
        """Return the states of the step that is running."""
        if self.context is None or self.context.states is None:
            raise EngineError("the model read a state outside a step")
        return self.context.states

    def make_mask(self, _length: int) -> None:
        """Return None, because mixers run over segments without padding."""
        return None


class ModelCaches:
    """The caches of all layers of a model, as ``model(ids, cache=caches.layers)`` takes them.

    Parameters
    ----------
    specs
        What each layer caches.
    first_layer
        The index in the KV memory of the model's first layer with keys and values.
    """

    def __init__(self, specs: Sequence[CacheSpec], first_layer: int = 0) -> None:
        self.leaves: list[LayerCache | StateCache] = []
        self._next_layer = first_layer
        self._next_state = 0
        self.layers = [self._create(spec) for spec in specs]

    def _create(self, spec: CacheSpec) -> Any:
        if isinstance(spec, tuple):
            return tuple(self._create(part) for part in spec)
        cache: LayerCache | StateCache
        if isinstance(spec, StateSpec):
            cache = StateCache(self._next_state, spec.num_arrays)
            self._next_state += 1
        else:
            cache = LayerCache(self._next_layer, spec.window)
            self._next_layer += 1
        self.leaves.append(cache)
        return cache

    @contextmanager
    def use(self, context: ForwardContext) -> Iterator[None]:
        """Give all caches the context of a forward while it runs."""
        for cache in self.leaves:
            cache.context = context
        try:
            yield
        finally:
            for cache in self.leaves:
                cache.context = None
