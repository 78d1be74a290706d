"""Duck-typed mlx_lm caches, one per layer, that connect an unedited model with the KV memory.

The model is fed ids of shape [T, 1]: every token is a batch entry of its own, so RoPE takes a
position per token. A layer calls ``update_and_fetch`` with its new keys and values, gets a
``KVHandle`` and its ``ValueHandle``, and passes them to ``scaled_dot_product_attention`` as keys
and values. ``model_loader`` has replaced that function by a function that calls
``KVHandle.attend``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.engine.engine_protocol import EngineError

if TYPE_CHECKING:
    from labkit.engine.attention.attention_protocol import Attention
    from labkit.engine.recurrent_states.state_arrays import StateStep


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Keys and values of every token. A query sees the last ``window`` of them (None: all)."""

    window: int | None = None


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A recurrent or convolution state: ``num_arrays`` arrays for each request."""

    num_arrays: int


# What a layer of a model caches, read from the cache that mlx_lm makes for it. A layer with several
# caches (mlx_lm's ``CacheList``) has a tuple of specs.
CacheSpec = AttentionSpec | StateSpec | tuple["CacheSpec", ...]


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The data that all layers of one forward share."""

    owner: Attention  # the attention that owns the KV memory
    # The attention that the layers call: ``owner``, or an adapter that converts arrays for it
    attention: Attention
    metadata: Any  # the step's attention metadata
    positions: Any  # int32 [T], the position of each token
    states: StateStep | None = None  # the step's recurrent states (None: the model has none)


class LayerCache:
    """The cache of one layer as the model sees it. ``context`` is set during each forward only."""

    packed = True  # every token is a batch entry of its own

    def __init__(self, layer: int, window: int | None) -> None:
        self.layer = layer
        self.window = window
        self.context: ForwardContext | None = None
        # The constants bound, by the owner's id, until the owner is freed: a shared model outlives
        # an engine, and a user's attention may have an equality of its own.
        self._bound: dict[int, tuple[Any, ...]] = {}
        self._handle: KVHandle | None = None

    def current_context(self) -> ForwardContext:
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
                f"the model masks a window of {window_size} keys, but its cache has a window of "
                f"{'all' if self.window is None else self.window} keys; set engine=mlx_lm"
            )
        return None

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[KVHandle, ValueHandle]:
        """Return the handles of new keys and values, each [T, kv_heads, 1, head_dim]."""
        self._handle = KVHandle(self, keys, values)
        return self._handle, self._handle.value_handle

    def keys_and_values(self) -> tuple[KVHandle, ValueHandle]:
        """Return the last handles, for a layer that shares this layer's keys and values."""
        if self._handle is None:
            raise EngineError("a layer uses the keys of another layer before they are computed")
        return self._handle, self._handle.value_handle

    def bind(self, scale: float, heads: int, softcap: float | None, sinks: Any) -> None:
        """Bind this layer to the step's attention, unless it is bound already."""
        context = self.current_context()
        owner = id(context.owner)
        bound = self._bound.get(owner)
        if bound is None or bound[:3] != (scale, heads, softcap) or bound[3] is not sinks:
            context.attention.bind(
                self.layer,
                scale=float(scale),
                heads=heads,
                window=self.window,
                softcap=softcap,
                sinks=sinks,
            )
            if bound is None:
                weakref.finalize(context.owner, self._bound.pop, owner).atexit = False
            self._bound[owner] = scale, heads, softcap, sinks


