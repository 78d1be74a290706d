"""What the doctor measured on this machine, kept for the next plan.

Its noise is the variation within one process, so runs in processes of their own vary more.
Its sights are short A/A processes of two kinds of workload.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labkit.machine import cache_dir, fingerprint
from labkit.records import (
    MACHINE_FIELDS,
    SCHEMA_VERSION,
    RecordError,
    machine_difference,
    read_json,
)

NAME = "doctor.json"
SIGHTS_VERSION = 1  # of the key ``sights``, which a labkit that does not know it ignores
FEWEST = 3  # processes that a standard deviation is estimated from
RUNS = 2  # of each arm in a block of separate processes


@dataclass(frozen=True)
class Sight:
    """What some short processes of two equal arms showed for one kind of workload.

    Parameters
    ----------
    processes
        How many there were.
    turns_sd, between_sd
        Standard deviation of a run (log scale): as it is paired in turns
        (``labkit.analysis.statistics.power.run_sd``), and from process to process.
    turns_s, alone_s
        Wall seconds of a process that holds both arms, and of one that would hold one.
    """

    processes: int
    turns_sd: float
    between_sd: float
    turns_s: float
    alone_s: float

    def __post_init__(self) -> None:
        """Check the ranges."""
        sds, seconds = (self.turns_sd, self.between_sd), (self.turns_s, self.alone_s)
        if not all(map(math.isfinite, (*sds, *seconds))):
            raise ValueError(f"{self}: not finite")
        if self.processes < FEWEST or min(sds) < 0 or min(seconds) <= 0:
            raise ValueError(f"{self}: too few processes, or a number below 0")

    @property
    def turns_pct(self) -> float | None:
        """The smallest effect (percent) that one minute of turns sees, or None."""
        from labkit.analysis.statistics.power import (
            one_minute_mde_pct,  # SciPy: not for who only reads the noise
        )

        return one_minute_mde_pct(self.turns_sd, self.turns_s, 1)

    @property
    def processes_pct(self) -> float | None:
        """The same for one minute of separate processes, in blocks of two runs of each arm."""
        from labkit.analysis.statistics.power import one_minute_mde_pct

        return one_minute_mde_pct(self.between_sd, 2 * RUNS * self.alone_s, RUNS)


def keep(machine: Mapping[str, Any], noise: Mapping[str, Any], sights: Mapping[str, Sight]) -> None:
    """Keep what the doctor measured; where the cache can't be written, it is not kept.

    ``machine``: the fingerprint. ``noise``: as ``labkit.doctor.measurement_worker.noise`` gives it.
    ``sights``: by kind (kernels, requests), those that are known.
    """
    data = {
        "schema_version": SCHEMA_VERSION,
        "machine": {name: machine.get(name) for name in MACHINE_FIELDS},
        "cv_pct": max(float(noise["matmul_cv_pct"]), float(noise["bandwidth_cv_pct"])),
        "sights": {
            "version": SIGHTS_VERSION,
            **{kind: dataclasses.asdict(sight) for kind, sight in sights.items()},
        },
    }
    try:
        cache_dir.atomic_write(cache_dir.root() / NAME, json.dumps(data).encode())
    except cache_dir.CacheError:
        return


def find() -> float | None:
    """Return the noise (standard deviation, log scale) that is kept for this machine, or None."""
    try:
        return float(_kept()["cv_pct"]) / 100
    except (LookupError, TypeError, ValueError):
        return None


def find_sight(kind: str) -> Sight | None:
    """Return the sight of a kind that is kept for this machine, or None; also of other versions."""
    try:
        sights = _kept()["sights"]
        return Sight(**sights[kind]) if sights["version"] == SIGHTS_VERSION else None
    except (LookupError, TypeError, ValueError):
        return None


def _kept() -> Mapping[str, Any]:
    """Read what is kept for this machine; empty where there is nothing that can be read."""
    try:
        data = read_json(cache_dir.root() / NAME)
        other = machine_difference(data["machine"], fingerprint.take())
        return data if other is None else {}
    except (OSError, RecordError, LookupError, TypeError, ValueError, AttributeError):
        return {}
