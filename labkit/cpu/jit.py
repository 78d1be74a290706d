"""numba's decorators with types: what the kernels are compiled with, said once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba import extending

from labkit.cpu import thread_pool

F = TypeVar("F", bound=Callable[..., Any])


def inner(function: F) -> F:
    """Compile a part of a kernel."""
    return cast(F, numba.njit(error_model="numpy")(function))


def inlined(function: F) -> F:
    """Compile a part of a kernel that is too short for the cost of a call."""
    return cast(F, numba.njit(error_model="numpy", forceinline=True)(function))


def kernel(function: F) -> F:
    """Compile a launch on the pool of threads."""
    return cast(F, thread_pool.kernel(error_model="numpy")(function))


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that writes LLVM instructions where a kernel calls it.

    Kernels call it without the typing context that ``function`` takes first.
    """
    return cast(Callable[..., Any], extending.intrinsic(function))


def variants_of(function: Callable[..., Any]) -> Callable[[F], F]:
    """Decorate what returns the variant of ``function`` for the types of a call."""
    return cast(Callable[[F], F], extending.overload(function, strict=False))
