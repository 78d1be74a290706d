"""numba's decorators with the options of this package's kernels, typed for mypy."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba import extending, types

from labkit.cpu.runtime import thread_pool
from labkit.cpu.runtime.numba_pipelines import INNER, CallerCompiler

F = TypeVar("F", bound=Callable[..., Any])

# ``numba.get_num_threads`` for kernels. numba's own has an address in it, so that a kernel that
# calls it cannot be cached.
num_threads = types.ExternalFunction("get_num_threads", types.intp())


def inner(function: F) -> F:
    """Compile a function that is called by kernels and not launched by itself."""
    return cast(F, numba.njit(**INNER)(function))


def inlined(function: F) -> F:
    """Compile a function that kernels call, and force LLVM to inline it, which saves the call."""
    return cast(F, numba.njit(forceinline=True, **INNER)(function))


def c_function(signature: Any) -> Callable[[F], Any]:
    """Compile a C function, which kernels call by address, or load it from numba's cache."""
    thread_pool.install()
    compile_: Callable[[F], Any] = numba.cfunc(
        signature, cache=True, pipeline_class=CallerCompiler, error_model="numpy"
    )
    return compile_


def kernel(function: F) -> F:
    """Compile a kernel: a function whose ``prange`` loops run on the thread pool."""
    return cast(F, thread_pool.kernel()(function))


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make an intrinsic: a call of it in a kernel is replaced by the instructions it emits.

    The first parameter of ``function`` is numba's typing context. Kernels omit this argument.
    """
    return cast(Callable[..., Any], extending.intrinsic(function))


def emitted(result: Any = types.void, **kinds: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function that emits the instructions of an intrinsic with llvmlite's builder.

    The function's first parameter is the builder. The others are those of the intrinsic, as LLVM
    values. ``result`` is the numba type of the result. Arguments are int64 unless ``kinds`` gives
    another type for the parameter. If it gives None, the argument may have any type, and the
    function gets this type instead of the value.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        names = list(inspect.signature(emit).parameters)[1:]
        wanted = [kinds.get(name, types.int64) for name in names]

        @intrinsic
        @functools.wraps(emit)
        def define(_typing_context: Any, *given: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                operands = [
                    kind if want is None else value
                    for want, kind, value in zip(wanted, signature.args, values, strict=True)
                ]
                value = emit(builder, *operands)
                return context.get_dummy_value() if result is types.void else value

            signature = result(*(want or kind for want, kind in zip(wanted, given, strict=True)))
            return signature, generate

        return define

    return decorate


def variants_of(function: Callable[..., Any]) -> Callable[[F], F]:
    """Decorate a function that chooses the implementation of ``function`` by argument types.

    The decorated function gets the numba types of a call's arguments. It returns the
    implementation to compile, or None if it does not support these types.
    """
    return cast(Callable[[F], F], extending.overload(function, strict=False))
