"""Emulate a kernel call: capture its source, translate, compile and run it."""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx
import numpy as np

from labkit.metal.emulator.cpp_compilation import BuildKind, compile_kernel
from labkit.metal.emulator.cpp_translation import Buffer, translate
from labkit.metal.emulator.emulator_errors import KernelFault
from labkit.metal.emulator.kernel_process import DEFAULT_SCHEDULES, Schedule, run_kernel
from labkit.metal.emulator.source_capture import capture_kernel
from labkit.metal.kernel_call import KernelCall


@dataclasses.dataclass(frozen=True)
class Emulator:
    """Runs kernel calls on the CPU; an ``Executor`` like ``labkit.metal.kernel_call.on_metal``."""

    # The kernel runs once per schedule. The outputs of all runs must be equal bit for bit.
    schedules: tuple[Schedule, ...] = DEFAULT_SCHEDULES
    build_kind: BuildKind = BuildKind.use  # how kernels are compiled
    # Maximum CPU time of a run (seconds). A longer run counts as an endless loop.
    cpu_seconds: float = 600.0

    def __call__(self, call: KernelCall) -> list[mx.array]:
        """Return the outputs of ``call``.

        Raises ``EmulatorUnavailable`` if there is no compiler, this MLX cannot export kernels, or
        the cache folder lets no program run.
        Raises ``KernelFault`` if the kernel did something that Metal does not allow, or two
        schedules disagree.
        """
        mx.eval(call.operands())  # no graph reaches the processes that run the kernel
        captured = capture_kernel(call)
        translation = translate(captured)
        program = compile_kernel(translation, self.build_kind)
        inputs = [_input(call, buffer) for buffer in translation.buffers]
        written = iter([_size(shape, dtype) for _, shape, dtype in call.outputs])
        sizes = [next(written) if data is None else len(data) for data in inputs]
        runs = run_kernel(
            program, captured, inputs, sizes, self.schedules, cpu_seconds=self.cpu_seconds
        )
        for other in runs[1:]:
            _check_equal(call, runs[0], other)
        return [
            _from_bytes(data, shape, dtype)
            for data, (_, shape, dtype) in zip(runs[0], call.outputs, strict=True)
        ]


def _input(call: KernelCall, buffer: Buffer) -> bytes | None:
    """Return the input bytes bound to a buffer, or None if the buffer is an output."""
    if buffer.written:
        return None
    arrays = dict(call.inputs)
    if buffer.name in arrays:
        return _to_bytes(arrays[buffer.name])
    name, _, suffix = buffer.name.rpartition("_")
    if suffix == "shape" and name in arrays:
        return np.array(arrays[name].shape, np.int32).tobytes()
    raise KernelFault("compile", f"buffer {buffer.name} is not emulated")


def _to_bytes(array: mx.array) -> bytes:
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    return np.ascontiguousarray(np.asarray(array)).tobytes()


def _from_bytes(data: bytes, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    numpy_dtype: Any = np.uint16 if dtype == mx.bfloat16 else _NUMPY[dtype]
    array = mx.array(np.frombuffer(data, numpy_dtype).reshape(shape))
    return array.view(dtype) if dtype == mx.bfloat16 else array


_NUMPY = {mx.float32: np.float32, mx.float16: np.float16, mx.uint32: np.uint32, mx.int32: np.int32}


def _size(shape: tuple[int, ...], dtype: mx.Dtype) -> int:
    return int(np.prod(shape, dtype=np.int64)) * int(dtype.size)


def _check_equal(call: KernelCall, first: list[bytes], other: list[bytes]) -> None:
    """Raise ``KernelFault`` with the first differing element if the outputs of two runs differ."""
    for (name, shape, dtype), a, b in zip(call.outputs, first, other, strict=True):
        if a != b:
            x, y = np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)
            element = int(np.flatnonzero(x != y)[0]) // dtype.size
            index = tuple(int(i) for i in np.unravel_index(element, shape))
            raise KernelFault(
                "disagree",
                f"{name}{list(index)} depends on the schedule or on uninitialised memory",
            )
