"""numba's compiler pipelines for kernels, and for functions that only kernels call.

numba (0.68) optimises each function and makes machine code and two wrappers of it, although a
function that only kernels call is linked into each of them as LLVM IR and optimised again. The
functions of a parallel loop, and numba's own (``min``, ``carray``), are treated alike. All that is
left out here, which takes about half of the time. A function that is compiled so cannot be called
from Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_machinery import register_pass
from numba.core.targetconfig import ConfigStack
from numba.core.typed_passes import NativeParforLowering
from numba.parfors.parfor import Parfor
from numba.parfors.parfor_lowering import ParforLower

# Names of the libraries that numba creates for a parallel loop.
_LOOP_LIBRARIES = (
    "__numba_parfor_gufunc",
    "<numba.np.ufunc.wrappers._GufuncWrapper",
    "parallelgufuncwrapper",
)
_RUN_ALONE = ("nrt", "multi3")  # numba's runtime: libraries whose functions are called by address


class _NoEnvironment:
    """A code generator without a place for the environment, which only Python calls use."""

    def __init__(self, codegen: Any) -> None:
        self._codegen = codegen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codegen, name)

    def set_env(self, env_name: str, env: Any) -> None:
        pass


class LinkedLibrary(JITCodeLibrary):  # type: ignore[misc]  # numba is untyped
    """IR to be linked into the libraries that use it. It is not optimised here and never run."""

    @property
    def codegen(self) -> Any:
        return _NoEnvironment(self._codegen)

    def get_pointer_to_function(self, name: str) -> int:
        """Return the address of what Python calls instead of the function: it raises TypeError."""
        self._ensure_finalized()
        return ctypes.cast(ctypes.pythonapi.PyErr_BadArgument, ctypes.c_void_p).value or 0

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


@contextmanager
def _linked_dependencies(codegen: Any) -> Iterator[None]:
    """Make numba create a ``LinkedLibrary`` for each part of a loop, and for its own functions.

    Python does not call these. It may call other functions that a kernel calls, those of a user.
    """
    before = codegen.create_library

    def create_library(name: str, **options: Any) -> Any:
        flags = ConfigStack.top_or_none()
        own = flags is not None and flags.no_cpython_wrapper and name not in _RUN_ALONE
        if own or name.startswith(_LOOP_LIBRARIES):
            return LinkedLibrary(codegen, name, **options)
        return JITCodeLibrary(codegen, name, **options)

    codegen.create_library = create_library
    try:
        yield
    finally:
        codegen.create_library = before


class CallerCompiler(Compiler):  # type: ignore[misc]
    """Compiles a function into a library of its own, and what it calls into ``LinkedLibrary``."""

    library_class: Any = JITCodeLibrary

    def _compile_core(self) -> Any:
        codegen = self.state.targetctx.codegen()
        name = self.state.func_id.func_qualname
        self.state.library = self.library_class(codegen, name)
        if self.library_class is JITCodeLibrary:
            self.state.library.enable_object_caching()
        with _linked_dependencies(codegen):
            return super()._compile_core()


class InnerCompiler(CallerCompiler):
    """Compiles a function into a ``LinkedLibrary``."""

    library_class = LinkedLibrary

    def define_pipelines(self) -> Any:
        self.state.flags.no_cpython_wrapper = self.state.flags.no_cfunc_wrapper = True
        return super().define_pipelines()


INNER = {"error_model": "numpy", "pipeline_class": InnerCompiler}  # options of ``numba.njit``


class _KernelLower(ParforLower):  # type: ignore[misc]
    def lower_inst(self, inst: Any) -> None:
        if not isinstance(inst, Parfor):
            super().lower_inst(inst)
            return
        inst.flags = inst.flags.copy()
        inst.flags.no_cpython_wrapper = inst.flags.no_cfunc_wrapper = True
        super().lower_inst(inst)


@register_pass(mutates_CFG=True, analysis_only=False)
class _KernelLowering(NativeParforLowering):  # type: ignore[misc]
    _name = "kernel_lowering"

    @property
    def lowering_class(self) -> Any:
        return _KernelLower


class KernelCompiler(CallerCompiler):
    """Compiles a kernel: a function with parallel loops that Python calls."""

    def define_pipelines(self) -> Any:
        (manager,) = super().define_pipelines()
        manager.passes = [
            (_KernelLowering if step is NativeParforLowering else step, text)
            for step, text in manager.passes
        ]
        manager.finalize()
        return [manager]
