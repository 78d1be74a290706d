"""MLX as the queue that launches wait in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from numpy.typing import NDArray

from labkit.config import Precision
from labkit.workload import kernel_cases

MORE = 4  # arrays of a size that live at once, besides those of a chain


class MlxLaunchQueue:
    """MLX's default device, for numbers of one type; see ``launches.LaunchQueue``."""

    def __init__(self, dtype: Precision = Precision.float32) -> None:
        self._dtype = dtype

    def put(self, array: NDArray[Any]) -> mx.array:
        """Copy an array to the device."""
        there: mx.array = kernel_cases.to_mlx(array, self._dtype)
        mx.eval(there)
        return there

    def wait(self, arrays: Sequence[mx.array]) -> None:
        """Evaluate arrays in one evaluation."""
        mx.eval(*arrays)

    def read(self, array: mx.array) -> NDArray[Any]:
        """Return a view of an evaluated array's memory."""
        return kernel_cases.from_mlx(array, self._dtype)

    def poison(self, like: mx.array, count: int, alone: bool) -> None:
        """Fill as many arrays with NaN and let them go: MLX gives their memory out again.

        Filling the outputs themselves (``init_value``) would be a launch more, in the time.
        The memory of earlier outputs is given out as well, so a few more are filled; only
        without any (``alone``) is it certain, and then the next launch has all its other
        memory to allocate.
        """
        if alone:
            mx.clear_cache()
        nan = float("nan")
        mx.eval([mx.full(like.shape, nan, like.dtype) for _ in range(count + MORE * (not alone))])

    def empty(self, start: mx.array | None) -> mx.array:
        """Return ``start`` plus one: a launch of one thread."""
        return (_nothing() if start is None else start) + 1


def _nothing() -> mx.array:
    nothing = mx.zeros(1)
    mx.eval(nothing)
    return nothing
