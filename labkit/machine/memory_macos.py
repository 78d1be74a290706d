"""What macOS tells about memory: Metal's working set, pressure, and the wired collector.

Read through the C library and the Objective-C runtime; no process is started, nothing is
changed. ``Sysctl`` is a parameter so that the meaning of the numbers is tested anywhere.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass

Sysctl = Callable[[str], int | None]
PRESSURE = {1: "normal", 2: "warning", 4: "critical"}


@dataclass(frozen=True)
class Wired:
    """How macOS limits and reclaims the GPU's wired memory; None: it does not tell.

    ``limit_mb``: ``iogpu.wired_limit_mb`` (MiB; 0: the system's own default).
    ``collector``: False where ``iogpu.disable_wired_collector`` is 1.
    ``dynamic_lwm``: ``iogpu.dynamic_lwm``, whether the low-water mark moves.
    """

    limit_mb: int | None
    collector: bool | None
    dynamic_lwm: bool | None


@dataclass(frozen=True)
class Pressure:
    """The system's word for memory pressure, and the bytes the compressor holds."""

    level: str | None
    compressed: int | None


def sysctl(name: str) -> int | None:
    """Return a number of the kernel's, or None where it has none of that name."""
    if sys.platform != "darwin":
        return None
    library = ctypes.CDLL(None, use_errno=True)
    value, size = ctypes.c_uint64(0), ctypes.c_size_t(8)
    failed = library.sysctlbyname(
        name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)
    )
    return None if failed else int(value.value)


def wired(read: Sysctl = sysctl) -> Wired:
    """Read the wired limit and the state of the wired collector."""
    disabled = read("iogpu.disable_wired_collector")
    dynamic = read("iogpu.dynamic_lwm")
    return Wired(
        limit_mb=read("iogpu.wired_limit_mb"),
        collector=None if disabled is None else not disabled,
        dynamic_lwm=None if dynamic is None else bool(dynamic),
    )


def pressure(read: Sysctl = sysctl) -> Pressure:
    """Read the pressure level and the compressor's size."""
    level = read("kern.memorystatus_vm_pressure_level")
    return Pressure(
        level=None if level is None else PRESSURE.get(level, f"level {level}"),
        compressed=read("vm.compressor_bytes_used"),
    )


def recommended_working_set() -> int | None:
    """Return Metal's ``recommendedMaxWorkingSetSize`` (bytes), or None without Metal.

    It is a static hint of the operating system for one process; it does not see what
    other programs hold. ``iogpu.wired_limit_mb`` moves it.
    """
    if sys.platform != "darwin":
        return None
    try:
        objc = ctypes.CDLL("/usr/lib/libobjc.dylib")
        metal = ctypes.CDLL("/System/Library/Frameworks/Metal.framework/Metal")
    except OSError:
        return None
    metal.MTLCreateSystemDefaultDevice.restype = ctypes.c_void_p
    device = metal.MTLCreateSystemDefaultDevice()
    if not device:
        return None
    objc.sel_registerName.restype = ctypes.c_void_p
    address = ctypes.cast(objc.objc_msgSend, ctypes.c_void_p).value
    assert address is not None
    ask = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p)(address)
    return int(ask(device, objc.sel_registerName(b"recommendedMaxWorkingSetSize"))) or None
