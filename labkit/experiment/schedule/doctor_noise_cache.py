"""The doctor's noise measurements of this machine, kept in the user's cache for later plans.

There are two kinds. One is the variation of a matrix product and of a memory copy within one
process, which is smaller than the variation between processes. The other comes from pilot studies:
short processes with two equal arms, for each kind of workload.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from labkit import records
from labkit.machine import cache_entries
from labkit.machine.facts import machine_snapshot
from labkit.records import RecordError

FILE_NAME = "doctor.json"
PILOTS_VERSION = 1  # version of the data under the file's key ``sights``
MIN_PROCESSES = 3  # needed to estimate a standard deviation

# Attributes of PilotNoise by their keys in the file.
_FILE_KEYS = {
    "processes": "processes",
    "turns_sd": "interleaved_sd",
    "between_sd": "separate_sd",
    "turns_s": "interleaved_s",
    "alone_s": "separate_s",
}


@dataclass(frozen=True)
class PilotNoise:
    """Noise of one kind of workload, from a pilot study of two equal arms.

    Standard deviations are on a log scale (:func:`.power.between_run_sd`).
    """

    processes: int  # that were measured
    interleaved_sd: float  # of paired runs interleaved in one process
    separate_sd: float  # of runs in separate processes
    interleaved_s: float  # wall seconds of a process with both arms
    separate_s: float  # wall seconds of a process with one arm

    def __post_init__(self) -> None:
        deviations = (self.interleaved_sd, self.separate_sd)
        seconds = (self.interleaved_s, self.separate_s)
        if not all(map(math.isfinite, (*deviations, *seconds))):
            raise ValueError(f"{self}: every number must be finite")
        if self.processes < MIN_PROCESSES or min(deviations) < 0 or min(seconds) <= 0:
            raise ValueError(f"{self}: too few processes, or a number out of range")

    @property
    def degrees_of_freedom(self) -> int:
        """Degrees of freedom of the standard deviations: the number of processes minus 1."""
        return self.processes - 1

    @property
    def interleaved_pct(self) -> float | None:
        """The smallest effect (percent) that one minute of interleaved runs detects, or None."""
        return self._one_minute_pct(self.interleaved_sd, self.interleaved_s)

    @property
    def separate_pct(self) -> float | None:
        """The smallest effect (percent) that one minute of separate processes detects, or None."""
        return self._one_minute_pct(self.separate_sd, 2 * self.separate_s)  # a run of each arm

    def _one_minute_pct(self, sd: float, block_s: float) -> float | None:
        """Return the smallest effect that a minute detects; None if it has too few blocks."""
        # This loads SciPy, which the other attributes do not need.
        from labkit.analysis.statistics.power import one_minute_mde_pct

        return one_minute_mde_pct(sd, block_s, 1, self.degrees_of_freedom)


def save(
    machine: Mapping[str, Any], noise: Mapping[str, Any], pilots: Mapping[str, PilotNoise]
) -> None:
    """Write the doctor's measurements to the cache. If it is not writable, do nothing.

    ``machine``: its fingerprint. ``noise``: of ``labkit.doctor.measurement_worker``. ``pilots``: by
    kind of workload (``kernels``, ``requests``); unmeasured kinds are absent.
    """
    data = {
        "schema_version": records.SCHEMA_VERSION,
        "machine": {name: machine.get(name) for name in records.MACHINE_FIELDS},
        "cv_pct": max(float(noise["matmul_cv_pct"]), float(noise["bandwidth_cv_pct"])),
        "sights": {
            "version": PILOTS_VERSION,
            **{
                kind: {key: getattr(pilot, name) for key, name in _FILE_KEYS.items()}
                for kind, pilot in pilots.items()
            },
        },
    }
    with suppress(cache_entries.CacheError):
        cache_entries.write_file(cache_entries.root() / FILE_NAME, json.dumps(data).encode())


def load_noise_sd() -> float | None:
    """Return this machine's noise within a process (standard deviation, log scale), if cached."""
    try:
        return float(_load()["cv_pct"]) / 100
    except (LookupError, TypeError, ValueError):
        return None


def load_pilot_noise(kind: str) -> PilotNoise | None:
    """Return the noise that the doctor's pilot study of ``kind`` measured here, if it is cached."""
    try:
        pilots = _load()["sights"]
        if pilots["version"] != PILOTS_VERSION:
            return None
        return PilotNoise(**{_FILE_KEYS[key]: value for key, value in pilots[kind].items()})
    except (LookupError, TypeError, ValueError, AttributeError):
        return None


def _load() -> Mapping[str, Any]:
    """Return the cached measurements, or {} if they are unreadable or from another machine."""
    path = cache_entries.root() / FILE_NAME
    try:
        return _measured(path, path.stat().st_mtime_ns)
    except (OSError, RecordError, LookupError, TypeError, ValueError, AttributeError):
        return {}


@lru_cache(1)  # a plan asks several times for each of its cells
def _measured(path: Path, written_ns: int) -> Mapping[str, Any]:
    data = records.read_json(path)
    other = records.machine_difference(data["machine"], machine_snapshot.take())
    return data if other is None else {}
