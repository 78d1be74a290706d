"""Facts about a Mac, read without sudo from ``sysctl``, NSProcessInfo, Metal and psutil.

The facts are read through the C library and the Objective-C runtime, without starting a process.
Only ``surroundings()`` runs tools (:mod:`labkit.machine.facts.macos_tools`).
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from labkit.machine.facts.best_effort import collect
from labkit.machine.facts.macos_tools import surroundings as surroundings

SETTING_SYSCTLS = {
    "iogpu_wired_limit_mb": "iogpu.wired_limit_mb",
    "performance_cores": "hw.perflevel0.logicalcpu",
    "efficiency_cores": "hw.perflevel1.logicalcpu",
    "page_bytes": "hw.pagesize",
}
THERMAL_STATES = ("nominal", "fair", "serious", "critical")


def has_metal() -> bool:
    """Return whether this is Apple silicon under macOS."""
    return sys.platform == "darwin" and platform.machine() == "arm64"


def facts() -> dict[str, Any]:
    """Return the chip, the memory, the OS build and the settings in ``SETTING_SYSCTLS``."""
    return collect(
        {
            "cpu_model": lambda: _sysctl_text("machdep.cpu.brand_string"),
            "memory_bytes": lambda: _sysctl_number("hw.memsize"),
            "accelerator": lambda: f"{_sysctl_text('machdep.cpu.brand_string')} GPU",
            "os_build": lambda: _sysctl_text("kern.osversion"),
            "model": lambda: _sysctl_text("hw.model"),
            "settings": lambda: collect(
                {name: partial(_sysctl_number, key) for name, key in SETTING_SYSCTLS.items()}
            ),
        }
    )


def state() -> dict[str, Any]:
    """Return the current load, memory pressure, swap and thermal state."""
    return collect(
        {
            "uptime_s": lambda: round(
                time.time() - struct.unpack("<q", _sysctl("kern.boottime")[:8])[0], 1
            ),
            "loadavg": lambda: list(os.getloadavg()),
            "swap": _swap,
            "compressed_bytes": partial(_sysctl_number, "vm.compressor_bytes_used"),
            "pressure": lambda: {
                "memory": {"level": _sysctl_number("kern.memorystatus_vm_pressure_level")}
            },
            "thermal": lambda: THERMAL_STATES[_process_info("thermalState")],
            "low_power_mode": lambda: bool(_process_info("isLowPowerModeEnabled") & 1),
        }
    )


def sample() -> dict[str, Any]:
    """Return the load average over a minute, and the levels of memory pressure and temperature."""
    current = state()
    return collect(
        {
            "load": lambda: current["loadavg"][0],
            "memory_pressure_level": lambda: current["pressure"]["memory"]["level"],
            "thermal_level": lambda: THERMAL_STATES.index(current["thermal"]),
        }
    )


# --------------------------------------------------------------------------- sysctl


def sysctl(name: str) -> int | None:
    """Return the value of a numeric sysctl, or None where the kernel does not have it."""
    try:
        return _sysctl_number(name)
    except OSError:
        return None


def _sysctl(name: str) -> bytes:
    if sys.platform != "darwin":
        raise OSError("sysctlbyname exists on macOS only")
    library = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_size_t(0)
    if library.sysctlbyname(name.encode(), None, ctypes.byref(size), None, 0) != 0:
        raise OSError(ctypes.get_errno(), name)
    buffer = ctypes.create_string_buffer(size.value)
    if library.sysctlbyname(name.encode(), buffer, ctypes.byref(size), None, 0) != 0:
        raise OSError(ctypes.get_errno(), name)
    return buffer.raw[: size.value]


def _sysctl_text(name: str) -> str:
    return _sysctl(name).split(b"\0", 1)[0].decode()


def _sysctl_number(name: str) -> int:
    return int.from_bytes(_sysctl(name), "little")


def _swap() -> dict[str, int]:
    # struct xsw_usage: total, available, used (uint64 each), then flags
    _, _, used = struct.unpack("<QQQ", _sysctl("vm.swapusage")[:24])
    return {"used_bytes": used}


def hardware_uuid() -> str | None:
    """Return the id of the Mac's hardware, or None if it is unknown, as on other systems."""
    if sys.platform != "darwin":
        return None
    uuid, second = (ctypes.c_ubyte * 16)(), (ctypes.c_long * 2)(1, 0)  # timespec: wait at most
    failed = ctypes.CDLL(None).gethostuuid(uuid, second)
    return None if failed else bytes(uuid).hex()


# --------------------------------------------------------------------------- the GPU's memory


@dataclass(frozen=True)
class WiredSettings:
    """The settings by which macOS limits and reclaims the GPU's wired memory.

    A field is None if this macOS does not report the setting.
    """

    limit_mb: int | None  # iogpu.wired_limit_mb (MiB; 0: the system's default)
    collector: bool | None  # whether it is on: iogpu.disable_wired_collector is 0
    dynamic_lwm: bool | None  # iogpu.dynamic_lwm, whether the low-water mark moves


