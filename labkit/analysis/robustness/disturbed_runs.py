"""Disturbed runs: rules, fixed before any data were seen, for runs that the machine disturbed.

The rules use the machine probe, the observer's samples and the fingerprints, never the metric or
the name of the arm. No arm can change the probe that ran before it, or the time that the hypervisor
or other processes took. But memory waits, the clock, heat and the lateness of a server's client are
read while the arm runs, so the arm may cause them. If a block is excluded because of one of these
(``during_arm``), a note beside the result says so. Blocks are excluded as a whole, and only in a
sensitivity analysis (``labkit.analysis.robustness.sensitivity_analysis``). Verdicts use all blocks.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from labkit.analysis.comparison.client_lateness import lateness_errors
from labkit.records import Record

MAX_PROBE_RATIO = 1.10  # times the study's median
MAX_STEAL_SHARE = 0.05  # share of all CPU time
MAX_FOREIGN_CORES = 0.5
MAX_MEMORY_WAIT_SHARE = 0.05  # share of the run
HOT_THERMAL_LEVEL = 2  # 0 nominal, 1 fair, 2 serious, 3 critical
MIN_CLOCK_RATIO = 0.90  # times the study's median
RULES = (
    "the machine probe took over 1.1 times the study's median, the hypervisor took over 5 % of the "
    "CPU time, other processes used over half a core, processes waited for memory over 5 % of the "
    "time, macOS reported memory pressure, the clock was below 0.9 times the study's median, or "
    "heat slowed the CPU (as far as the system reports these); memory, clock and heat are read "
    "while the arm runs, so the arm may affect them"
)
CLIENT_RULE = (
    "A block is also disturbed if the client of a server was late by more than "
    "engine.server.most_late_ms, which the arm may cause as well."
)


def disturbed_blocks(records: Iterable[Record]) -> dict[int, list[tuple[str, bool]]]:
    """Return disturbances by block, and whether the arm may have caused each of them.

    A run is compared with the median of its own host.
    """
    disturbances: dict[int, list[tuple[str, bool]]] = {}
    for host_records in group_by_host(records).values():
        probe = _median(probe_us(r) for r in host_records)
        clock = _median(clock_mhz(r) for r in host_records)
        for record in host_records:
            for text, during_arm in _disturbances(record, probe, clock):
                reason = f"{record.run}: {text}", during_arm
                disturbances.setdefault(record.block, []).append(reason)
    return disturbances


def group_by_host(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Group records by the host on which they ran."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(str(record.environment.get("host")), []).append(record)
    return groups


def _disturbances(
    record: Record, median_probe: float | None, median_clock: float | None
) -> Iterator[tuple[str, bool]]:
    """Yield a run's disturbances, and whether the arm may have caused them.

    The medians (us, MHz) are those of its host's runs.
    """
    probe = probe_us(record)
    if probe is not None and median_probe is not None and probe > MAX_PROBE_RATIO * median_probe:
        yield f"the probe was {100 * (probe / median_probe - 1):.0f} % slow", False
    if (steal := steal_share(record) or 0.0) > MAX_STEAL_SHARE:
        yield f"the hypervisor took {100 * steal:.0f} % of the CPU time", False
    foreign = statistics.fmean(samples(record, "foreign_cores") or [0.0])
    if foreign > MAX_FOREIGN_CORES:
        yield f"other processes used {foreign:.1f} cores", False
    if (wait := memory_wait_share(record) or 0.0) > MAX_MEMORY_WAIT_SHARE:
        yield f"processes waited for memory {100 * wait:.0f} % of the time", True
    if max(samples(record, "memory_pressure_level"), default=0) > 1:
        yield "macOS reported memory pressure", True
    clock = clock_mhz(record)
    if clock is not None and median_clock is not None and clock < MIN_CLOCK_RATIO * median_clock:
        yield f"the clock was at {clock:,.0f} MHz", True
    if throttled(record):
        yield "heat slowed the CPU", True
    yield from ((late, True) for late in lateness_errors(record))


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def probe_us(record: Record) -> float | None:
    """Return the geometric mean of the probe's times (us) before the arm; None if not recorded."""
    times = [float(t) for t in record.probe.get("before", {}).values() if t > 0]
    return statistics.geometric_mean(times) if times else None


def samples(record: Record, name: str) -> list[float]:
    """Return the observer's samples of ``name`` during a run; empty if there are none."""
    observer = record.known_notes.get("observer")
    columns = observer.get("samples", {}) if isinstance(observer, Mapping) else {}
    return [float(x) for x in columns.get(name, ()) if isinstance(x, int | float)]


def steal_share(record: Record) -> float | None:
    """Return the share of CPU time (0 to 1) that the hypervisor took in a run; None if unknown."""
    start, end = record.environment.get("cpu_ticks"), record.environment_end.get("cpu_ticks")
    if not start or not end:
        return None
    total = sum(end[k] - start.get(k, 0) for k in end)
    return float(end.get("steal", 0) - start.get("steal", 0)) / total if total > 0 else None


def memory_wait_share(record: Record) -> float | None:
    """Return the share (0 to 1) of a run in which a process waited for memory (PSI), or None."""
    start, end = (
        (state.get("pressure") or {}).get("memory", {}).get("total_us")
        for state in (record.environment, record.environment_end)
    )
    # The states are those of the process, which other arms may have shared.
    began, ended = (state.get("taken") for state in (record.environment, record.environment_end))
    if start is None or end is None or began is None or ended is None:
        return None
    seconds = (datetime.fromisoformat(ended) - datetime.fromisoformat(began)).total_seconds()
    return (float(end) - float(start)) / (seconds * 1e6) if seconds > 0 else None


def clock_mhz(record: Record) -> float | None:
    """Return the CPU's clock in a run (MHz), the median sample or that at the start, or None."""
    sampled = samples(record, "mhz")
    if sampled:
        return statistics.median(sampled)
    start = record.environment.get("mhz")
    return float(start) if start else None


def throttled(record: Record) -> bool:
    """Return whether heat slowed the CPU in a run: throttle events, or a hot thermal state."""
    if max(samples(record, "thermal_level"), default=0) >= HOT_THERMAL_LEVEL:
        return True
    start, end = record.environment.get("thermal"), record.environment_end.get("thermal")
    return _throttle_count(end) > _throttle_count(start) or any(
        state in ("serious", "critical") for state in (start, end)
    )


def _throttle_count(thermal: Any) -> int:
    return int(thermal.get("throttled", 0)) if isinstance(thermal, Mapping) else 0
