"""Read the header of a safetensors file, and check that the file is whole.

The module does not import NumPy, because the process that plans a study does not.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

LFS_POINTER = b"version https://git-lfs"  # the beginning of what Git LFS puts in a file's place
LFS_ADVICE = "is a pointer of Git LFS instead of the file; run: git lfs pull"

# The dtypes of floating-point tensors in a header, as NumPy and MLX name them.
FLOAT_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def layer_index(name: str) -> int:
    """Return the index of the layer that a weight belongs to, or -1 if it belongs to no layer."""
    match = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return int(match[1]) if match else -1


def matrix_formats(model_dir: Path) -> set[tuple[str, int, int]]:
    """Return the formats of a model's matrices: the element, bits and group size of each.

    Bits and group size are those of MLX's affine quantisation, whose scales have the type
    ``element``, or 0 for a matrix of floating-point numbers. Other matrices, and files that cannot
    be read, are left out.
    """
    formats = set()
    try:
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        quantization = config.get("quantization") or {}
        for file in sorted(model_dir.glob("model*.safetensors")):
            tensors, _ = read_header(file)
            for name, entry in tensors.items():
                layer, _, kind = name.rpartition(".")
                element = FLOAT_DTYPES.get(entry["dtype"])
                own = quantization.get(layer)
                layout = quantization | (own if isinstance(own, dict) else {})
                if kind == "weight" and element and len(entry["shape"]) == 2:
                    formats.add((element, 0, 0))
                elif kind == "scales" and element and layout.get("mode", "affine") == "affine":
                    formats.add((element, int(layout["bits"]), int(layout["group_size"])))
    except (OSError, ValueError, OverflowError, LookupError, TypeError, AttributeError):
        return set()  # loading the model says what is wrong with it
    return formats


def read_header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the entries of a file's tensors by name, and where their data begins (bytes).

    Raises ``ValueError`` if the file is not whole. The message is one line that follows the file's
    name.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(len(LFS_POINTER))
        if not start:
            raise ValueError("is empty; download it again")
        if start == LFS_POINTER:
            raise ValueError(LFS_ADVICE)
        length = int.from_bytes(start[:8], "little")
        if length > size - 8:
            raise ValueError("is cut or not a safetensors file; download it again")
        stream.seek(8)
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        except (ValueError, OverflowError, LookupError, TypeError, AttributeError, RecursionError):
            raise ValueError("is not a safetensors file") from None
    if 8 + length + end > size:
        raise ValueError(
            f"is cut: its tensors end at byte {8 + length + end}, and the file at {size}; download "
            "it again"
        )
    return header, 8 + length
