"""Structs and arrays at an address: memory that Python fills and kernels read.

A struct is a record of a NumPy structured dtype in Python, and has its fields as attributes in a
kernel. An address is an int64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, extending, from_dtype, types
from numba.core import cgutils
from numpy.typing import NDArray

from labkit.cpu.jit import inlined, intrinsic


class StructType(types.Record):  # type: ignore[misc]
    """The numba type of a structured dtype, whose functions have one name in every process.

    numba names functions of a plain record type by the number that the type happens to have in its
    process. Functions for another struct, compiled in another process and loaded from the cache,
    could have the same name, and the linker would keep one of the two.
    """

    def __init__(self, name: str, dtype: np.dtype[Any]) -> None:
        record = from_dtype(dtype)
        fields = [(field, value._asdict()) for field, value in record.fields.items()]
        super().__init__(fields, record.size, record.aligned)
        self._struct_name = name

    @property
    def mangling_args(self) -> tuple[str, tuple[()]]:
        """The part of a compiled function's name that stands for this type."""
        return self._struct_name, ()


extending.register_model(StructType)(extending.models.RecordModel)


def struct_at(name: str, dtype: np.dtype[Any]) -> Callable[[int], Any]:
    """Return an intrinsic that reads an int64 address as a struct.

    In a kernel ``point = point_at(address)`` gives ``point.x``, a plain load, and
    ``point.x = 1``, a plain store. ``name`` must be unique among the package's structs.
    """
    struct = StructType(name, dtype)

    @intrinsic
    def at(typing_context: Any, address: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(struct))

        return struct(types.int64), emit

    return at


def address_of(array: NDArray[Any]) -> int:
    """Return where an array's memory begins."""
    if array.dtype.fields:  # the array interface of a structured dtype takes 20 us to describe it
        return int(array.ctypes.data)
    return int(array.__array_interface__["data"][0])


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    """Return an address as a void pointer."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), emit


@inlined
def float_array(address: int, size: int) -> Any:
    """Return float32 [size]."""
    return carray(_pointer(address), (size,), np.float32)


@inlined
def float_matrix(address: int, rows: int, width: int) -> Any:
    """Return float32 [rows, width]."""
    return carray(_pointer(address), (rows, width), np.float32)


@inlined
def int32_array(address: int, size: int) -> Any:
    """Return int32 [size]."""
    return carray(_pointer(address), (size,), np.int32)


@inlined
def int64_array(address: int, size: int) -> Any:
    """Return int64 [size]."""
    return carray(_pointer(address), (size,), np.int64)


@inlined
def int64_matrix(address: int, rows: int, width: int) -> Any:
    """Return int64 [rows, width]."""
    return carray(_pointer(address), (rows, width), np.int64)


@inlined
def byte_matrix(address: int, rows: int, width: int) -> Any:
    """Return uint8 [rows, width]."""
    return carray(_pointer(address), (rows, width), np.uint8)


@inlined
def float_panels(address: int, panels: int, depth: int, width: int) -> Any:
    """Return float32 [panels, depth, width]."""
    return carray(_pointer(address), (panels, depth, width), np.float32)
