"""Run one token through a plain model, to learn the shapes of what its layers cache."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.engine.attention.kv_and_state_shapes import KVShape, StateShape
from labkit.engine.engine_protocol import EngineError
from labkit.engine.model.dtype_resolution import dtype_name
from labkit.engine.model.isolated_model_modules import import_plain
from labkit.engine.model.layer_cache import CacheSpec, StateSpec
from labkit.engine.model.model_loader import LoadedModel


@dataclass(frozen=True, slots=True)
class MixerSpec:
    """A module of a model that reads and writes a recurrent or convolution state.

    ``path`` is the module's path in the model, as in the names of parameters. ``entries`` are the
    indices of the arrays in the layer's state cache that the module uses, in ascending order.
    """

    path: str
    entries: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheShapes:
    """The shapes of what the layers of a model cache."""

    # The shape of a token's key and value, for each layer that caches them
    attention: tuple[KVShape, ...]
    states: tuple[StateShape, ...]  # the shape of a request's state, for each layer that has one
    mixers: tuple[MixerSpec, ...]  # the modules that use the states
    dtype: str  # the dtype of the first layer's first array, as MLX names it


def cache_shapes(loaded: LoadedModel) -> CacheShapes:
    """Run a token through the model and record what its layers cache.

    A second token shows whether the states keep their shapes. Raises ``EngineError`` if a layer
    does not use its cache, or its state grows.
    """
    import mlx.core as mx

    recorders = CacheRecorders(loaded.caches)
    where = f"model_type={loaded.model_type}"

    def run() -> tuple[StateShape | None, ...]:
        loaded.model(mx.zeros((1, 1), mx.int32), cache=recorders.layers)
        return tuple(recorder.shape for recorder in recorders.states)

    states = run()
    attention = [recorder.shape for recorder in recorders.attention]
    shapes = tuple(shape for shape in attention if shape is not None)
    if None in states or len(shapes) != len(attention):
        raise EngineError(f"{where}: a layer does not use its cache; set engine=mlx_lm")
    if states and run() != states:
        raise EngineError(
            f"{where}: a layer's state grows with the sequence, and a slot has one size; set "
            "engine=mlx_lm engine.scheduler.max_num_seqs=1"  # mlx_lm cannot batch it either
        )
    known = tuple(state for state in states if state is not None)
    dtype = recorders.attention[0].dtype if attention else known[0].dtypes[0]
    return CacheShapes(shapes, known, _find_mixers(loaded, recorders), dtype)


def _find_mixers(loaded: LoadedModel, recorders: CacheRecorders) -> tuple[MixerSpec, ...]:
    """Return the modules whose code read or wrote an array of a layer's state."""
    paths = {id(module): path for path, module in loaded.model.named_modules()}
    mixers: dict[str, tuple[StateRecorder, set[int]]] = {}
    for recorder in recorders.states:
        for user, entry in recorder.uses:
            path = paths.get(id(user), "")
            owner, entries = mixers.setdefault(path, (recorder, set()))
            if not path or owner is not recorder:
                raise EngineError(
                    f"model_type={loaded.model_type}: its states are used outside the layers that "
                    "they belong to; set engine=mlx_lm"
                )
            entries.add(entry)
    return tuple(MixerSpec(path, tuple(sorted(own))) for path, (_, own) in mixers.items())


class CacheRecorders:
    """Recorders, one for each cache of a model. The model is called with them as its caches."""

    def __init__(self, specs: Sequence[CacheSpec]) -> None:
        self.attention: list[ShapeRecorder] = []
        self.states: list[StateRecorder] = []
        self.layers = [self._create(spec) for spec in specs]

    def _create(self, spec: CacheSpec) -> Any:
        if isinstance(spec, tuple):
            return tuple(self._create(part) for part in spec)
        if isinstance(spec, StateSpec):
            recorder = StateRecorder(spec.num_arrays)
            self.states.append(recorder)
            return recorder.cache
        self.attention.append(ShapeRecorder())
        return self.attention[-1]


class StateRecorder:
    """Records the shapes of a layer's state, and the modules whose code uses it.

    ``cache`` is an mlx_lm ``ArraysCache``, because some models check the class. ``uses`` has a pair
    (module, index of the array) for each access to the cache. The module is the object whose method
    made the access.
    """

    def __init__(self, num_arrays: int) -> None:
        self.uses: list[tuple[Any, int]] = []
        self.cache = self._cache_class()(num_arrays)

    def _cache_class(self) -> Any:
        plain: Any = import_plain("cache").ArraysCache
        uses = self.uses

        class RecordedArraysCache(plain):  # type: ignore[misc]
            def __getitem__(self, entry: int) -> Any:
                value = super().__getitem__(entry)
                uses.append((sys._getframe(1).f_locals.get("self"), entry))
                return value

            def __setitem__(self, entry: int, value: Any) -> None:
                uses.append((sys._getframe(1).f_locals.get("self"), entry))
                super().__setitem__(entry, value)

        return RecordedArraysCache

    @property
    def shape(self) -> StateShape | None:
        """The shapes of the state's arrays, or None if one of the arrays was never set."""
        arrays = self.cache.cache
        if any(array is None for array in arrays):
            return None
        return StateShape(
            tuple(tuple(array.shape[1:]) for array in arrays),
            tuple(dtype_name(array.dtype) for array in arrays),
        )


class ShapeRecorder:
    """A cache of one token that records the shape and dtype of a layer's keys and values."""

    offset = 0

    def __init__(self) -> None:
        self.shape: KVShape | None = None
        self.dtype = ""
        self._cached: tuple[Any, Any] = (None, None)

    def make_mask(self, *_args: Any, **_options: Any) -> None:
        return None

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Record the shapes and the dtype, and return the arrays unchanged."""
        self.shape = KVShape(int(keys.shape[1]), int(keys.shape[3]), int(values.shape[3]))
        self.dtype = dtype_name(keys.dtype)
        self._cached = keys, values
        return self._cached

    def record_attention(self, keys: Any, values: Any) -> None:
        """Record a call of ``scaled_dot_product_attention`` with this cache.

        A layer that passes the same array as keys and values uses latent attention. Before, it
        called ``update_and_fetch`` with the latents as keys and the rotary part of the keys as
        values.
        """
        if self.shape is not None and keys is values:
            latents, rotary = self._cached
            key_dim = int(latents.shape[3] + rotary.shape[3])
            self.shape = KVShape(self.shape.num_kv_heads, key_dim, int(latents.shape[3]), True)

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return the arrays recorded last, for a layer that reads the cache of another layer."""
        return self._cached
