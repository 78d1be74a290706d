"""Arrays that start on a cache line."""

from __future__ import annotations

import numpy as np

from labkit.cpu.runtime.aligned_memory import CACHE_LINE_BYTES, SlabAllocator, aligned_zeros


def address(array):
    return array.ctypes.data


def test_rows_start_on_a_cache_line():
    rows = aligned_zeros(3, 40)
    assert rows.shape == (3, 40) and address(rows) % CACHE_LINE_BYTES == 0 and not rows.any()


def test_small_arrays_share_a_slab_of_32_mib_and_do_not_overlap():
    slabs = SlabAllocator()
    arrays = [slabs.zeros((33, 5), np.float32) for _ in range(100)]
    first = address(arrays[0])
    for number, array in enumerate(arrays):
        assert address(array) % CACHE_LINE_BYTES == 0
        assert 0 <= address(array) - first < 1 << 25
        array[:] = number
    assert all((array == number).all() for number, array in enumerate(arrays))


def test_an_array_larger_than_a_slab_has_its_own():
    slabs = SlabAllocator(slab_bytes=256)
    large = slabs.zeros((1000,), np.float64)
    assert large.shape == (1000,) and address(large) % CACHE_LINE_BYTES == 0
