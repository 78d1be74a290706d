"""Samples of the machine, which the parent process takes once a second during a run.

The cost of observing (the parent's CPU time during the run) is measured and recorded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from labkit.machine.facts.best_effort import collect
from labkit.machine.facts.operating_system_protocol import operating_system

MAX_SAMPLES = 3600


class MachineObserver:
    """An observer of one run. Create it right before the run starts.

    ``servers``: the ids of processes that labkit did not start but that work for the run, with
    their descendants. None: there are some whose ids are unknown, so ``foreign_cores`` is not
    recorded.
    """

    def __init__(self, servers: Sequence[int] | None = ()) -> None:
        self._os = operating_system()
        self._servers = servers
        self._start = time.monotonic()
        self._start_cpu_s = time.process_time()
        # Of this process's descendants, even those that have ended: they are no part of the run.
        self._earlier_cpu_s = self._os.process_cpu_s(os.getpid()) - self._start_cpu_s
        self._last_times = self._cpu_times(None)
        self._samples: list[dict[str, Any]] = []

    def sample(self, pid: int) -> None:
        """Take one sample of the machine and of the worker process ``pid``.

        If several workers take turns, ``pid`` is this process, whose descendants they are.
        """
        if len(self._samples) >= MAX_SAMPLES:
            return
        sample = {"t_s": round(time.monotonic() - self._start, 2), **self._os.sample()}
        with suppress(OSError):  # the worker has just ended
            sample |= self._os.process_memory(pid)
        self._samples.append(sample | collect({"foreign_cores": lambda: self._foreign_cores(pid)}))

    def _foreign_cores(self, pid: int) -> float | None:
        """Return the mean number of cores that others kept busy since the last sample.

        Returns None if it is unknown, as when the CPU time of a process was lost with its end.
        """
        last, self._last_times = self._last_times, self._cpu_times(pid)
        if last is None or self._last_times is None:
            return None
        seconds, busy, own = (
            now - before for now, before in zip(self._last_times, last, strict=True)
        )
        return round(max(0.0, busy - own) / seconds, 3) if seconds > 0 and own >= 0 else None

    def _cpu_times(self, pid: int | None) -> tuple[float, float, float] | None:
        """Return three times in seconds: the clock, the busy time, and the CPU time of the run.

        The busy time is summed over all cores. The run's is that of the worker ``pid``, the
        servers, their descendants and this process. Returns None if the busy time cannot be read,
        or the servers are unknown.
        """
        if self._servers is None:
            return None
        try:
            busy = self._os.busy_s()
        except (OSError, LookupError, ValueError):
            return None
        now, own = time.monotonic(), 0.0 if pid is None else self._os.process_cpu_s(pid)
        own += -self._earlier_cpu_s if pid == os.getpid() else time.process_time()
        return now, busy, own + sum(map(self._os.process_cpu_s, self._servers))

    def report(self) -> dict[str, Any]:
        """Return the samples as columns (``samples``), and the cost of observing.

        ``cpu_s``: the parent's CPU seconds since the observer was created. ``share``: the fraction
        of one core that these seconds amount to.
        """
        wall, cpu = time.monotonic() - self._start, time.process_time() - self._start_cpu_s
        columns = sorted({name for sample in self._samples for name in sample})
        return {
            "period_s": 1.0,
            "cpu_s": round(cpu, 4),
            "share": round(cpu / wall, 5) if wall > 0 else 0.0,
            "samples": {name: [s.get(name) for s in self._samples] for name in columns},
        }
