"""Numba intrinsics that read and write structs, arrays and words by address.

Python fills the memory that kernels read. In Python, a struct is a record of a NumPy structured
dtype. In a kernel, the struct's fields are attributes. Addresses are int64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, extending, from_dtype, types
from numba.core import cgutils
from numpy.typing import NDArray

from labkit.cpu.runtime.jit import emitted, inlined, intrinsic

_I64 = ir.IntType(64)
_POINTER = _I64.as_pointer()


class StructType(types.Record):  # type: ignore[misc]
    """The numba type of a structured dtype. Compiled functions get the same name in every process.

    numba names the functions of a plain record type by a type number that differs from process to
    process. Functions for two structs, compiled in two processes and loaded from the cache, could
    get the same name, and the linker would keep only one of them.
    """

    def __init__(self, name: str, dtype: np.dtype[Any]) -> None:
        record = from_dtype(dtype)
        fields = [(field, value._asdict()) for field, value in record.fields.items()]
        super().__init__(fields, record.size, record.aligned)
        self._struct_name = name

    @property
    def mangling_args(self) -> tuple[str, tuple[()]]:
        """The part of a compiled function's name that represents this type."""
        return self._struct_name, ()


extending.register_model(StructType)(extending.models.RecordModel)


def struct_at(name: str, dtype: np.dtype[Any]) -> Callable[[int], Any]:
    """Return an intrinsic that interprets an int64 address as a struct of the given dtype.

    After ``point = point_at(address)`` in a kernel, ``point.x`` is a plain load and ``point.x = 1``
    a plain store. ``name`` must be unique among the package's structs.
    """
    struct = StructType(name, dtype)

    @intrinsic
    def at(typing_context: Any, address: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(struct))

        return struct(types.int64), emit

    return at


def address_of(array: NDArray[Any]) -> int:
    """Return the address of an array's first element."""
    if array.dtype.fields:  # for a structured dtype, the array interface takes 20 us
        return int(array.ctypes.data)
    return int(array.__array_interface__["data"][0])


@emitted(types.voidptr)
def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, cgutils.voidptr_t)


@inlined
def float_array(address: int, shape: Any) -> Any:
    """Return the memory at an address as float32 of a shape: an int or a tuple of ints."""
    return carray(_pointer(address), shape, np.float32)


@inlined
def int32_array(address: int, shape: Any) -> Any:
    """Return the memory at an address as int32, as in ``float_array``."""
    return carray(_pointer(address), shape, np.int32)


@inlined
def int64_array(address: int, shape: Any) -> Any:
    """Return the memory at an address as int64, as in ``float_array``."""
    return carray(_pointer(address), shape, np.int64)


@inlined
def byte_array(address: int, shape: Any) -> Any:
    """Return the memory at an address as uint8, as in ``float_array``."""
    return carray(_pointer(address), shape, np.uint8)


@emitted(types.int64)
def load_atomic(builder: Any, address: Any) -> Any:
    """Read the int64 at an address, ordered before all following reads."""
    return builder.load_atomic(builder.inttoptr(address, _POINTER), "seq_cst", 8)


@emitted(types.int64)
def fetch_add(builder: Any, address: Any, value: Any) -> Any:
    """Add to the int64 at an address, after all preceding writes, and return its old value."""
    return builder.atomic_rmw("add", builder.inttoptr(address, _POINTER), value, "seq_cst")


@emitted(types.int64)
def stack_words(builder: Any, count: Any) -> Any:
    """Allocate ``count`` int64 on the stack of the calling function and return their address."""
    return builder.ptrtoint(builder.alloca(_I64, count), _I64)
