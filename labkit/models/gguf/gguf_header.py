"""Read a GGUF file's header: its metadata, and the type, shape and offset of its tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little
endian). The ids and sizes of the types are those of llama.cpp's ``ggml/include/ggml.h`` and
``ggml/src/ggml-common.h``.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from labkit.models.safetensors_header import LFS_ADVICE, LFS_POINTER

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32  # of tensor data in bytes, if general.alignment is not set

# Limits that refuse a damaged or hostile file before much memory is allocated.
MAX_METADATA_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_ARRAY_STRINGS = 1 << 22  # the largest vocabularies have half a million merges
MAX_METADATA_BYTES = 1 << 28
MAX_STRING_BYTES = 1 << 20
MAX_DIMENSIONS = 4

# Values of tokenizer.ggml.token_type.
NORMAL_TOKEN, UNKNOWN_TOKEN, CONTROL_TOKEN, USER_DEFINED_TOKEN = 1, 2, 3, 4

# Ids of metadata value types.
STRING_TYPE, ARRAY_TYPE = 8, 9
NUMBER_DTYPES = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor type, stored in blocks of ``block_bytes`` with ``block_values`` values each."""

    name: str
    block_values: int
    block_bytes: int


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
}

# Types that labkit refuses: llama.cpp's intermediate results, integers, float64 and 1-bit weights.
REFUSED_TYPES = {
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    41: "Q1_0",
}

# Types whose blocks refer to code books, which labkit does not contain: the package gguf
# dequantises them.
WIDENED_TYPES = (
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
    *("TQ1_0", "TQ2_0"),
)


class GGUFError(ValueError):
    """The GGUF file cannot be used. The message is one line."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor's entry in the header.

    ``shape`` is in NumPy's order: the last dimension is contiguous. ``offset``: bytes from the
    start of the file.
    """

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return prod(self.shape) // self.type.block_values * self.type.block_bytes