class KVHandle:
    """New keys and values of one layer. The first ``attend`` writes them to the KV memory.

    With latent attention, mlx_lm caches two arrays per token: the latent as the key, and the rotary
    part of the key, which all heads share, as the value. Its code for one token multiplies the
    rotary queries by the rotary parts, which gives scores. It then calls
    ``scaled_dot_product_attention`` with the latents as keys *and* values, and with these scores as
    the mask. Here a ``ValueHandle`` stands for the rotary parts, and the product with it is the
    rotary queries themselves. So ``attend`` gets the rotary queries as the mask. It appends them to
    the queries, and the rotary part to the latent. The KV memory then holds one key per token, and
    the first part of the key is the value.
    """

    __slots__ = ("_dims", "cache", "keys", "value_handle", "values")

    def __init__(self, cache: LayerCache, keys: Any, values: Any) -> None:
        self.cache = cache
        self.keys = keys
        self.values = values
        self.value_handle = ValueHandle(values)
        self._dims = keys.shape[0], keys.shape[1], keys.shape[3]

    @property
    def dtype(self) -> Any:
        return self.value_handle.dtype

    @property
    def shape(self) -> tuple[Any, ...]:
        """(tokens, KV heads, number of keys that each token sees: an array [T], head dimension).

        A layer that uses the keys of another layer computes its offset from the number of keys.
        """
        num_tokens, num_kv_heads, head_dim = self._dims
        return num_tokens, num_kv_heads, self.cache.offset + 1, head_dim

    def astype(self, _dtype: Any) -> KVHandle:
        """Return the handle, because the attention computes in the dtype of the KV memory."""
        return self

    def attend(
        self,
        queries: Any,
        values: Any,
        scale: float,
        mask: Any,
        sinks: Any,
        softcap: float | None = None,
    ) -> Any:
        """Attend over each sequence's whole context.

        ``values`` is the handle's ``value_handle`` or, in latent attention, the handle itself.
        ``queries`` and the result are [T, heads, 1, dim].
        """
        if queries.dtype != self.dtype:
            queries = queries.astype(self.dtype)
        latent = values is self
        if latent:
            if mask is None:
                raise EngineError("the model's values are its keys, but it has no rotary scores")
            queries, scale = concatenate(queries * scale, mask), 1.0
        elif mask is not None:
            raise EngineError("the model's attention builds a mask that labkit does not support")
        cache = self.cache
        cache.bind(scale, queries.shape[1], softcap, sinks)
        context: Any = cache.context
        k = v = None
        if self.keys is not None:
            if latent:
                k = concatenate(self.keys, self.values).squeeze(2)
            else:
                k, v = self.keys.squeeze(2), self.values.squeeze(2)
            self.keys = self.values = None
        out = context.attention.forward(cache.layer, queries.squeeze(2), k, v, context.metadata)
        return out[:, :, None]


class ValueHandle:
    """The values of a ``KVHandle`` or, in latent attention, the rotary part of its keys."""

    __array_ufunc__ = None  # NumPy leaves ``queries @ handle`` to the handle
    __slots__ = ("_dim", "dtype")

    def __init__(self, values: Any) -> None:
        self.dtype = values.dtype  # some models cast the attention's output to it
        self._dim = values.shape[3]

    def swapaxes(self, _a: int, _b: int) -> Any:
        """Return an identity: the product with it leaves the rotary queries unchanged."""
        if isinstance(self.dtype, np.dtype):
            return self
        import mlx.core as mx

        return mx.eye(self._dim, dtype=self.dtype)

    def __rmatmul__(self, queries: Any) -> Any:
        return queries


def concatenate(first: Any, second: Any) -> Any:
    """Concatenate two arrays, both of NumPy or both of MLX, along the last axis."""
    if isinstance(first, np.ndarray):
        return np.concatenate((first, second), axis=-1)
    import mlx.core as mx

    return mx.concatenate([first, second], axis=-1)


class StateCache:
    """The state of a layer as the model sees it. ``context`` is set during a forward only."""

    def __init__(self, layer: int, num_arrays: int) -> None:
        self.layer = layer
        self.num_arrays = num_arrays
        self.context: ForwardContext | None = None

    def current_states(self) -> StateStep:
        if self.context is None or self.context.states is None:
            raise EngineError("the model read a state outside a step")
        return self.context.states

    def make_mask(self, _length: int) -> None:
        """Return None, because mixers run over segments without padding."""
        return None


class ModelCaches:
    """The caches of all layers of a model, as ``model(ids, cache=caches.layers)`` takes them.

    ``specs``: what each layer caches. ``first_layer``: the index in the KV memory of the model's
    first layer with keys and values.
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
        for cache in self.leaves:
            cache.context = context
        try:
            yield
        finally:
            for cache in self.leaves:
                cache.context = None
