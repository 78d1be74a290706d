"""numba's decorators as the kernels use them, with types for mypy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba import extending

from labkit.cpu import thread_pool

F = TypeVar("F", bound=Callable[..., Any])


def inner(function: F) -> F:
    """Compile a function that kernels call."""
    return cast(F, numba.njit(error_model="numpy")(function))


def inlined(function: F) -> F:
    """Compile a function that kernels call, and force it inline: a call would cost too much."""
    return cast(F, numba.njit(error_model="numpy", forceinline=True)(function))


def kernel(function: F) -> F:
    """Compile a launch: a function whose ``prange`` loops run on the thread pool."""
    return cast(F, thread_pool.kernel(error_model="numpy")(function))


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make an intrinsic: a function that emits LLVM instructions at its call in a kernel.

    Kernels call it without the typing context, the first parameter of ``function``.
    """
    return cast(Callable[..., Any], extending.intrinsic(function))


def variants_of(function: Callable[..., Any]) -> Callable[[F], F]:
    """Decorate a function that returns the implementation of ``function`` for given types."""
    return cast(Callable[[F], F], extending.overload(function, strict=False))
