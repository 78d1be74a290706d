"""A model directory that stock mlx_lm can load: the model's own, or a copy without block formats.

mlx_lm cannot load the block formats of GGUF (``cpu.gguf_block_formats``). The copy stores the same
weights in formats that mlx_lm can load: Q4_K and Q5_K in MLX's affine quantisation with float32
scales, the other formats as float32. This module does not import MLX, because the process that
plans a study may make the copy.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.cpu.precision.gguf_block_formats import AFFINE_FORMATS, BLOCK_FORMATS, is_gguf_only
from labkit.machine import cache_dir

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Weights = dict[str, NDArray[Any]]

RECIPE_VERSION = 1  # part of the cache key: raise it when the written files change


def mlx_lm_directory(model_dir: Path) -> Path:
    """Return the directory itself or, if mlx_lm cannot load it, a copy in the cache.

    Raises ``ConfigError`` if a file of the model is missing or invalid, and ``CacheError`` if the
    cache folder cannot be written.
    """
    from labkit.models.model_directory import inspect

    settings = json.loads((model_dir / "config.json").read_text("utf-8"))
    modes = {
        path: entry["mode"]
        for path, entry in (settings.get("quantization") or {}).items()
        if isinstance(entry, dict) and is_gguf_only(entry.get("mode"))
    }
    if not modes:
        return model_dir
    # A converted GGUF file, whose directory a user may have copied or renamed.
    digest = inspect(model_dir, name=model_dir.name, option="mlx_lm's copy").digest
    name = f"{model_dir.name[:40]}-{digest[:16]}-mlx-{RECIPE_VERSION}"
    copy = cache_dir.root() / "models" / name
    if not cache_dir.has_directory(copy):
        with cache_dir.building_directory(copy) as unfinished:
            _write_copy(model_dir, settings, modes, unfinished)
    return copy


def _write_copy(
    model_dir: Path, settings: dict[str, Any], modes: dict[str, str], folder: Path
) -> None:
    from labkit.models import safetensors_io

    for file in model_dir.iterdir():
        if file.suffix == ".safetensors":
            safetensors_io.write(folder / file.name, _widened(safetensors_io.read(file), modes))
        elif file.name != "config.json":
            shutil.copyfile(file, folder / file.name)
    entries = {**settings["quantization"]}
    for path, mode in modes.items():
        del entries[path]
        if mode in AFFINE_FORMATS:
            layout = BLOCK_FORMATS[mode]
            entries[path] = {"group_size": layout.group_size, "bits": layout.bits}
    copied = {**settings, "quantization": entries}
    (folder / "config.json").write_text(json.dumps(copied, indent=2) + "\n", encoding="utf-8")


def _widened(weights: Weights, modes: dict[str, str]) -> Weights:
    """Return a file's weights, with those in a block format converted for mlx_lm."""
    result = {
        name: array for name, array in weights.items() if name.rpartition(".")[0] not in modes
    }
    for path, mode in modes.items():
        prefix = f"{path}."
        parts = {
            name.removeprefix(prefix): array
            for name, array in weights.items()
            if name.startswith(prefix)
        }
        if "weight" in parts:
            result |= {prefix + name: array for name, array in _mlx_parts(parts, mode).items()}
    return result


def _mlx_parts(parts: Weights, mode: str) -> Weights:
    """Convert a block layer's matrix, or a stack [experts, N, K], to arrays of an MLX layer."""
    from labkit.cpu.precision.gguf_block_arrays import BlockArrays

    layout = BLOCK_FORMATS[mode]
    words = parts.pop("weight")
    scales = {name: parts.pop(name) for name in (*layout.group_arrays, *layout.super_arrays)}
    lead = words.shape[:-1]
    flat = {name: array.reshape(-1, array.shape[-1]) for name, array in scales.items()}
    arrays = BlockArrays(mode, words.reshape(-1, words.shape[-1]), flat)
    if mode not in AFFINE_FORMATS:
        return {**parts, "weight": arrays.dequantize().reshape(*lead, -1)}
    final, minimums = arrays.final_scales()
    assert minimums is not None
    affine = {"weight": words, "scales": final, "biases": -minimums}
    return {**parts, **{name: array.reshape(*lead, -1) for name, array in affine.items()}}
