"""The emulator's exceptions. Their messages are a single line."""

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
