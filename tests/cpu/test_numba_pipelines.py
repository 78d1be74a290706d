"""Functions that only kernels call are linked into them and never become machine code."""

from __future__ import annotations

import numba
import numpy as np
import pytest
from numba.core.codegen import JITCodeLibrary

from labkit.cpu.runtime.jit import inner
from labkit.cpu.runtime.numba_pipelines import KernelCompiler


def test_only_kernels_and_functions_of_others_become_machine_code(monkeypatch):
    made, finalize = [], JITCodeLibrary._finalize_specific

    def spy(library):
        made.append(library.name)
        finalize(library)

    @inner
    def add_two(x):
        return x + 2

    @numba.njit
    def of_the_user(x):
        return 3 * x

    @numba.njit(parallel=True, pipeline_class=KernelCompiler)
    def kernel(out):
        for i in numba.prange(len(out)):
            out[i] = max(0, of_the_user(add_two(i)))

    monkeypatch.setattr(JITCodeLibrary, "_finalize_specific", spy)
    out = np.zeros(9)
    kernel(out)
    np.testing.assert_array_equal(out, 3 * (np.arange(9) + 2))
    names = {name.split(".")[-1] for name in made}
    assert names - {"nrt"} == {"kernel", "of_the_user"}  # nrt: numba's own, once per process
    assert of_the_user(2) == 6
    with pytest.raises(TypeError):
        add_two(np.int64(1))