@dataclass(frozen=True)
class GGUFFile:
    """The checked header of a GGUF file, and access to its tensors.

    ``metadata`` values are ``int``, ``float``, ``bool``, ``str``, lists of ``str``, or NumPy arrays
    of numbers.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    def blocks(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """Memory-map a tensor's bytes, read-only: ``[*shape[:-1], num_blocks, block_bytes]``."""
        *rows, columns = tensor.shape
        shape = (*rows, columns // tensor.type.block_values, tensor.type.block_bytes)
        return np.memmap(self.path, np.uint8, "r", offset=tensor.offset, shape=shape)

    def number(self, key: str, default: float | None = None) -> float:
        """Return the number at ``key`` of the metadata, or ``default`` if the key is missing.

        Raises ``GGUFError`` if the key is missing without a default, or has another type.
        """
        value = default if key not in self.metadata else self.scalar(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise GGUFError(f"{key} is {_describe(value)}, not a number")
        return value

    def scalar(self, key: str) -> Any:
        """Return the value at ``key``; of a list with a number for each layer, the one they share.

        Raises ``GGUFError`` if the numbers of a list differ.
        """
        value = self.metadata[key]
        if not isinstance(value, np.ndarray) or not value.size:
            return value
        if (value != value[0]).any():
            raise GGUFError(
                f"{key} differs between layers ({value.min()} to {value.max()}); mlx_lm's class "
                "has one value for all"
            )
        return value[0].item()

    def count(self, key: str, default: int | None = None) -> int:
        """Return the integer from 0 to 2**31 - 1 at ``key``. See ``number``."""
        value = self.number(key, default)
        if not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise GGUFError(f"{key} is {value}, not an integer from 0 to 2**31 - 1")
        return value

    def string(self, key: str, default: str | None = None) -> str:
        """Return the string at ``key``. See ``number``."""
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise GGUFError(f"{key} is {_describe(value)}, not a string")
        return value

    def strings(self, key: str) -> list[str]:
        """Return the list of strings at ``key``, which the metadata must have."""
        value = self.metadata.get(key)
        if not isinstance(value, list):
            raise GGUFError(f"{key} is {_describe(value)}, not a list of strings")
        return value


def _describe(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"


def read_header(path: Path) -> GGUFFile:
    """Read a file's header, and check that every tensor lies inside the file.

    Raises ``GGUFError`` if the file is not GGUF, has an unsupported version, is damaged or
    truncated, or exceeds a limit.
    """
    try:
        with path.open("rb") as stream:
            start = stream.read(len(LFS_POINTER))
            if start == LFS_POINTER:
                raise GGUFError(LFS_ADVICE)
            if not start.startswith(MAGIC):
                raise GGUFError("not a GGUF file")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse_header(path, data)
    except OSError as error:
        raise GGUFError(f"cannot be read ({error.strerror or error})") from None


def _parse_header(path: Path, data: mmap.mmap) -> GGUFFile:
    reader = _HeaderReader(data)
    version = reader.unsigned(4)
    if version not in VERSIONS:
        raise GGUFError(
            f"GGUF version {version} is not supported; must be one of: "
            f"{', '.join(map(str, VERSIONS))}"
        )
    num_tensors, num_keys = reader.unsigned(8), reader.unsigned(8)
    _check_limit(num_tensors, MAX_TENSORS, "tensors")
    _check_limit(num_keys, MAX_METADATA_KEYS, "metadata keys")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = reader.string()
        if key in metadata:
            raise GGUFError(f"metadata key {key!r} occurs twice")
        metadata[key] = reader.value(reader.unsigned(4), key)
    tensors = [reader.tensor() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
        raise GGUFError(f"general.alignment is {alignment}; it must be 1 to {1 << 20}")
    data_start = -(-reader.position // alignment) * alignment
    return GGUFFile(path, metadata, _placed_tensors(tensors, data_start, len(data)))


def _placed_tensors(
    tensors: list[GGUFTensor], data_start: int, file_bytes: int
) -> dict[str, GGUFTensor]:
    """Return the tensors by name, with offsets counted from the start of the file.

    Raises ``GGUFError`` if tensors overlap or one ends after the end of the file.
    """
    placed: dict[str, GGUFTensor] = {}
    next_free = data_start
    for entry in sorted(tensors, key=lambda tensor: tensor.offset):
        tensor = GGUFTensor(entry.name, entry.type, entry.shape, data_start + entry.offset)
        if tensor.name in placed:
            raise GGUFError(f"tensor {tensor.name} occurs twice")
        if tensor.offset < next_free:
            raise GGUFError(f"tensor {tensor.name} overlaps another")
        next_free = tensor.offset + tensor.size
        if next_free > file_bytes:
            raise GGUFError(
                f"truncated: tensor {tensor.name} ends at byte {next_free}, but the file ends at "
                f"{file_bytes}"
            )
        placed[tensor.name] = tensor
    return placed


def _check_limit(number: int, limit: int, what: str) -> None:
    if number > limit:
        raise GGUFError(f"damaged: the header claims {number} {what}, but the limit is {limit}")


class _HeaderReader:
    """A reader of the header's values in order. ``position`` is the offset of the next byte."""

    def __init__(self, data: mmap.mmap) -> None:
        self.position = len(MAGIC)
        self._data = data
        self._end = min(len(data), MAX_METADATA_BYTES)

    def advance(self, size: int) -> int:
        """Return the position and advance by ``size`` bytes. Raises ``GGUFError`` at the end."""
        if size > self._end - self.position:
            raise GGUFError(
                f"truncated or damaged: the header needs {size} bytes at byte {self.position}, and "
                f"{self._end - self.position} are left"
            )
        start, self.position = self.position, self.position + size
        return start

    def unsigned(self, size: int) -> int:
        start = self.advance(size)
        return int.from_bytes(self._data[start : self.position], "little")

    def string(self) -> str:
        size = self.unsigned(8)
        _check_limit(size, MAX_STRING_BYTES, "bytes in a string")
        start = self.advance(size)
        try:
            return self._data[start : self.position].decode("utf-8")
        except UnicodeDecodeError:
            raise GGUFError(f"damaged: the string at byte {start} is not UTF-8") from None

    def value(self, kind: int, key: str) -> Any:
        if kind == STRING_TYPE:
            return self.string()
        if kind != ARRAY_TYPE:
            return self._numbers(kind, 1, key)[0].item()
        kind, number = self.unsigned(4), self.unsigned(8)
        if kind != STRING_TYPE:
            return self._numbers(kind, number, key)
        _check_limit(number, MAX_ARRAY_STRINGS, f"strings in {key}")
        return [self.string() for _ in range(number)]

    def _numbers(self, kind: int, number: int, key: str) -> npt.NDArray[Any]:
        if kind not in NUMBER_DTYPES:
            raise GGUFError(f"damaged: {key} has a value of the unknown type {kind}")
        dtype = np.dtype(NUMBER_DTYPES[kind])
        start = self.advance(number * dtype.itemsize)
        return np.frombuffer(self._data[start : self.position], dtype)

    def tensor(self) -> GGUFTensor:
        """Read one tensor's entry, whose offset counts from the start of the tensor data."""
        name = self.string()
        dimensions = self.unsigned(4)
        _check_limit(dimensions, MAX_DIMENSIONS, f"dimensions of tensor {name!r}")
        shape = tuple(self.unsigned(8) for _ in range(dimensions))[::-1]
        kind, offset = self.unsigned(4), self.unsigned(8)
        if kind not in TENSOR_TYPES:
            name_of_type = REFUSED_TYPES.get(kind, f"number {kind}")
            supported = ", ".join(tensor_type.name for tensor_type in TENSOR_TYPES.values())
            raise GGUFError(
                f"tensor {name} is of type {name_of_type}; it must be one of: {supported}"
            )
        if not shape or 0 in shape or shape[-1] % TENSOR_TYPES[kind].block_values:
            raise GGUFError(
                f"tensor {name}: {TENSOR_TYPES[kind].name} cannot have the shape {shape}"
            )
        return GGUFTensor(name, TENSOR_TYPES[kind], shape, offset)
