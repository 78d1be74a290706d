"""One call of a Metal kernel, as data: the device runs it, the emulator runs the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx


@dataclass(frozen=True)
class KernelCall:
    """A kernel, its operands and its grid."""

    name: str  # in Metal's tools
    header: str  # Metal source before the kernel
    body: str  # Metal source of the kernel's own body
    inputs: tuple[tuple[str, mx.array], ...]  # by name, in order; scalars are 0-d arrays
    outputs: tuple[tuple[str, tuple[int, ...], mx.Dtype], ...]  # name, shape, type
    template: tuple[tuple[str, Any], ...]  # constants (type, int or bool), in order
    groups: tuple[int, int, int]  # threadgroups along each axis
    threads: int  # of a threadgroup (one-dimensional)

    def on(self, inputs: tuple[tuple[str, mx.array], ...]) -> KernelCall:
        """Return the call with these operands."""
        what = (self.name, self.header, self.body, inputs, self.outputs, self.template)
        return KernelCall(*what, self.groups, self.threads)

    def __call__(
        self, inputs: Sequence[mx.array] | None = None, poison: bool = False
    ) -> list[mx.array]:
        """Hand the call to MLX; what it returns is lazy, like every MLX operation's.

        ``inputs``: operands in place of its own. ``poison`` fills the outputs with NaN
        (integers with 0) before the kernel runs: on a GPU a launch more for each of them, in every
        time. The stamps say whether a launch ran; who times launches poisons the memory that
        MLX will give them (``labkit.workload.mlx_launch_queue``).
        """
        kernel = _kernel(
            self.name,
            tuple(name for name, _ in self.inputs),
            tuple(name for name, _, _ in self.outputs),
            self.header,
            self.body,
        )
        x, y, z = self.groups
        result: list[mx.array] = kernel(
            inputs=self.operands() if inputs is None else list(inputs),
            template=list(self.template),
            grid=(x * self.threads, y, z),
            threadgroup=(self.threads, 1, 1),
            output_shapes=[shape for _, shape, _ in self.outputs],
            output_dtypes=[dtype for _, _, dtype in self.outputs],
            init_value=float("nan") if poison else None,
        )
        return result

    def operands(self) -> list[mx.array]:
        """Return the inputs' arrays."""
        return [array for _, array in self.inputs]


Executor = Callable[[KernelCall], list[mx.array]]
on_metal: Executor = KernelCall.__call__


@lru_cache(maxsize=64)
def _kernel(
    name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], header: str, body: str
) -> Any:
    """Build the kernel object once: MLX writes and hashes its text anew otherwise."""
    return mx.fast.metal_kernel(
        name=name,
        input_names=list(inputs),
        output_names=list(outputs),
        source=body,
        header=header,
    )
