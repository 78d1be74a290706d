"""Checks of a kernel launch's outputs: bit for bit those of the first launch, and no NaN."""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.config import count_text
from labkit.workload.kernels import kernel_cases
from labkit.workload.kernels.kernel_case_rounds import PreparedArm
from labkit.workload.kernels.launch_timing import TimedLaunch
from labkit.workload.measurement import InvalidOutput

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def check(prepared: PreparedArm, launch: TimedLaunch, launch_name: str) -> None:
    """Check that the outputs of a launch equal those of the arm's first launch bit for bit.

    The outputs of a chain are compared with the digests of the first chain. Raises
    ``InvalidOutput`` if an output differs or holds NaN.
    """
    out, expected = launch.outputs[0], prepared.expected.out
    where = f"{prepared.batch.size.case.name}: {launch_name}"
    if not equal_bits(out, expected):
        refuse_nan(out, where)
        bits = f"u{out.itemsize}"
        rows = np.flatnonzero((out.view(bits) != expected.view(bits)).any(axis=(1, 2)))
        raise InvalidOutput(
            f"{where}: the output differs from the first launch's in "
            f"{count_text(len(rows), 'row')}, first at token {rows[0]}"
        )
    for number, out in enumerate(launch.outputs[1:], 1):
        if digest(out) != prepared.chain_digests[number]:
            refuse_nan(out, where)
            raise InvalidOutput(
                f"{where}: the output of launch {number + 1} differs from that in the first chain"
            )


def equal_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Return whether two outputs have the same bits. ``memcmp`` is 1.5 times as fast as NumPy."""
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return a.nbytes == b.nbytes and _memcmp(a.ctypes.data, b.ctypes.data, a.nbytes) == 0


def digest(out: NDArray[Any]) -> bytes:
    """Return the SHA-256 of an output's bytes."""
    return hashlib.sha256(out.data).digest()


def refuse_nan(out: NDArray[Any], where: str) -> None:
    """Raise ``InvalidOutput`` if an output holds NaN, computed or left over from poisoning."""
    values = kernel_cases.as_float32(out)
    if np.isnan(values.min()):
        token, head, _ = np.argwhere(np.isnan(values))[0]
        raise InvalidOutput(f"{where}: the output has NaN, first at token {token}, head {head}")
