"""Read and write safetensors files as NumPy arrays, bfloat16 included.

Format: https://github.com/huggingface/safetensors. The package's own functions for NumPy have no
bfloat16, which labkit holds as uint16.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from labkit.models.safetensors_header import read_header

DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT = 8  # of the tensors' data (bytes)


def write(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write arrays by name to a safetensors file that MLX can read.

    Dtypes: float32, float16, uint32, uint8, int8, and uint16, which is written as bfloat16. Raises
    ``KeyError`` for any other.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    # Tensors with larger elements come first, so that each is aligned to its element size.
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].itemsize, item[0]))
    for name, array in ordered:
        start, end = end, end + array.nbytes
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _, array in ordered:
            stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def widen(array: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return floating-point numbers as float32. uint16 is bfloat16."""
    if array.dtype != np.uint16:
        return array.astype(np.float32)
    return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)


def read(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a file by name, memory-mapped. bfloat16 is uint16.

    Raises ``KeyError`` for a dtype that ``write`` does not write.
    """
    header, offset = read_header(path)
    data = np.memmap(path, np.uint8, "r", offset=offset)
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        arrays[name] = data[start:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return arrays
