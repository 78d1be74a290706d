"""What a GGUF file says about itself: its metadata, and where its tensors lie.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little
endian).
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

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32  # of tensor data, in bytes, where general.alignment says nothing else

# A file may claim anything: beyond these it is refused before memory is spent on it.
MAX_METADATA_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_ARRAY_STRINGS = 1 << 22  # in one array; the largest vocabularies have half a million merges
MAX_METADATA_BYTES = 1 << 28  # bytes
MAX_STRING_BYTES = 1 << 20  # bytes
MAX_DIMENSIONS = 4

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


class GGUFError(ValueError):
    """A GGUF file that cannot be used; one line says why."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """How a type lies in the file: blocks of ``size`` bytes with ``values`` values each."""

    name: str
    values: int
    size: int


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    12: TensorType("Q4_K", 256, 144),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
}

UNSUPPORTED_TYPES = {
    6: "Q5_0",
    7: "Q5_1",
    9: "Q8_1",
    11: "Q3_K",
    13: "Q5_K",
    15: "Q8_K",
    39: "MXFP4",
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor of the file: ``shape`` as NumPy has it, the last dimension contiguous.

    ``offset``: bytes from the beginning of the file.
    """

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) // self.type.values * self.type.size


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file whose claims about itself hold.

    ``metadata`` values are ``int``, ``float``, ``bool``, ``str``, lists of ``str`` and NumPy
    arrays of numbers.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    def blocks(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """Map a tensor's bytes: ``[*shape[:-1], blocks, bytes of a block]``, read-only."""
        *rows, columns = tensor.shape
        shape = (*rows, columns // tensor.type.values, tensor.type.size)
        return np.memmap(self.path, np.uint8, "r", offset=tensor.offset, shape=shape)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number of the metadata; without ``default`` it must be there."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise GGUFError(f"{key} is {_describe(value)}, not a number")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number of at least 0 of the metadata."""
        value = self.number(key, default)
        if not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise GGUFError(f"{key} is {value}, not a number of things")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string of the metadata; without ``default`` it must be there."""
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise GGUFError(f"{key} is {_describe(value)}, not a text")
        return value

    def texts(self, key: str) -> list[str]:
        """Return a list of strings of the metadata, which must be there."""
        value = self.metadata.get(key)
        if not isinstance(value, list):
            raise GGUFError(f"{key} is {_describe(value)}, not a list of texts")
        return value


def _describe(value: Any) -> str:
    return "not there" if value is None else f"of type {type(value).__name__}"


def read_header(path: Path) -> GGUFFile:
    """Read the header of a file and check that all it claims to hold is inside the file.

    Raises
    ------
    BadFile
        It is not GGUF, of another version, damaged, cut short, or too large to be honest.
    """
    try:
        with path.open("rb") as stream:
            if stream.read(len(MAGIC)) != MAGIC:
                raise GGUFError("is a file, but not a GGUF file")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse_header(path, data)
    except OSError as error:
        raise GGUFError(f"cannot be read ({error.strerror or error})") from None


def _parse_header(path: Path, data: mmap.mmap) -> GGUFFile:
    reader = _HeaderReader(data)
    version = reader.unsigned(4)
    if version not in VERSIONS:
        raise GGUFError(f"GGUF version {version}; read are {', '.join(map(str, VERSIONS))}")
    num_tensors, num_keys = reader.unsigned(8), reader.unsigned(8)
    _check_limit(num_tensors, MAX_TENSORS, "tensors")
    _check_limit(num_keys, MAX_METADATA_KEYS, "metadata keys")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = reader.string()
        if key in metadata:
            raise GGUFError(f"metadata key {key!r} occurs twice")
        metadata[key] = reader.value(reader.unsigned(4), key)
    claims = [reader.tensor() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
        raise GGUFError(f"general.alignment is {alignment}")
    start = -(-reader.at // alignment) * alignment
    return GGUFFile(path, metadata, _check_placement(claims, start, len(data)))


def _check_placement(claims: list[GGUFTensor], start: int, end: int) -> dict[str, GGUFTensor]:
    """Count the tensors' offsets from the file's beginning; they may not overlap or leave it."""
    placed: dict[str, GGUFTensor] = {}
    free = start
    for claim in sorted(claims, key=lambda claim: claim.offset):
        tensor = GGUFTensor(claim.name, claim.type, claim.shape, start + claim.offset)
        if tensor.name in placed:
            raise GGUFError(f"tensor {tensor.name} occurs twice")
        if tensor.offset < free:
            raise GGUFError(f"tensor {tensor.name} overlaps another")
        free = tensor.offset + tensor.size
        if free > end:
            raise GGUFError(
                f"cut short: tensor {tensor.name} ends at byte {free}, the file at {end}"
            )
        placed[tensor.name] = tensor
    return placed


def _check_limit(number: int, most: int, what: str) -> None:
    if number > most:
        raise GGUFError(f"damaged: it claims {number} {what}; allowed are {most}")


class _HeaderReader:
    """Reads values one after another; ``at`` is the next byte."""

    def __init__(self, data: mmap.mmap) -> None:
        self.at = len(MAGIC)
        self._data = data
        self._end = min(len(data), MAX_METADATA_BYTES)

    def take(self, size: int) -> int:
        """Move over so many bytes, which must be there; return where they begin."""
        if size > self._end - self.at:
            raise GGUFError(f"cut short or damaged: {size} bytes are missing at byte {self.at}")
        start, self.at = self.at, self.at + size
        return start

    def unsigned(self, size: int) -> int:
        start = self.take(size)
        return int.from_bytes(self._data[start : self.at], "little")

    def string(self) -> str:
        size = self.unsigned(8)
        _check_limit(size, MAX_STRING_BYTES, "bytes in a text")
        start = self.take(size)
        try:
            return self._data[start : self.at].decode("utf-8")
        except UnicodeDecodeError:
            raise GGUFError(f"damaged: the text at byte {start} is not UTF-8") from None

    def value(self, kind: int, key: str) -> Any:
        if kind == STRING_TYPE:
            return self.string()
        if kind == ARRAY_TYPE:
            return self._array(self.unsigned(4), self.unsigned(8), key)
        return self._numbers(kind, 1, key)[0].item()

    def _array(self, kind: int, number: int, key: str) -> Any:
        if kind != STRING_TYPE:
            return self._numbers(kind, number, key)
        _check_limit(number, MAX_ARRAY_STRINGS, f"texts in {key}")
        return [self.string() for _ in range(number)]

    def _numbers(self, kind: int, number: int, key: str) -> npt.NDArray[Any]:
        if kind not in NUMBER_DTYPES:
            raise GGUFError(f"damaged: {key} has a value of type {kind}")
        dtype = np.dtype(NUMBER_DTYPES[kind])
        start = self.take(number * dtype.itemsize)
        return np.frombuffer(self._data[start : self.at], dtype)

    def tensor(self) -> GGUFTensor:
        """Read one tensor's claim; its offset counts from the beginning of the data."""
        name = self.string()
        dimensions = self.unsigned(4)
        _check_limit(dimensions, MAX_DIMENSIONS, f"dimensions of tensor {name!r}")
        shape = tuple(self.unsigned(8) for _ in range(dimensions))[::-1]
        kind, offset = self.unsigned(4), self.unsigned(8)
        if kind not in TENSOR_TYPES:
            found = UNSUPPORTED_TYPES.get(kind, f"number {kind}")
            supported = ", ".join(known.name for known in TENSOR_TYPES.values())
            raise GGUFError(f"tensor {name} is of type {found}; supported are {supported}")
        if not shape or 0 in shape or shape[-1] % TENSOR_TYPES[kind].values:
            raise GGUFError(
                f"tensor {name}: {TENSOR_TYPES[kind].name} cannot have the shape {shape}"
            )
        return GGUFTensor(name, TENSOR_TYPES[kind], shape, offset)
