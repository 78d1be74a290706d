"""Where kernel calls run."""

from __future__ import annotations

from labkit.metal.call import Executor, on_metal

DEVICES = ("metal", "emulated")


def executor(device: str) -> Executor:
    """Return what runs kernel calls on ``device``.

    Raises
    ------
    ValueError
        The device is unknown, or ``emulated`` lacks a compiler; one line.
    """
    if device == "metal":
        return on_metal
    if device != "emulated":
        raise ValueError(f"device={device}: allowed are {', '.join(DEVICES)}")
    from labkit.metal.emulator.build import find_compiler
    from labkit.metal.emulator.emulate import Emulator

    find_compiler()
    return Emulator()
