"""Memory over a run's time, and when each request was admitted, sampled between engine steps.

A sample takes about 0.1 ms, most of it to read the size of this process. Every arm is sampled at
most five times a second. The record holds the time that all samples took.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from labkit.engine.engine_protocol import InferenceEngine, Observable, StaticBatching
from labkit.machine.facts.operating_system_protocol import operating_system
from labkit.workload.requests.serving_metrics import ServedRequest

PERIOD_S = 0.2
MAX_SAMPLES = 1024  # when reached, every second sample is dropped and the period doubles

Sample = Mapping[str, float]


class MemoryTimeline:
    """Samples of an engine's memory during a run.

    ``engine``: if it is ``Observable``, KV bytes and admissions are sampled. ``read``: returns this
    process's memory in bytes, by name.
    """

    def __init__(self, engine: InferenceEngine, read: Callable[[], Sample] | None = None) -> None:
        self._engine = engine if isinstance(engine, Observable) else None
        self._static = engine if isinstance(engine, StaticBatching) else None
        self._entries: dict[str, ServedRequest] = {}
        self._read = _process_memory if read is None else read
        self._waiting: list[ServedRequest] = []
        self._samples: list[dict[str, float]] = []
        self._start: float | None = None
        self._period, self._due = PERIOD_S, 0.0
        self._cost = 0.0

    def submitted(self, entry: ServedRequest) -> None:
        if self._start is None:
            self._start = self._due = entry.submitted
        self._waiting.append(entry)
        self._entries[entry.request_id] = entry

    def stepped(self, start: float, end: float) -> None:
        """After a step, note admissions, and take a sample if one is due.

        ``start``, ``end``: the step's times in seconds on the load generator's clock.
        """
        if self._static is not None:
            for request_id in self._static.lingering_requests():
                self._entries[request_id].stayed_steps += 1
        if not self._waiting and end < self._due:
            return
        sampling = time.perf_counter()
        if self._engine is not None and self._waiting:
            self._note_admissions(start)
        if end >= self._due:
            self._sample(end)
        self._cost += time.perf_counter() - sampling

    def _note_admissions(self, start: float) -> None:
        """Set ``admitted`` to ``start`` for waiting requests that now run or have a token."""
        assert self._engine is not None
        waiting = []
        for entry in self._waiting:
            if entry.chunk_times or self._engine.is_running(entry.request_id):
                entry.admitted = start
            elif entry.finish is None:
                waiting.append(entry)
        self._waiting = waiting

    def _sample(self, now: float) -> None:
        assert self._start is not None
        sample = {"t_s": round(now - self._start, 3)}
        if self._engine is not None:
            kv = self._engine.kv_bytes()
            sample |= {"kv_used_bytes": kv.used, "kv_reserved_bytes": kv.reserved}
        sample |= self._read()
        self._samples.append(sample)
        if len(self._samples) >= MAX_SAMPLES:
            self._samples = self._samples[::2]
            self._period *= 2
        self._due = now + self._period

    def report(self) -> dict[str, Any]:
        columns = list(dict.fromkeys(name for sample in self._samples for name in sample))
        return {
            "period_s": self._period,
            "cost_s": round(self._cost, 6),
            **{name: [sample.get(name) for sample in self._samples] for name in columns},
        }


def _process_memory() -> dict[str, float]:
    """Return bytes of this process, of MLX, and of the system's compressor for all processes."""
    system = operating_system()
    sample: dict[str, float] = {**system.process_memory(), **system.compressed_memory()}
    mx = sys.modules.get("mlx.core")
    if mx is not None:
        sample["mlx_active_bytes"] = mx.get_active_memory()
        sample["mlx_cache_bytes"] = mx.get_cache_memory()
        sample["mlx_peak_bytes"] = mx.get_peak_memory()
    return sample
