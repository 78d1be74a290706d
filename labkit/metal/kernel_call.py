"""One call of a Metal kernel as data, and what runs it: Metal, CUDA or the emulator."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

import mlx.core as mx

from labkit.metal import kernels

DEVICES = ("metal", "emulated", "cuda")
_METAL_INCLUDE = re.compile(r"^#include <metal_\w+>\n", re.MULTILINE)


@dataclass(frozen=True)
class KernelCall:
    """A Metal kernel's source with the operands and the grid of one call."""

    name: str  # as Metal's tools show it
    header: str  # Metal source before the kernel
    body: str  # Metal source of the kernel's body
    inputs: tuple[tuple[str, mx.array], ...]  # (name, array), in order; scalars are 0-d arrays
    outputs: tuple[tuple[str, tuple[int, ...], mx.Dtype], ...]  # (name, shape, dtype)
    template: tuple[tuple[str, Any], ...]  # (name, dtype, int or bool), in order
    groups: tuple[int, int, int]  # threadgroups along each axis
    threads: int  # per threadgroup (one-dimensional)

    def with_inputs(self, inputs: tuple[tuple[str, mx.array], ...]) -> KernelCall:
        """Return a copy of the call with other inputs."""
        return KernelCall(
            self.name, self.header, self.body, inputs, self.outputs, self.template, self.groups,
            self.threads,
        )  # fmt: skip

    def __call__(
        self, inputs: Sequence[mx.array] | None = None, poison: bool = False
    ) -> list[mx.array]:
        """Pass the call to MLX and return its outputs, which are lazy like those of any MLX call.

        ``inputs``, if given, replace the call's own inputs. ``poison`` fills the outputs with NaN
        (integers with 0) before the kernel runs. On a GPU this costs an extra launch per output,
        which would be part of every measured time. So code that times launches poisons the memory
        that MLX will allocate for the outputs instead
        (``labkit.workload.kernels.launch_timing``), and the kernels' stamps tell whether a
        launch ran.
        """
        kernel = _kernel(*self.definition())
        result: list[mx.array] = kernel(**self.launch_arguments(inputs, poison))
        return result

    def definition(self) -> tuple[str, tuple[str, ...], tuple[str, ...], str, str]:
        """Return what defines the kernel: name, names of inputs and outputs, header and body."""
        inputs = tuple(name for name, _ in self.inputs)
        return self.name, inputs, tuple(name for name, _, _ in self.outputs), self.header, self.body

    def launch_arguments(
        self, inputs: Sequence[mx.array] | None = None, poison: bool = False
    ) -> dict[str, Any]:
        """Return the keyword arguments with which MLX launches the kernel on any GPU."""
        x, y, z = self.groups
        return {
            "inputs": self.operands() if inputs is None else list(inputs),
            "template": list(self.template),
            "grid": (x * self.threads, y, z),
            "threadgroup": (self.threads, 1, 1),
            "output_shapes": [shape for _, shape, _ in self.outputs],
            "output_dtypes": [dtype for _, _, dtype in self.outputs],
            "init_value": float("nan") if poison else None,
        }

    def operands(self) -> list[mx.array]:
        """Return the arrays of ``inputs``, without their names."""
        return [array for _, array in self.inputs]


Executor = Callable[[KernelCall], list[mx.array]]
on_metal: Executor = KernelCall.__call__


@lru_cache(maxsize=64)
def _kernel(
    name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], header: str, body: str
) -> Any:
    """Return MLX's kernel object, cached because MLX generates and hashes its text each time."""
    return mx.fast.metal_kernel(
        name=name, input_names=list(inputs), output_names=list(outputs), source=body, header=header
    )


def on_cuda(call: KernelCall, poison: bool = False) -> list[mx.array]:
    """Pass ``call`` to MLX as a CUDA kernel and return its outputs, which are lazy.

    A threadgroup becomes a thread block. ``poison`` is as in ``KernelCall.__call__``.
    """
    scalars = tuple(name for name, array in call.inputs if array.ndim == 0)
    kernel = _cuda_kernel(*call.definition(), scalars)
    result: list[mx.array] = kernel(**call.launch_arguments(poison=poison))
    return result


@lru_cache(maxsize=64)
def _cuda_kernel(
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    header: str,
    body: str,
    scalars: tuple[str, ...],
) -> Any:
    return mx.fast.cuda_kernel(
        name=name,
        input_names=[f"{input}_pointer" if input in scalars else input for input in inputs],
        output_names=list(outputs),
        source=cuda_body(body, scalars),
        header=cuda_header(header),
    )


def cuda_header(header: str) -> str:
    """Return the CUDA source that precedes a kernel whose Metal source follows ``header``."""
    prelude = (files(kernels) / "cuda_prelude.cuh").read_text(encoding="utf-8")
    return prelude + _METAL_INCLUDE.sub("", header)


def cuda_body(body: str, scalars: tuple[str, ...]) -> str:
    """Return the CUDA source of a kernel's body.

    MLX passes a scalar by reference to a Metal kernel, but by pointer to a CUDA kernel.
    """
    return "".join(f"const auto {name} = *{name}_pointer;\n" for name in scalars) + body


def executor_for(device: str) -> Executor:
    """Return the function that runs kernel calls on ``device``.

    Raises ``ValueError`` if the device is unknown, this machine has no Metal or no CUDA, or the
    emulator has no compiler. The message is a single line.
    """
    if device == "metal":
        if not mx.metal.is_available():
            raise ValueError("device=metal: there is no Metal on this machine; set device=emulated")
        return on_metal
    if device == "cuda":
        if not mx.cuda.is_available():
            raise ValueError(
                "device=cuda: this MLX has no CUDA back-end or finds no NVIDIA GPU; set device=cpu"
            )
        return on_cuda
    if device != "emulated":
        raise ValueError(f"device={device}: must be one of: {', '.join(DEVICES)}")
    from labkit.metal.emulator.cpp_compilation import find_compiler
    from labkit.metal.emulator.kernel_emulator import Emulator

    find_compiler()
    return Emulator()
