"""Convert a GGUF file to a directory for ``mlx_lm.load``, once, in the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from labkit.machine import cache_entries
from labkit.models import model_json, safetensors_io
from labkit.models.gguf import gguf_header, gguf_model_config, gguf_repacking, gguf_tokenizer

RECIPE_VERSION = 6  # part of the cache key: raise it when the written files change
ROW_MATRICES = ("shared_expert_gate",)  # matrices of one row, which are vectors in the file
SHARD_BYTES = 1 << 29  # approximate size of a weights file, and of the weights held in memory


def convert(path: Path, *, digest: str, name: str) -> Path:
    """Convert a GGUF file, unless the cache already has its directory; return the directory.

    The directory has config.json, model*.safetensors, tokenizer.json, tokenizer_config.json and
    generation_config.json. Weights stay quantised, except in the types that ``gguf_repacking``
    converts to floats. ``path``: the GGUF file. ``digest``: the file's digest (hex). ``name``: the
    beginning of the directory's name. Raises ``GGUFError`` if the file is damaged, or not a model
    that mlx_lm can run. The message is one line. Raises ``CacheError`` if the cache folder cannot
    be written.
    """
    folder = converted_path(digest=digest, name=name)
    if not cache_entries.has_directory(folder):
        file = gguf_header.read_header(path)
        model = gguf_model_config.read_architecture(file)
        with cache_entries.building_directory(folder) as unfinished:
            _write_model(file, model, unfinished)
    return folder


def converted_path(*, digest: str, name: str) -> Path:
    """Return the path of the directory for a file's digest. The directory may not exist yet."""
    key = hashlib.sha256(f"{RECIPE_VERSION}\0{digest}".encode()).hexdigest()[:16]
    return cache_entries.root() / "models" / f"{name[:80]}-{key}"


def _write_model(
    file: gguf_header.GGUFFile, model: gguf_model_config.GGUFArchitecture, folder: Path
) -> None:
    gguf_tokenizer.build_tokenizer(file).save(str(folder / "tokenizer.json"))
    generation = gguf_tokenizer.generation_config(file)
    config = {**model.config(), **_quantization(file, model), **generation}
    model_json.write_object(folder / "config.json", config)
    model_json.write_object(folder / "generation_config.json", generation)
    model_json.write_object(
        folder / "tokenizer_config.json", gguf_tokenizer.tokenizer_config(file, model.sizes.context)
    )
    _write_weights(file, model, folder)


def _quantization(
    file: gguf_header.GGUFFile, model: gguf_model_config.GGUFArchitecture
) -> dict[str, Any]:
    """Return the part of config.json with the key ``quantization``.

    The smallest affine bit width is the default. Layers with another format are listed by name. The
    dict is empty if no layer is quantised.
    """
    layouts = {
        target.path: layout
        for target in model.targets()
        if (tensor := file.tensors.get(target.tensor)) is not None
        and (layout := gguf_repacking.layout_of(tensor.type.name)) is not None
    }
    if not layouts:
        return {}
    affine = [layout.bits for layout in layouts.values() if layout.mode == "affine"]
    default = gguf_repacking.QuantizedLayout(min(affine, default=4)).entry()
    entries = {path: layout.entry() for path, layout in layouts.items()}
    exceptions = {path: entry for path, entry in entries.items() if entry != default}
    return {"quantization": {**default, **exceptions}}


def _write_weights(
    file: gguf_header.GGUFFile, model: gguf_model_config.GGUFArchitecture, folder: Path
) -> None:
    shard: gguf_repacking.NamedArrays = {}
    number, size = 0, 0

    def flush() -> None:
        safetensors_io.write(folder / f"model-{number:05d}.safetensors", shard)
        shard.clear()

    for name, array in _parameters(file, model):
        shard[name] = array
        size += array.nbytes
        if size >= SHARD_BYTES:
            flush()
            number, size = number + 1, 0
    if shard:
        flush()


def _parameters(
    file: gguf_header.GGUFFile, model: gguf_model_config.GGUFArchitecture
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield the parameters by name. Biases that the file lacks are zeros."""
    for target in model.targets():
        tensor = file.tensors.get(target.tensor)
        if tensor is None:
            yield target.name, np.zeros(target.shape, np.float32)
            continue
        is_quantized = gguf_repacking.layout_of(tensor.type.name) is not None
        if is_quantized and (len(tensor.shape) < 2 or not target.name.endswith(".weight")):
            raise gguf_header.GGUFError(f"tensor {target.tensor} is quantised but not a matrix")
        arrays = gguf_repacking.convert_blocks(tensor.type.name, file.blocks(tensor))
        if target.minus_one:
            arrays = {"weight": safetensors_io.widen(arrays["weight"]) - np.float32(1)}
        for part, array in arrays.items():
            if target.interleaved_heads is not None:
                array = _deinterleave_heads(array, target.interleaved_heads)
            if target.path.endswith(ROW_MATRICES):
                array = array[None]
            name = f"{target.path}.{part}" if is_quantized else target.name
            yield name, np.ascontiguousarray(array)


def _deinterleave_heads(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Reorder each head's rows 0, 1, 2, 3, ... to 0, 2, ..., 1, 3, ..., for RoPE over halves."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
