"""What can go wrong in the emulator, each in one line."""

from __future__ import annotations


class EmulatorUnavailable(ValueError):
    """The machine cannot emulate: no compiler, or an MLX that cannot be traced."""


class KernelFault(RuntimeError):
    """The kernel did something that Metal does not allow, or runs disagree.

    Parameters
    ----------
    kind
        ``bounds``, ``divergence``, ``simd``, ``fast-math``, ``undefined``, ``race``, ``launch``,
        ``crash``, ``timeout``, ``disagree``, ``compile``, ``memory`` or ``job``.
    detail
        What, where and by which thread.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"emulated kernel: {kind}: {detail}")
        self.kind = kind
        self.detail = detail
