"""What macOS tells about the machine without sudo: ``sysctl``, NSProcessInfo and tools.

``state()``, taken by workers and once a second by the observer, goes through the C library
and the Objective-C runtime and starts no process; ``surroundings()`` asks the tools.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from labkit.machine import macos_tools
from labkit.machine.readers import collect
from labkit.machine.tool import output

FACT_NUMBERS = {
    "iogpu_wired_limit_mb": "iogpu.wired_limit_mb",
    "performance_cores": "hw.perflevel0.logicalcpu",
    "efficiency_cores": "hw.perflevel1.logicalcpu",
    "page_bytes": "hw.pagesize",
}
THERMAL_STATES = ("nominal", "fair", "serious", "critical")


def facts() -> dict[str, Any]:
    """Return the chip, the memory, the OS build and the limits."""
    return collect(
        {
            "cpu_model": lambda: _sysctl_text("machdep.cpu.brand_string"),
            "memory_bytes": lambda: _sysctl_number("hw.memsize"),
            "accelerator": lambda: f"{_sysctl_text('machdep.cpu.brand_string')} GPU",
            "os_build": lambda: _sysctl_text("kern.osversion"),
            "model": lambda: _sysctl_text("hw.model"),
            "settings": lambda: collect({name: _reader(key) for name, key in FACT_NUMBERS.items()}),
        }
    )


def surroundings() -> dict[str, Any]:
    """Return the power's source, mode and limits, the pages, and what else goes on."""
    pages = collect({"power": power, "vm": lambda: vm_stat(output("vm_stat"))})
    return {**pages, **macos_tools.state()}


def power() -> dict[str, Any] | None:
    """Return what ``pmset`` says: source and battery, settings, custom modes, limits."""
    found = collect(
        {
            "source": lambda: power_source(output("pmset", "-g", "batt")),
            "settings": lambda: pairs(output("pmset", "-g")),
            "custom": lambda: sections(output("pmset", "-g", "custom")),
            "limits": lambda: pairs(output("pmset", "-g", "therm")),
        }
    )
    return found or None


def power_source(text: str) -> str | None:
    """Read ``AC Power`` or ``Battery Power`` from ``pmset -g batt``."""
    match = re.search(r"drawing from '([^']+)'", text)
    return match[1] if match else None


def pairs(text: str) -> dict[str, str]:
    """Read lines ``name value`` or ``name = value`` whose value is a number."""
    found = re.findall(r"^\s*([A-Za-z_]+)\s+(?:=\s*)?(-?\d+)\b", text, re.MULTILINE)
    return dict(found)


def sections(text: str) -> dict[str, dict[str, str]]:
    """Read ``pmset -g custom``: the settings on battery, on AC power, ..."""
    parts = re.split(r"^(\S[^\n]*):[ \t]*$", text, flags=re.MULTILINE)
    return {name: pairs(body) for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def vm_stat(text: str) -> dict[str, int]:
    """Read ``vm_stat``: the page size in bytes, pages now and events since boot."""
    size = re.search(r"page size of (\d+) bytes", text)
    counts = re.findall(r'^"?([A-Z][\w -]+)"?:\s+(\d+)\.$', text, re.MULTILINE)
    named = {name.lower().replace(" ", "_").replace("-", "_"): int(n) for name, n in counts}
    return {**({"page_bytes": int(size[1])} if size else {}), **named}


def state() -> dict[str, Any]:
    """Return load, memory pressure, swap and the thermal state now."""
    return collect(
        {
            "uptime_s": lambda: round(time.time() - _boot_time(), 1),
            "loadavg": lambda: list(os.getloadavg()),
            "swap": _swap,
            "compressed_bytes": _reader("vm.compressor_bytes_used"),
            "pressure": lambda: {
                "memory": {"level": _sysctl_number("kern.memorystatus_vm_pressure_level")}
            },
            "thermal": lambda: THERMAL_STATES[_process_info("thermalState")],
            "low_power_mode": lambda: bool(_process_info("isLowPowerModeEnabled") & 1),
        }
    )


def _reader(key: str) -> Callable[[], int]:
    return lambda: _sysctl_number(key)


def _sysctl(name: str) -> bytes:
    if sys.platform != "darwin":
        raise OSError("sysctl by name is macOS's")
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


def _boot_time() -> float:
    return float(struct.unpack("<q", _sysctl("kern.boottime")[:8])[0])


def _swap() -> dict[str, int]:
    # struct xsw_usage: total, available, used (uint64 each), then flags
    _, _, used = struct.unpack("<QQQ", _sysctl("vm.swapusage")[:24])
    return {"used_bytes": used}


def _process_info(selector: str) -> int:
    """Ask ``NSProcessInfo.processInfo`` for an integer property."""
    objc = ctypes.CDLL("/usr/lib/libobjc.dylib")
    ctypes.CDLL("/System/Library/Frameworks/Foundation.framework/Foundation")
    objc.objc_getClass.restype = ctypes.c_void_p
    objc.sel_registerName.restype = ctypes.c_void_p
    send = ctypes.cast(objc.objc_msgSend, ctypes.c_void_p).value
    assert send is not None
    pointer = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(send)
    number = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)(send)
    info = pointer(objc.objc_getClass(b"NSProcessInfo"), objc.sel_registerName(b"processInfo"))
    return int(number(info, objc.sel_registerName(selector.encode())))
