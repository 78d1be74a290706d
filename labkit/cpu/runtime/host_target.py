"""The CPU that numba compiles for.

LLVM (22) does not find the dot product of ARM's CPUs on Linux: the word ``asimddp`` is not among
those that it knows. Without it no kernel could use ``sdot``, so Linux itself is asked.
"""

from __future__ import annotations

import ctypes
import platform
import sys

import numba
from numba.core.codegen import get_host_cpu_features
from numba.core.registry import cpu_target

_HARDWARE_FEATURES = 16  # AT_HWCAP of Linux
_DOT_PRODUCT = 1 << 20  # HWCAP_ASIMDDP


def install() -> None:
    """Make numba use the dot product, if the CPU has it. Call this before numba compiles."""
    if numba.config.CPU_FEATURES is None and _linux_reports_dot_product():
        numba.config.CPU_FEATURES = ",".join(filter(None, [get_host_cpu_features(), "+dotprod"]))


def host_target() -> tuple[str, str, str]:
    """Return LLVM's triple, name and features of the CPU, e.g. ``+avx2,+fma``."""
    install()
    triple, cpu, features = cpu_target.target_context.codegen().magic_tuple()
    return triple, cpu, features


def _linux_reports_dot_product() -> bool:
    if (sys.platform, platform.machine()) != ("linux", "aarch64"):
        return False
    read = ctypes.CDLL(None).getauxval
    read.argtypes, read.restype = [ctypes.c_ulong], ctypes.c_ulong
    return bool(read(_HARDWARE_FEATURES) & _DOT_PRODUCT)