def wired_settings(read: Callable[[str], int | None] = sysctl) -> WiredSettings:
    """Read the wired limit and the state of the wired collector."""
    disabled, dynamic = read("iogpu.disable_wired_collector"), read("iogpu.dynamic_lwm")
    return WiredSettings(
        limit_mb=read("iogpu.wired_limit_mb"),
        collector=None if disabled is None else not disabled,
        dynamic_lwm=None if dynamic is None else bool(dynamic),
    )


def recommended_working_set() -> int | None:
    """Return Metal's ``recommendedMaxWorkingSetSize`` (bytes), or None without Metal.

    The size is a static hint for one process. It ignores the memory of other programs.
    ``iogpu.wired_limit_mb`` changes the size.
    """
    if sys.platform != "darwin":
        return None
    with suppress(OSError):
        if device := _metal_device():
            size = _send_message(device, "recommendedMaxWorkingSetSize", ctypes.c_uint64)
            return int(size) or None
    return None


def threadgroup_limits() -> tuple[int, int]:
    """Return Metal's limits of a threadgroup: threads along x, and bytes of threadgroup memory.

    Raises ``ValueError`` if Metal has no device, and ``OSError`` outside macOS.
    """

    class Size(ctypes.Structure):
        _fields_ = [(axis, ctypes.c_ulong) for axis in ("width", "height", "depth")]

    device = _metal_device()
    if not device:
        raise ValueError("Metal has no device")
    threads = _send_message(device, "maxThreadsPerThreadgroup", Size).width
    return int(threads), int(_send_message(device, "maxThreadgroupMemoryLength", ctypes.c_ulong))


def _metal_device() -> int | None:
    # Without CoreGraphics, which MLX loads, a process has no default device.
    ctypes.CDLL("/System/Library/Frameworks/CoreGraphics.framework/CoreGraphics")
    metal = ctypes.CDLL("/System/Library/Frameworks/Metal.framework/Metal")
    metal.MTLCreateSystemDefaultDevice.restype = ctypes.c_void_p
    device: int | None = metal.MTLCreateSystemDefaultDevice()
    return device


def _process_info(selector: str) -> int:
    ctypes.CDLL("/System/Library/Frameworks/Foundation.framework/Foundation")
    objc = _objc()
    objc.objc_getClass.restype = ctypes.c_void_p
    info = _send_message(objc.objc_getClass(b"NSProcessInfo"), "processInfo", ctypes.c_void_p)
    return int(_send_message(info, selector, ctypes.c_long))


def _send_message(receiver: Any, selector: str, result_type: Any) -> Any:
    """Send an Objective-C message without arguments, and return the result as ``result_type``."""
    objc = _objc()
    objc.sel_registerName.restype = ctypes.c_void_p
    send = ctypes.cast(objc.objc_msgSend, ctypes.c_void_p).value
    assert send is not None
    message = ctypes.CFUNCTYPE(result_type, ctypes.c_void_p, ctypes.c_void_p)(send)
    return message(receiver, objc.sel_registerName(selector.encode()))


def _objc() -> ctypes.CDLL:
    return ctypes.CDLL("/usr/lib/libobjc.dylib")


# --------------------------------------------------------------------------- memory, processes


def memory() -> tuple[int, int]:
    """Return total and available memory in bytes."""
    import psutil

    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def process_memory(pid: int | None = None) -> dict[str, int]:
    """Return the resident bytes of a process (None: this one) and its descendants.

    Raises ``OSError`` if the process does not exist.
    """
    import psutil

    try:
        process = psutil.Process(pid)
        size = int(process.memory_info().rss)
        for child in process.children(recursive=True):
            with suppress(psutil.Error):  # the child has just ended
                size += int(child.memory_info().rss)
    except psutil.Error as error:
        raise OSError(str(error)) from None
    return {"rss_bytes": size}


def compressed_memory() -> dict[str, int]:
    """Return the RAM that the system's compressor occupies, as ``compressed_bytes``."""
    used = sysctl("vm.compressor_bytes_used")
    return {} if used is None else {"compressed_bytes": used}


def peak_rss() -> int:
    """Return this process's peak resident size in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def process_cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and its living descendants (0.0 if it has ended).

    The sum falls when a descendant ends.
    """
    import psutil

    try:
        process = psutil.Process(pid)
        times = [member.cpu_times() for member in (process, *process.children(recursive=True))]
    except psutil.Error:
        return 0.0
    return float(sum(cpu.user + cpu.system for cpu in times))


def busy_s() -> float:
    """Return the busy CPU seconds of all cores since boot."""
    import psutil

    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def stolen_s() -> None:
    """Return None: macOS does not report time stolen by a hypervisor."""
