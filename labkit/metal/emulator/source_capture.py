"""Capture the text and launch that MLX generates for a kernel, without Metal.

``mx.export_function`` passes the exported primitive to a callback (MLX 0.32 and later). The tuple
of the primitive's arguments is internal to MLX, so every item that is used is checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from labkit.metal.emulator.emulator_errors import EmulatorUnavailable
from labkit.metal.kernel_call import KernelCall


@dataclass(frozen=True)
class CapturedKernel:
    """A kernel as MLX would hand it to Metal."""

    name: str  # name of the instantiated function
    text: str  # header, generated signature, body and explicit instantiation
    # grid, threadgroup: sizes in threads along each axis.
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]


def capture_kernel(call: KernelCall) -> CapturedKernel:
    """Return the kernel that MLX generates for ``call``. Nothing is computed.

    Raises ``EmulatorUnavailable`` if MLX is older than 0.32, or exports kernels in a form that this
    module does not know.
    """
    events: list[dict[str, Any]] = []
    try:
        mx.export_function(
            events.append, lambda *inputs: call(inputs, poison=False), *call.operands()
        )
    except RuntimeError as error:
        raise EmulatorUnavailable(f"MLX {version('mlx')} cannot export kernels: {error}") from error
    primitives = [event for event in events if event.get("type") == "primitive"]
    kernels = [event for event in primitives if event.get("name") == "CustomKernel"]
    if len(kernels) != 1:
        raise _unknown_form(f"the export of one kernel contains {len(kernels)} kernels")
    return _parse(kernels[0].get("arguments"))


def _parse(arguments: Any) -> CapturedKernel:
    if not isinstance(arguments, list | tuple) or len(arguments) < 8:
        raise _unknown_form("the arguments are not a tuple of 8 or more items")
    name, text, *sizes = arguments[:8]
    if not isinstance(name, str) or not isinstance(text, str) or f"void {name}(" not in text:
        raise _unknown_form("name and text are not the first two items")
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise _unknown_form("items 2 to 7 are not the six positive sizes of grid and threadgroup")
    gx, gy, gz, tx, ty, tz = sizes
    return CapturedKernel(name, text, (gx, gy, gz), (tx, ty, tz))


def _unknown_form(difference: str) -> EmulatorUnavailable:
    return EmulatorUnavailable(
        f"MLX {version('mlx')} exports kernels in a form that this emulator does not know: "
        f"{difference}"
    )
