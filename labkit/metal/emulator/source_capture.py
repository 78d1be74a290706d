"""The text and launch that MLX generates for a kernel, obtained without Metal.

``mx.export_function`` with a callback hands over the traced primitive (MLX 0.32 and
later). Its tuple is internal to MLX, so every field that is used is checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from labkit.metal.emulator.emulator_errors import EmulatorUnavailable
from labkit.metal.kernel_call import KernelCall


@dataclass(frozen=True)
class Traced:
    """A kernel as MLX would hand it to Metal.

    Parameters
    ----------
    name
        Of the instantiated function.
    text
        Header, generated signature, body and explicit instantiation.
    grid, threadgroup
        In threads.
    """

    name: str
    text: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]


def trace(call: KernelCall) -> Traced:
    """Return what MLX generates for ``call``; nothing is computed.

    Raises
    ------
    EmulatorUnavailable
        MLX is too old or its traced tuple has changed.
    """
    events: list[dict[str, Any]] = []
    try:
        mx.export_function(
            events.append, lambda *inputs: call(inputs, poison=False), *call.operands()
        )
    except RuntimeError as error:
        raise EmulatorUnavailable(f"MLX {version('mlx')} cannot trace kernels: {error}") from error
    primitives = [event for event in events if event.get("type") == "primitive"]
    kernels = [event for event in primitives if event.get("name") == "CustomKernel"]
    if len(kernels) != 1:
        raise _changed(f"{len(kernels)} kernels in the trace of one")
    return _checked(kernels[0].get("arguments"))


def _checked(arguments: Any) -> Traced:
    if not isinstance(arguments, list | tuple) or len(arguments) < 8:
        raise _changed("the traced tuple is shorter")
    name, text, *sizes = arguments[:8]
    if not isinstance(name, str) or not isinstance(text, str) or f"void {name}(" not in text:
        raise _changed("name and text are not where they were")
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise _changed("grid and threadgroup are not where they were")
    gx, gy, gz, tx, ty, tz = sizes
    return Traced(name, text, (gx, gy, gz), (tx, ty, tz))


def _changed(what: str) -> EmulatorUnavailable:
    return EmulatorUnavailable(
        f"MLX {version('mlx')} traces kernels in a form that this emulator does not know: {what}"
    )
