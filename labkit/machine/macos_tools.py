"""What macOS's tools tell without sudo: power, pages, who sits at it, what else goes on.

``pmset``, ``parse_vm_stat``, ``ioreg``, ``tmutil`` and ``ps`` take some tens of milliseconds; the
parent asks them before and after a run.
"""

from __future__ import annotations

import ctypes
import os
import re
from typing import Any

from labkit.machine.best_effort import collect, command_output

SPOTLIGHT_PROCESSES = ("mds", "mds_stores", "mdworker", "mdworker_shared")
SPOTLIGHT_BUSY_PCT = 5.0  # CPU percent from which an indexing process is at work
MAX_TOP_PROCESSES = 3
# OSThermalNotification: nominal, moderate, heavy, trapping, sleeping
PRESSURE_LEVELS = ("nominal", "moderate", "heavy", "trapping", "sleeping")


def surroundings() -> dict[str, Any]:
    """Return power, pages, seconds without input, displays, what is at work, the busiest."""
    return collect(
        {
            "power": power,
            "vm": lambda: parse_vm_stat(command_output("vm_stat")),
            "hid_idle_s": lambda: hid_idle_s(
                command_output("ioreg", "-c", "IOHIDSystem", "-d", "4")
            ),
            "displays": lambda: displays(
                command_output("ioreg", "-r", "-c", "IOMobileFramebuffer")
            ),
            "background": lambda: {
                "time_machine": time_machine(command_output("tmutil", "status")),
                "spotlight": spotlight(command_output("ps", "-Aceo", "pcpu=,comm=")),
            },
            "top_foreign": lambda: top_foreign(
                command_output("ps", "-Aceo", "pid=,pcpu=,comm="), _own_pids()
            ),
            "thermal_pressure": thermal_pressure,
        }
    )


def power() -> dict[str, Any] | None:
    """Return what ``pmset`` says: source and battery, settings, custom modes, limits."""
    found = collect(
        {
            "source": lambda: power_source(command_output("pmset", "-g", "batt")),
            "settings": lambda: parse_pairs(command_output("pmset", "-g")),
            "custom": lambda: parse_sections(command_output("pmset", "-g", "custom")),
            "limits": lambda: parse_pairs(command_output("pmset", "-g", "therm")),
        }
    )
    return found or None


def power_source(text: str) -> str | None:
    """Read ``AC Power`` or ``Battery Power`` from ``pmset -g batt``."""
    match = re.search(r"drawing from '([^']+)'", text)
    return match[1] if match else None


def parse_pairs(text: str) -> dict[str, str]:
    """Read lines ``name value`` or ``name = value`` whose value is a number."""
    found = re.findall(r"^\s*([A-Za-z_]+)\s+(?:=\s*)?(-?\d+)\b", text, re.MULTILINE)
    return dict(found)


def parse_sections(text: str) -> dict[str, dict[str, str]]:
    """Read ``pmset -g custom``: the settings on battery, on AC power, ..."""
    parts = re.split(r"^(\S[^\n]*):[ \t]*$", text, flags=re.MULTILINE)
    return {name: parse_pairs(body) for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def parse_vm_stat(text: str) -> dict[str, int]:
    """Read ``parse_vm_stat``: the page size in bytes, pages now and events since boot."""
    size = re.search(r"page size of (\d+) bytes", text)
    counts = re.findall(r'^"?([A-Z][\w -]+)"?:\s+(\d+)\.$', text, re.MULTILINE)
    named = {name.lower().replace(" ", "_").replace("-", "_"): int(n) for name, n in counts}
    return {**({"page_bytes": int(size[1])} if size else {}), **named}


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
    used = sum(
        float(w[0].replace(",", ".")) for w in lines if len(w) == 2 and w[1] in SPOTLIGHT_PROCESSES
    )
    return used >= SPOTLIGHT_BUSY_PCT


def top_foreign(text: str, ours: frozenset[int]) -> list[dict[str, Any]]:
    """Return the busiest processes that are not ours from ``ps -o pid=,pcpu=,comm=``."""
    found: list[tuple[float, str]] = []
    for line in text.splitlines():
        words = line.split(None, 2)
        if len(words) == 3 and int(words[0]) not in ours:
            found.append((float(words[1].replace(",", ".")), words[2]))
    busiest = sorted(found, reverse=True)[:MAX_TOP_PROCESSES]
    return [{"name": name, "cpu_pct": percent} for percent, name in busiest if percent > 0]


def _own_pids() -> frozenset[int]:
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
