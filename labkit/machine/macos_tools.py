"""What else goes on on a Mac: whoever sits at it, backups, indexing, other processes.

All of it without sudo. ``state()`` asks ``ioreg``, ``tmutil`` and ``ps`` (some tens of
milliseconds); the readers for the observer go through psutil and start no process.
"""

from __future__ import annotations

import ctypes
import os
import re
from typing import Any

from labkit.machine.readers import collect
from labkit.machine.tool import output

SPOTLIGHT = ("mds", "mds_stores", "mdworker", "mdworker_shared")
BUSY_PCT = 5.0  # CPU percent from which an indexing process is at work
TOP = 3
# OSThermalNotification: nominal, moderate, heavy, trapping, sleeping
PRESSURE_LEVELS = ("nominal", "moderate", "heavy", "trapping", "sleeping")


def state() -> dict[str, Any]:
    """Return seconds without input, backup and indexing at work, displays, busiest processes."""
    return collect(
        {
            "hid_idle_s": lambda: hid_idle_s(output("ioreg", "-c", "IOHIDSystem", "-d", "4")),
            "displays": lambda: displays(output("ioreg", "-r", "-c", "IOMobileFramebuffer")),
            "background": lambda: {
                "time_machine": time_machine(output("tmutil", "status")),
                "spotlight": spotlight(output("ps", "-Aceo", "pcpu=,comm=")),
            },
            "top_foreign": lambda: top_foreign(output("ps", "-Aceo", "pid=,pcpu=,comm="), _ours()),
            "thermal_pressure": thermal_pressure,
        }
    )


def hid_idle_s(text: str) -> float | None:
    """Read the seconds since the last key or pointer event from ``ioreg -c IOHIDSystem``."""
    match = re.search(r'"HIDIdleTime"\s*=\s*(\d+)', text)
    return round(int(match[1]) / 1e9, 1) if match else None


def displays(text: str) -> int | None:
    """Count the displays that are driven, from ``ioreg -r -c IOMobileFramebuffer``."""
    return text.count('"DisplayAttributes"') or None


def time_machine(text: str) -> bool:
    """Tell from ``tmutil status`` whether a backup runs."""
    return bool(re.search(r"Running\s*=\s*1\s*;", text))


def spotlight(text: str) -> bool:
    """Tell from ``ps -o pcpu=,comm=`` whether the search index is being built."""
    lines = (line.split(None, 1) for line in text.splitlines())
    used = sum(float(w[0].replace(",", ".")) for w in lines if len(w) == 2 and w[1] in SPOTLIGHT)
    return used >= BUSY_PCT


def top_foreign(text: str, ours: frozenset[int]) -> list[dict[str, Any]]:
    """Return the busiest processes that are not ours from ``ps -o pid=,pcpu=,comm=``."""
    found: list[tuple[float, str]] = []
    for line in text.splitlines():
        words = line.split(None, 2)
        if len(words) == 3 and int(words[0]) not in ours:
            found.append((float(words[1].replace(",", ".")), words[2]))
    busiest = sorted(found, reverse=True)[:TOP]
    return [{"name": name, "cpu_pct": percent} for percent, name in busiest if percent > 0]


def _ours() -> frozenset[int]:
    import psutil

    me = psutil.Process()
    return frozenset([me.pid, os.getppid(), *(p.pid for p in me.children(recursive=True))])


def thermal_pressure() -> str:
    """Return the system's thermal pressure, which reacts before ``thermalState`` does."""
    library = ctypes.CDLL("/usr/lib/libSystem.dylib")
    token, level = ctypes.c_int(), ctypes.c_uint64()
    name = b"com.apple.system.thermalpressurelevel"
    if library.notify_register_check(name, ctypes.byref(token)) != 0:
        raise OSError("notify_register_check failed")
    try:
        if library.notify_get_state(token, ctypes.byref(level)) != 0:
            raise OSError("notify_get_state failed")
    finally:
        library.notify_cancel(token)
    return PRESSURE_LEVELS[level.value]


def busy_s() -> float:
    """Return the CPU seconds that all cores have been busy since boot."""
    import psutil

    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def process_cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used (0.0 when it is gone)."""
    import psutil

    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def process_rss_bytes(pid: int) -> int | None:
    """Return the resident size of a process, or None when it is gone."""
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None
