"""Selection of the executor that runs kernel calls: Metal, CUDA or the emulator."""

from __future__ import annotations

import mlx.core as mx

from labkit.metal.kernel_call import Executor, on_metal

DEVICES = ("metal", "emulated", "cuda")


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
        from labkit.metal.cuda_executor import on_cuda

        return on_cuda
    if device != "emulated":
        raise ValueError(f"device={device}: must be one of: {', '.join(DEVICES)}")
    from labkit.metal.emulator.cpp_compilation import find_compiler
    from labkit.metal.emulator.kernel_emulator import Emulator

    find_compiler()
    return Emulator()
