"""MLX's default device as a launch queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from numpy.typing import NDArray

from labkit.config import Precision
from labkit.workload.kernels import kernel_cases

EXTRA_ARRAYS = 4  # other live arrays of the outputs' size, besides the chain's outputs


class MlxLaunchQueue:
    """MLX's default device, for one element type; see ``launch_timing.LaunchQueue``."""

    def __init__(self, dtype: Precision = Precision.float32) -> None:
        self._dtype = dtype

    def put(self, array: NDArray[Any]) -> mx.array:
        copied: mx.array = kernel_cases.to_mlx(array, self._dtype)
        mx.eval(copied)
        return copied

    def wait(self, arrays: Sequence[mx.array]) -> None:
        mx.eval(*arrays)

    def read(self, array: mx.array) -> NDArray[Any]:
        return kernel_cases.from_mlx(array, self._dtype)

    def poison(self, like: mx.array, count: int, alone: bool) -> None:
        """Fill ``count`` arrays with NaN and free them, so that MLX reuses their memory.

        Filling the outputs themselves (``init_value``) would add a launch to the measured time.
        MLX may also reuse the memory of earlier outputs, so a few more arrays are filled. The
        reuse is certain only after the cache was cleared (``alone``), but then the next launch
        must allocate all its other memory anew.
        """
        if alone:
            mx.clear_cache()
        nan = float("nan")
        mx.eval(
            [
                mx.full(like.shape, nan, like.dtype)
                for _ in range(count + EXTRA_ARRAYS * (not alone))
            ]
        )

    def empty(self, start: mx.array | None) -> mx.array:
        """Return ``start`` (zero if None) plus one: a launch of one thread."""
        if start is None:
            start = mx.zeros(1)
            mx.eval(start)
        return start + 1
