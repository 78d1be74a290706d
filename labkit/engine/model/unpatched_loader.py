"""Load a model directory with mlx_lm's own loader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from labkit.engine.engine_protocol import EngineError
from labkit.engine.model import dtype_resolution
from labkit.engine.model.converted_checkpoints import mlx_lm_directory
from labkit.engine.model.model_loader import (
    CONFIG_MISTAKES,
    ONE_AT_A_TIME,
    config_errors,
    is_batchable,
    read_eos_token_ids,
    some_names,
)
from labkit.models import model_directory, model_json


@dataclass(frozen=True, slots=True)
class MlxLmModel:
    """A loaded mlx_lm model and its sizes.

    Prompts may only have token ids below ``vocab_size``. ``max_context`` is in tokens (None: not in
    config.json). ``kv_bytes_by_window`` is what the function of that name returns, ``dtype`` MLX's
    name of the dtype of the cached keys. ``weights`` maps each weight format, named as in counters,
    to its bytes.
    """

    model: Any
    vocab_size: int
    eos_token_ids: frozenset[int]
    kv_bytes_by_window: Mapping[int | None, int]
    dtype: str
    weights: Mapping[str, int]
    max_context: int | None


def load(
    model_dir: Path, loading: dtype_resolution.WeightLoading = dtype_resolution.FLOAT32
) -> MlxLmModel:
    """Load ``mlx_lm_directory`` with mlx_lm and cast it; raise ``EngineError`` with its reason."""
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    with config_errors():
        model_directory.find_weights(Path(model_dir), f"engine=mlx_lm: {model_dir}")
    try:
        model, settings = load_model(mlx_lm_directory(Path(model_dir)))
    except (OSError, RuntimeError, *CONFIG_MISTAKES) as error:
        raise EngineError(f"engine=mlx_lm: {model_dir}: {some_names(error)}") from None
    dtype_resolution.cast_parameters(model, loading)
    caches = make_prompt_cache(model)
    unbatchable = next((cache for cache in caches if not is_batchable(cache)), None)
    if unbatchable is not None:
        raise EngineError(
            f"engine=mlx_lm: model_type={settings['model_type']}: mlx_lm's BatchGenerator cannot "
            f"batch its {type(unbatchable).__name__}; {ONE_AT_A_TIME}"
        )
    # MLX is lazy: this call computes only shapes, and gives the caches keys and values.
    vocab_size = int(model(mx.array([[0]]), cache=caches).shape[-1])
    return MlxLmModel(
        model,
        vocab_size,
        read_eos_token_ids(model_dir),
        kv_bytes_by_window(caches),
        key_dtype(caches),
        dtype_resolution.weight_bytes_by_dtype(model),
        model_json.max_context(settings),
    )


def kv_bytes_by_window(caches: Sequence[Any]) -> dict[int | None, int]:
    """Return one token's KV bytes by sliding window (tokens, None: no window), summed over layers.

    Caches without keys, such as those of recurrent layers, are left out.
    """
    total: dict[int | None, int] = {}
    for cache in _leaves(caches):
        if getattr(cache, "keys", None) is not None:
            window = getattr(cache, "max_size", None)
            size = sum(array.nbytes // array.shape[2] for array in (cache.keys, cache.values))
            total[window] = total.get(window, 0) + size
    return total


def key_dtype(caches: Sequence[Any]) -> str:
    """Return the dtype of the first layer's cached keys, or of its state if it has no keys."""
    cache = next(_leaves(caches))
    keys = getattr(cache, "keys", None)
    state = (array for array in getattr(cache, "cache", ()) if array is not None)
    return dtype_resolution.dtype_name((keys if keys is not None else next(state)).dtype)


def _leaves(caches: Sequence[Any]) -> Iterator[Any]:
    for cache in caches:
        if hasattr(cache, "caches"):
            yield from _leaves(cache.caches)
        else:
            yield cache
