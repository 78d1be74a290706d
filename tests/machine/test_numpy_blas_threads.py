from pathlib import Path

import pytest

from labkit.machine import numpy_blas_threads


@pytest.fixture
def num_threads():
    """A function that returns NumPy's number of threads, which is 2."""
    library = numpy_blas_threads._openblas()
    if library is None:
        pytest.skip("this NumPy does not ship OpenBLAS")
    before = library.scipy_openblas_get_num_threads64_()
    library.scipy_openblas_set_num_threads64_(2)
    yield library.scipy_openblas_get_num_threads64_
    library.scipy_openblas_set_num_threads64_(before)


def test_numpy_s_blas_has_one_thread_inside_the_context_only(num_threads):
    with numpy_blas_threads.single_thread():
        assert num_threads() == 1
    assert num_threads() == 2
    with pytest.raises(ValueError, match="no"), numpy_blas_threads.single_thread():
        raise ValueError("no")
    assert num_threads() == 2


def test_the_wheel_s_library_is_the_one_that_numpy_has_loaded():
    """Its path is in the process's map of files, so the number read is NumPy's own."""
    library = numpy_blas_threads._openblas()
    if library is None:
        pytest.skip("this NumPy does not ship OpenBLAS")
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("not Linux")
    import numpy as np

    assert np.__config__.CONFIG["Build Dependencies"]["blas"]["name"] == "scipy-openblas"
    loaded = {line.split()[-1] for line in maps.read_text().splitlines() if "openblas64" in line}
    assert loaded == {library._name}
