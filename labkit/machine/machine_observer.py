"""The observer: once a second, from the parent, what the machine did during a run.

Its own cost (all CPU time that the parent used during the run) is measured and recorded.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from labkit.machine.best_effort import collect
from labkit.machine.operating_system import operating_system

MAX_SAMPLES = 3600


class MachineObserver:
    """Samples one run; make it right before the run starts."""

    def __init__(self) -> None:
        self._system = operating_system()
        self._start = time.monotonic()
        self._cpu = time.process_time()
        self._last = self._cpu_times(None)
        self._samples: list[dict[str, Any]] = []

    def sample(self, pid: int) -> None:
        """Look at the machine and at the worker ``pid``."""
        if len(self._samples) >= MAX_SAMPLES:
            return
        sample = {"t_s": round(time.monotonic() - self._start, 2), **self._system.sample()}
        with suppress(OSError):  # it has just ended
            sample |= self._system.process_memory(pid)
        self._samples.append(sample | collect({"foreign_cores": lambda: self._foreign(pid)}))

    def _foreign(self, pid: int) -> float | None:
        """Return the cores busy with neither the worker, its children nor this process."""
        last, self._last = self._last, self._cpu_times(pid)
        if last is None or self._last is None:
            return None
        seconds, busy, own = (now - before for now, before in zip(self._last, last, strict=True))
        return round(max(0.0, busy - own) / seconds, 3) if seconds > 0 else None

    def _cpu_times(self, pid: int | None) -> tuple[float, float, float] | None:
        """Return the clock, all cores' busy seconds, and those of the worker and this process."""
        try:
            busy = self._system.busy_s()
        except (OSError, LookupError, ValueError):
            return None
        worker = 0.0 if pid is None else self._system.process_cpu_s(pid)
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
