"""Emulator of Metal kernels on the CPU: compiles the text that MLX generates as C++ and runs it.

The emulator tests logic. It detects races, accesses out of bounds, divergence, undefined
behaviour and wrong results. It cannot tell whether Metal compiles the text, how fast Metal runs it
or how Metal rounds, so its results are called *emulated*, never verified on Metal.

A kernel runs in a process of its own. Each thread is a fiber, and a simdgroup's fibers run in
lockstep. Buffers and threadgroup arrays end at guard pages and start as garbage, UBSan checks
every operation, and ``fast::`` functions reject infinities and NaN.
"""

from __future__ import annotations


class EmulatorUnavailable(ValueError):
    """The machine cannot emulate.

    It has no compiler, its MLX cannot export kernels, or its cache folder lets no program run.
    """


class KernelFault(RuntimeError):
    """The kernel did something that Metal does not allow, or two runs gave different outputs.

    ``kind``: ``bounds``, ``divergence``, ``simd``, ``fast-math``, ``undefined``, ``race``,
    ``launch``, ``crash``, ``timeout``, ``disagree``, ``compile``, ``memory`` or ``job``.
    ``detail``: the fault with its source line and thread.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"emulated kernel: {kind}: {detail}")
        self.kind = kind
        self.detail = detail
