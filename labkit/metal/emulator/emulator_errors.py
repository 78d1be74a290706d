"""The emulator's exceptions; their messages are one line."""

from __future__ import annotations


class EmulatorUnavailable(ValueError):
    """The machine cannot emulate: it has no compiler, or its MLX cannot export kernels."""


class KernelFault(RuntimeError):
    """The kernel did something that Metal does not allow, or runs disagree.

    Parameters
    ----------
    kind
        ``bounds``, ``divergence``, ``simd``, ``fast-math``, ``undefined``, ``race``, ``launch``,
        ``crash``, ``timeout``, ``disagree``, ``compile``, ``memory`` or ``job``.
    detail
        The fault, its place and the thread.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"emulated kernel: {kind}: {detail}")
        self.kind = kind
        self.detail = detail
