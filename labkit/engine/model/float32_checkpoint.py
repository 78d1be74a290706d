"""The same weights as float32 safetensors, for servers that read no quantised format of MLX."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.config import require
from labkit.engine.model.mlx_lm_compatible_copy import mlx_lm_directory
from labkit.machine import cache_dir

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Weights = dict[str, NDArray[Any]]

RECIPE_VERSION = 1  # part of the cache key: raise it when the written files change
# Names that transformers and vLLM need and a converted GGUF file lacks.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
ARCHITECTURES |= {"qwen3": "Qwen3ForCausalLM", "mistral": "MistralForCausalLM"}


def is_quantized(model_dir: Path) -> bool:
    """Return whether a model's matrices are quantised."""
    return "quantization" in json.loads((model_dir / "config.json").read_text("utf-8"))


def float32_directory(model_dir: Path) -> Path:
    """Return a copy of a model in the cache whose weights are float32; write it if it is missing.

    Raises ``ConfigError`` if the weights have a format other than floating point, those of GGUF,
    and MLX's affine quantisation, and ``CacheError`` if the cache folder cannot be written.
    """
    from labkit.models.model_directory import inspect

    digest = inspect(model_dir, name=model_dir.name, option="engine.server").digest
    name = f"{model_dir.name[:40]}-{digest[:16]}-float32-{RECIPE_VERSION}"
    copy = cache_dir.root() / "models" / name
    if not cache_dir.has_directory(copy):
        with cache_dir.building_directory(copy) as unfinished:
            _write_copy(mlx_lm_directory(model_dir), unfinished)
    return copy


def _write_copy(model_dir: Path, folder: Path) -> None:
    from labkit.models import safetensors_io

    settings = json.loads((model_dir / "config.json").read_text("utf-8"))
    quantization = settings.pop("quantization", None) or {}
    settings.pop("quantization_config", None)
    for file in model_dir.iterdir():
        if file.suffix == ".safetensors":
            widened = _widened(safetensors_io.read(file), quantization)
            safetensors_io.write(folder / file.name, widened)
        elif file.is_file() and not file.name.endswith(".safetensors.index.json"):
            shutil.copyfile(file, folder / file.name)
    kind = settings.get("model_type")
    if kind in ARCHITECTURES:
        settings.setdefault("architectures", [ARCHITECTURES[kind]])
    settings |= {"torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


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
