"""MLX as the queue that launches wait in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray


class MlxQueue:
    """MLX's default device; see ``labkit.workload.launches.Queue``."""

    def put(self, array: NDArray[Any]) -> mx.array:
        """Copy an array to the device."""
        there = mx.array(array)
        mx.eval(there)
        return there

    def wait(self, arrays: Sequence[mx.array]) -> None:
        """Evaluate arrays in one evaluation."""
        mx.eval(*arrays)

    def read(self, array: mx.array) -> NDArray[Any]:
        """Return a view of an evaluated array's memory."""
        return np.asarray(array)

    def poison(self, like: mx.array, count: int) -> None:
        """Fill as many arrays with NaN and let them go: MLX gives their memory out again.

        Filling the outputs themselves (``init_value``) would be a launch more, in the time.
        """
        mx.eval([mx.full(like.shape, float("nan"), like.dtype) for _ in range(count)])

    def empty(self, start: mx.array) -> mx.array:
        """Return ``start`` plus one: a launch of one thread."""
        return start + 1
