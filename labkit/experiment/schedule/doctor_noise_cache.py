"""The doctor's noise measurements of this machine, kept in the user's cache for later plans.

There are two kinds. One is the variation of a matrix product and of a memory copy within one
process, which is smaller than the variation between processes. The other comes from pilot studies:
short processes with two equal arms, for each kind of workload.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from labkit.machine import cache_dir
from labkit.machine.facts import fingerprint
from labkit.records import (
    MACHINE_FIELDS,
    SCHEMA_VERSION,
    RecordError,
    machine_difference,
    read_json,
)

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

    Parameters
    ----------
    processes
        The number of processes measured.
    interleaved_sd, separate_sd
        Standard deviation of a run (log scale): of paired runs interleaved in one process
        (``labkit.analysis.statistics.power.between_run_sd``), and of runs in separate processes.
    interleaved_s, separate_s
        Wall seconds of a process with both arms, and of a process with one arm.
    """

    processes: int
    interleaved_sd: float
    separate_sd: float
    interleaved_s: float
    separate_s: float

    def __post_init__(self) -> None:
        """Check the ranges."""
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
        """The smallest effect (percent) that one minute of interleaved runs detects.

        None if a minute has too few blocks.
        """
        from labkit.analysis.statistics.power import (
            one_minute_mde_pct,  # loads SciPy, which the other attributes do not need
        )

        return one_minute_mde_pct(
            self.interleaved_sd, self.interleaved_s, 1, self.degrees_of_freedom
        )

    @property
    def separate_pct(self) -> float | None:
        """The smallest effect (percent) that one minute of separate processes detects.

        None if a minute has too few blocks.
        """
        from labkit.analysis.statistics.power import one_minute_mde_pct

        block_s = 2 * self.separate_s  # a run of each arm
        return one_minute_mde_pct(self.separate_sd, block_s, 1, self.degrees_of_freedom)


def save(
    machine: Mapping[str, Any], noise: Mapping[str, Any], pilots: Mapping[str, PilotNoise]
) -> None:
    """Write the doctor's measurements to the cache. If it is not writable, do nothing.

    Parameters
    ----------
    machine
        The machine's fingerprint.
    noise
        The result of ``labkit.doctor.measurement_worker.noise``.
    pilots
        Pilot noise by kind of workload (``kernels``, ``requests``); unmeasured kinds are absent.
    """
    data = {
        "schema_version": SCHEMA_VERSION,
        "machine": {name: machine.get(name) for name in MACHINE_FIELDS},
        "cv_pct": max(float(noise["matmul_cv_pct"]), float(noise["bandwidth_cv_pct"])),
        "sights": {
            "version": PILOTS_VERSION,
            **{
                kind: {key: getattr(pilot, name) for key, name in _FILE_KEYS.items()}
                for kind, pilot in pilots.items()
            },
        },
    }
    try:
        cache_dir.write_file(cache_dir.root() / FILE_NAME, json.dumps(data).encode())
    except cache_dir.CacheError:
        return


def load_noise_sd() -> float | None:
    """Return this machine's noise within a process (standard deviation, log scale).

    Returns None if there is no valid measurement in the cache.
    """
    try:
        return float(_load()["cv_pct"]) / 100
    except (LookupError, TypeError, ValueError):
        return None


def load_pilot_noise(kind: str) -> PilotNoise | None:
    """Return the noise that the doctor's pilot study of ``kind`` measured on this machine.

    Returns None if there is no valid measurement in the cache.
    """
    try:
        pilots = _load()["sights"]
        if pilots["version"] != PILOTS_VERSION:
            return None
        return PilotNoise(**{_FILE_KEYS[key]: value for key, value in pilots[kind].items()})
    except (LookupError, TypeError, ValueError, AttributeError):
        return None


def _load() -> Mapping[str, Any]:
    """Return the cached measurements, or {} if they are unreadable or from another machine."""
    path = cache_dir.root() / FILE_NAME
    try:
        return _measured(path, path.stat().st_mtime_ns)
    except (OSError, RecordError, LookupError, TypeError, ValueError, AttributeError):
        return {}


@lru_cache(1)  # a plan asks several times for each of its cells
def _measured(path: Path, written_ns: int) -> Mapping[str, Any]:
    data = read_json(path)
    other = machine_difference(data["machine"], fingerprint.take())
    return data if other is None else {}
