"""Read the header of a safetensors file, and check that the file is whole.

The module does not import NumPy, because the process that plans a study does not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LFS_POINTER = b"version https://git-lfs"  # the beginning of what Git LFS puts in a file's place
LFS_ADVICE = "is a pointer of Git LFS instead of the file; run: git lfs pull"


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
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise ValueError("is not a safetensors file") from None
    if 8 + length + end > size:
        raise ValueError(
            f"is cut: its tensors end at byte {8 + length + end}, and the file at {size}; download "
            "it again"
        )
    return header, 8 + length
