"""Copies of a model directory in the cache, for programs that read fewer formats than labkit.

mlx_lm cannot load the block formats of GGUF (``gguf_block_formats``): its copy stores Q4_K and
Q5_K in MLX's affine quantisation with float32 scales, the other formats as float32. Servers that
read no quantised format of MLX get a copy in float32. This module does not import MLX, because the
process that plans a study may make the copy.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.config import require
from labkit.cpu.precision.gguf_block_formats import AFFINE_FORMATS, BLOCK_FORMATS, is_gguf_only
from labkit.machine import cache_entries

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Weights = dict[str, NDArray[Any]]

RECIPE_VERSION = 1  # part of the cache key: raise it when the written files change
# Names that transformers and vLLM need and a converted GGUF file lacks.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
ARCHITECTURES |= {"qwen3": "Qwen3ForCausalLM", "mistral": "MistralForCausalLM"}


def is_quantized(model_dir: Path) -> bool:
    """Return whether a model's matrices are quantised."""
    return "quantization" in _settings(model_dir)


def mlx_lm_directory(model_dir: Path) -> Path:
    """Return the directory itself or, if mlx_lm cannot load it, a copy in the cache.

    Raises ``ConfigError`` if a file of the model is missing or invalid, and ``CacheError`` if the
    cache folder cannot be written.
    """
    settings = _settings(model_dir)
    entries = dict(settings.get("quantization") or {})
    modes = {
        path: entry["mode"]
        for path, entry in entries.items()
        if isinstance(entry, dict) and is_gguf_only(entry.get("mode"))
    }
    if not modes:
        return model_dir
    for path, mode in modes.items():
        del entries[path]
        if mode in AFFINE_FORMATS:
            layout = BLOCK_FORMATS[mode]
            entries[path] = {"group_size": layout.group_size, "bits": layout.bits}

    def write(folder: Path) -> None:
        copied = {**settings, "quantization": entries}
        _write_copy(model_dir, folder, copied, lambda weights: _mlx_lm_weights(weights, modes))

    return _cached_copy(model_dir, "mlx_lm's copy", "mlx", write)


def float32_directory(model_dir: Path) -> Path:
    """Return a copy of a model in the cache whose weights are float32; write it if it is missing.

    Raises ``ConfigError`` if the weights have a format other than floating point, those of GGUF,
    and MLX's affine quantisation, and ``CacheError`` if the cache folder cannot be written.
    """

    def write(folder: Path) -> None:
        source = mlx_lm_directory(model_dir)
        settings = _settings(source)
        quantization = settings.pop("quantization", None) or {}
        settings.pop("quantization_config", None)
        kind = settings.get("model_type")
        if kind in ARCHITECTURES:
            settings.setdefault("architectures", [ARCHITECTURES[kind]])
        settings |= {"torch_dtype": "float32"}
        _write_copy(source, folder, settings, lambda weights: _widened(weights, quantization))
        for index in folder.glob("*.safetensors.index.json"):
            index.unlink()  # it names the arrays of the quantised matrices

    return _cached_copy(model_dir, "engine.server", "float32", write)


def _settings(model_dir: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((model_dir / "config.json").read_text("utf-8"))
    return settings


def _cached_copy(model_dir: Path, option: str, kind: str, write: Callable[[Path], None]) -> Path:
    """Return the copy of a kind in the cache; ``write`` it if it is missing."""
    from labkit.models.model_directory import inspect

    # Named by its digest, because a user may have copied or renamed a converted GGUF file's folder.
    digest = inspect(model_dir, name=model_dir.name, option=option).digest
    name = f"{model_dir.name[:40]}-{digest[:16]}-{kind}-{RECIPE_VERSION}"
    copy = cache_entries.root() / "models" / name
    if not cache_entries.has_directory(copy):
        with cache_entries.building_directory(copy) as unfinished:
            write(unfinished)
    return copy


def _write_copy(
    model_dir: Path,
    folder: Path,
    settings: dict[str, Any],
    convert: Callable[[Weights], Weights],
) -> None:
    from labkit.models import safetensors_io

    for file in model_dir.iterdir():
        if file.suffix == ".safetensors":
            safetensors_io.write(folder / file.name, convert(safetensors_io.read(file)))
        elif file.is_file():
            shutil.copyfile(file, folder / file.name)
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _mlx_lm_weights(weights: Weights, modes: dict[str, str]) -> Weights:
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


def _widened(weights: Weights, quantization: dict[str, Any]) -> Weights:
    """Return a file's weights as float32. A quantised matrix has its scales and biases there."""
    from labkit.models.safetensors_io import widen

    packed = {name.removesuffix(".scales") for name in weights if name.endswith(".scales")}
    result: Weights = {}
    for name, array in weights.items():
        path, _, leaf = name.rpartition(".")
        if path not in packed:
            require(
                array.dtype != np.uint32 or leaf != "weight",
                f"engine.server: {path} has its scales in another file; its words are no numbers "
                "without them",
            )
            result[name] = widen(array)
        elif leaf == "weight":
            entry = quantization.get(path)
            layout = quantization | (entry if isinstance(entry, dict) else {})
            mode = layout.get("mode", "affine")
            require(
                mode == "affine",
                f"engine.server: {path} has MLX's format {mode}, which is not widened to float32; "
                "set a model of another format",
            )
            scales, biases = (widen(weights[f"{path}.{part}"]) for part in ("scales", "biases"))
            result[name] = _dequantized(array, scales, biases, layout["bits"])
        elif leaf not in ("scales", "biases"):
            result[name] = widen(array)
    return result


def _dequantized(
    words: NDArray[Any], scales: NDArray[Any], biases: NDArray[Any], bits: int
) -> NDArray[Any]:
    """Return an affine matrix: numbers of ``bits`` bits, the lowest first, eight to ``bits`` bytes.

    Each group of them has a scale and a bias.
    """
    octets = words.view(np.uint8).reshape(*words.shape[:-1], -1, bits)
    padded = np.pad(octets, [(0, 0)] * (octets.ndim - 1) + [(0, 8 - bits)])
    eight = padded.view("<u8") >> np.arange(0, 8 * bits, bits, dtype=np.uint64)
    numbers = (eight & np.uint64(2**bits - 1)).astype(np.float32)
    groups = numbers.reshape(*scales.shape, -1)
    matrix: NDArray[Any] = groups * scales[..., None] + biases[..., None]
    return matrix.reshape(*scales.shape[:-1], -1)
