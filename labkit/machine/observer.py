"""The observer: once a second, from the parent, what the machine did during a run.

Its own cost (all CPU time that the parent used during the run) is measured and recorded.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from labkit.machine import linux, macos, macos_tools, memory
from labkit.machine.readers import Readers, collect

MAX_SAMPLES = 3600
SYSTEM = linux if sys.platform == "linux" else macos_tools


class Observer:
    """Samples one run; make it right before the run starts."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._cpu = time.process_time()
        self._last = self._cpu_times(None)
        self._samples: list[dict[str, Any]] = []

    def sample(self, pid: int) -> None:
        """Look at the machine and at the worker ``pid``."""
        if len(self._samples) >= MAX_SAMPLES:
            return
        readers: Readers = {
            "t_s": lambda: round(time.monotonic() - self._start, 2),
            "rss_bytes": lambda: SYSTEM.process_rss_bytes(pid),
            "swap_bytes": lambda: memory.process(pid).swapped,
            "foreign_cores": lambda: self._foreign(pid),
        }
        if sys.platform == "linux":
            readers = {
                **readers,
                "mhz": linux.mhz,
                "available_bytes": lambda: linux.meminfo()["MemAvailable"],
            }
        else:
            state = macos.state()
            readers = {
                **readers,
                "load": lambda: state["loadavg"][0],
                "memory_pressure_level": lambda: state["pressure"]["memory"]["level"],
                "thermal_level": lambda: macos.THERMAL_STATES.index(state["thermal"]),
            }
        self._samples.append(collect(readers))

    def _foreign(self, pid: int) -> float | None:
        """Return the cores that were busy with neither the worker nor this process."""
        last, self._last = self._last, self._cpu_times(pid)
        if last is None or self._last is None:
            return None
        seconds, busy, own = (now - before for now, before in zip(self._last, last, strict=True))
        return round(max(0.0, busy - own) / seconds, 3) if seconds > 0 else None

    @staticmethod
    def _cpu_times(pid: int | None) -> tuple[float, float, float] | None:
        """Return the clock, all cores' busy seconds, and those of the worker and this process."""
        try:
            busy = SYSTEM.busy_s()
        except (OSError, LookupError, ValueError):
            return None
        worker = 0.0 if pid is None else SYSTEM.process_cpu_s(pid)
        return time.monotonic(), busy, worker + time.process_time()

    def report(self) -> dict[str, Any]:
        """Return the samples by column, and what observing cost.

        ``cpu_s`` are CPU seconds of the parent, ``share`` is their share of one core.
        """
        wall, cpu = time.monotonic() - self._start, time.process_time() - self._cpu
        columns = sorted({name for sample in self._samples for name in sample})
        return {
            "period_s": 1.0,
            "cpu_s": round(cpu, 4),
            "share": round(cpu / wall, 5) if wall > 0 else 0.0,
            "samples": {name: [s.get(name) for s in self._samples] for name in columns},
        }
