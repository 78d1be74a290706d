"""State of a Mac from its tools, without sudo: power, pages, user input, other programs.

``pmset``, ``vm_stat``, ``ioreg``, ``tmutil`` and ``ps`` take tens of milliseconds, so the parent
process runs them before and after a run.
"""

from __future__ import annotations

import ctypes
import os
import re
from typing import Any

from labkit.machine.facts.best_effort import collect, command_output

SPOTLIGHT_PROCESSES = ("mds", "mds_stores", "mdworker", "mdworker_shared")
SPOTLIGHT_BUSY_PCT = 5.0  # from this CPU percentage on, Spotlight is assumed to be indexing
MAX_TOP_PROCESSES = 3
# Names of the levels of OSThermalNotification, by level from 0.
PRESSURE_LEVELS = ("nominal", "moderate", "heavy", "trapping", "sleeping")


def surroundings() -> dict[str, Any]:
    """Return the ``surroundings`` of :mod:`labkit.machine.facts.machine_snapshot`."""
    run = command_output
    return collect(
        {
            "power": power,
            "vm": lambda: parse_vm_stat(run("vm_stat")),
            "hid_idle_s": lambda: _hid_idle_s(run("ioreg", "-c", "IOHIDSystem", "-d", "4")),
            # The active ones; None if there is none.
            "displays": lambda: (
                run("ioreg", "-r", "-c", "IOMobileFramebuffer").count('"DisplayAttributes"') or None
            ),
            "background": lambda: {
                "time_machine": bool(re.search(r"Running\s*=\s*1\s*;", run("tmutil", "status"))),
                "spotlight": _spotlight(run("ps", "-Aceo", "pcpu=,comm=")),
            },
            "top_foreign": lambda: _top_foreign(
                run("ps", "-Aceo", "pid=,pcpu=,comm="), _own_pids()
            ),
            "thermal_pressure": thermal_pressure,
        }
    )


def power() -> dict[str, Any] | None:
    """Return the state of the power supply from ``pmset``, or None if ``pmset`` fails.

    ``source``: AC or battery. ``settings``: those in use. ``custom``: the settings for each source.
    ``limits``: limits of the CPU because of heat.
    """
    fields = collect(
        {
            "source": lambda: power_source(command_output("pmset", "-g", "batt")),
            "settings": lambda: parse_pairs(command_output("pmset", "-g")),
            "custom": lambda: parse_sections(command_output("pmset", "-g", "custom")),
            "limits": lambda: parse_pairs(command_output("pmset", "-g", "therm")),
        }
    )
    return fields or None


def power_source(text: str) -> str | None:
    """Parse ``AC Power`` or ``Battery Power`` from ``pmset -g batt``."""
    match = re.search(r"drawing from '([^']+)'", text)
    return match[1] if match else None


def parse_pairs(text: str) -> dict[str, str]:
    """Parse lines like ``name 1`` or ``name = 1``; lines without an integer are ignored."""
    matches = re.findall(r"^\s*([A-Za-z_]+)\s+(?:=\s*)?(-?\d+)\b", text, re.MULTILINE)
    return dict(matches)


def parse_sections(text: str) -> dict[str, dict[str, str]]:
    """Parse the settings by power source from ``pmset -g custom``."""
    parts = re.split(r"^(\S[^\n]*):[ \t]*$", text, flags=re.MULTILINE)
    return {name: parse_pairs(body) for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def parse_vm_stat(text: str) -> dict[str, int]:
    """Parse the page size (bytes), current pages, and events since boot from ``vm_stat``."""
    size = re.search(r"page size of (\d+) bytes", text)
    counts = re.findall(r'^"?([A-Z][\w -]+)"?:\s+(\d+)\.$', text, re.MULTILINE)
    named = {name.lower().replace(" ", "_").replace("-", "_"): int(n) for name, n in counts}
    return {**({"page_bytes": int(size[1])} if size else {}), **named}


def _hid_idle_s(text: str) -> float | None:
    """Parse the seconds since the last key or pointer event from ``ioreg -c IOHIDSystem``."""
    match = re.search(r'"HIDIdleTime"\s*=\s*(\d+)', text)
    return round(int(match[1]) / 1e9, 1) if match else None


def _spotlight(text: str) -> bool:
    """Return whether Spotlight seems to be indexing, by its CPU use in ``ps -o pcpu=,comm=``."""
    lines = (line.split(None, 1) for line in text.splitlines())
    cpu_pct = sum(
        float(w[0].replace(",", ".")) for w in lines if len(w) == 2 and w[1] in SPOTLIGHT_PROCESSES
    )
    return cpu_pct >= SPOTLIGHT_BUSY_PCT


def _top_foreign(text: str, own_pids: frozenset[int]) -> list[dict[str, Any]]:
    """Parse the busiest processes except ``own_pids`` from ``ps -o pid=,pcpu=,comm=``."""
    foreign: list[tuple[float, str]] = []
    for line in text.splitlines():
        words = line.split(None, 2)
        if len(words) == 3 and int(words[0]) not in own_pids:
            foreign.append((float(words[1].replace(",", ".")), words[2]))
    busiest = sorted(foreign, reverse=True)[:MAX_TOP_PROCESSES]
    return [{"name": name, "cpu_pct": percent} for percent, name in busiest if percent > 0]


def _own_pids() -> frozenset[int]:
    import psutil

    me = psutil.Process()
    return frozenset([me.pid, os.getppid(), *(p.pid for p in me.children(recursive=True))])


def thermal_pressure() -> str:
    """Return the system's thermal pressure level, which changes earlier than ``thermalState``."""
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
