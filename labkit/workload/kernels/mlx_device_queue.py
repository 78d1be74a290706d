"""MLX's default device as a launch queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from labkit.config import Precision

EXTRA_ARRAYS = 4  # other live arrays of the outputs' size, besides the chain's outputs


class MlxLaunchQueue:
    """MLX's default device, for one element type: a device with lazy arrays.

    bfloat16 is uint16 in NumPy (``kv_dtypes.NUMPY_DTYPES``).
    """

    def __init__(self, dtype: Precision = Precision.float32) -> None:
        self._is_bfloat16 = dtype is Precision.bfloat16

    def put(self, stored: NDArray[Any]) -> mx.array:
        """Copy an array to the device and wait until the copy is complete."""
        array = mx.array(stored)
        copied = array.view(mx.bfloat16) if self._is_bfloat16 else array
        mx.eval(copied)
        return copied

    def wait(self, arrays: Sequence[mx.array]) -> None:
        mx.eval(*arrays)

    def read(self, array: mx.array) -> NDArray[Any]:
        """Return an evaluated array as a NumPy view of its memory."""
        return np.asarray(array.view(mx.uint16) if self._is_bfloat16 else array)

    def poison(self, like: mx.array, count: int, alone: bool) -> None:
        """Leave NaN in the memory that the next ``count`` arrays of the shape of ``like`` will use.

        Arrays of NaN are filled and freed. Filling the outputs themselves (``init_value``) would
        add a launch to the measured time. MLX may also reuse the memory of earlier outputs, so a
        few more arrays are filled. The reuse is certain only after the cache was cleared
        (``alone``), but then the next launch must allocate all its other memory anew.
        """
        if alone:
            mx.clear_cache()
        arrays = range(count + EXTRA_ARRAYS * (not alone))
        mx.eval([mx.full(like.shape, float("nan"), like.dtype) for _ in arrays])

    def empty(self, start: mx.array | None) -> mx.array:
        """Return a lazy launch of one thread: ``start`` (zero if None) plus one."""
        if start is None:
            start = mx.zeros(1)
            mx.eval(start)
        return start + 1
