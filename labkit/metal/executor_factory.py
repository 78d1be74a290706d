"""Selection of the executor that runs kernel calls: Metal or the emulator."""

from __future__ import annotations

import mlx.core as mx

from labkit.metal.kernel_call import Executor, on_metal

DEVICES = ("metal", "emulated")


def executor_for(device: str) -> Executor:
    """Return the function that runs kernel calls on ``device``.

    Raises
    ------
    ValueError
        The device is unknown, this machine has no Metal, or the emulator has no compiler. The
        message is a single line.
    """
    if device == "metal":
        if not mx.metal.is_available():
            raise ValueError("device=metal: there is no Metal on this machine; set device=emulated")
        return on_metal
    if device != "emulated":
        raise ValueError(f"device={device}: must be one of: {', '.join(DEVICES)}")
    from labkit.metal.emulator.cpp_compilation import find_compiler
    from labkit.metal.emulator.kernel_emulator import Emulator

    find_compiler()
    return Emulator()
