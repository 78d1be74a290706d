"""The executor that compiles the Metal kernels as CUDA and runs them on an NVIDIA GPU."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

import mlx.core as mx

from labkit.metal import kernels
from labkit.metal.kernel_call import KernelCall

_METAL_INCLUDE = re.compile(r"^#include <metal_\w+>\n", re.MULTILINE)
_POINTER = "_pointer"  # suffix of a scalar's name in the signature


def on_cuda(call: KernelCall, poison: bool = False) -> list[mx.array]:
    """Pass ``call`` to MLX as a CUDA kernel and return its outputs, which are lazy.

    A threadgroup becomes a thread block. ``poison`` is as in ``KernelCall.__call__``.
    """
    scalars = tuple(name for name, array in call.inputs if array.ndim == 0)
    kernel = _kernel(*call.definition(), scalars)
    result: list[mx.array] = kernel(**call.launch_arguments(poison=poison))
    return result


def cuda_header(header: str) -> str:
    """Return the CUDA source that precedes a kernel whose Metal source follows ``header``."""
    return prelude() + _METAL_INCLUDE.sub("", header)


def cuda_body(body: str, scalars: tuple[str, ...]) -> str:
    """Return the CUDA source of a kernel's body.

    MLX passes a scalar by reference to a Metal kernel, but by pointer to a CUDA kernel.
    """
    loads = (f"const auto {name} = *{name}{_POINTER};\n" for name in scalars)
    return "".join(loads) + body


@cache
def prelude() -> str:
    """Return the text of ``cuda_prelude.cuh``, which defines Metal's words in CUDA."""
    return (files(kernels) / "cuda_prelude.cuh").read_text(encoding="utf-8")


@lru_cache(maxsize=64)
def _kernel(
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    header: str,
    body: str,
    scalars: tuple[str, ...],
) -> Any:
    """Return MLX's kernel object, cached because MLX generates its text each time."""
    return mx.fast.cuda_kernel(
        name=name,
        input_names=[input + _POINTER if input in scalars else input for input in inputs],
        output_names=list(outputs),
        source=cuda_body(body, scalars),
        header=cuda_header(header),
    )
