"""Outcomes of a run's requests, the rates they were sent at, and the cost of sending them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from labkit.config import LatencySLO, Workload
from labkit.workload.requests.serving_metrics import ServedRequest, meets

MAX_UNSERVED_NOTES = 8  # maximum number of unserved requests listed in the record


def outcome_notes(
    entries: Sequence[ServedRequest],
    workload: Workload,
    *,
    rate_unit: str,
    cpu_s: float,
    seconds: float,
) -> dict[str, Any]:
    """Return a record's notes on the outcomes and arrivals of a run's requests.

    Parameters
    ----------
    entries
        All requests, served or not.
    workload
        The workload, for its arrivals and latency limits.
    rate_unit
        What arrives at the workload's rate: ``requests/s`` or ``sessions/s``.
    cpu_s
        CPU seconds of the load generator: everything but the engine's steps.
    seconds
        Seconds from the first arrival to the end of the last request.

    Returns
    -------
    dict
        Counts by outcome. In an open loop also the rate that was configured and its unit, the
        request rates (per second) that were drawn and sent, the wait at the client and the load
        generator's lateness (ms), and where latencies begin (older records lack it: they began
        when a request was sent).
    """
    outcomes = Counter(entry.outcome for entry in entries)
    notes: dict[str, Any] = {
        "arrivals": workload.arrivals.kind.value,
        "requests": len(entries),
        **{name: outcomes[name] for name in ("served", "refused", "failed")},
        "sender_cpu_s": round(cpu_s, 6),
        "sender_cpu_share": round(cpu_s / seconds, 6) if seconds > 0 else None,
    }
    unserved = [e for e in entries if e.outcome != "served"]
    if unserved:
        notes["unserved"] = [
            {"id": e.request_id, "outcome": e.outcome, "error": e.error}
            for e in unserved[:MAX_UNSERVED_NOTES]
        ]
    if workload.limits.is_set:
        notes["good"] = _good(entries, workload.limits)
    due = [entry.due for entry in entries if entry.due is not None]
    if due:
        notes |= {
            "asked_per_s": workload.arrivals.rate,
            "asked_unit": rate_unit,
            "due_per_s": _rate(due),
            "sent_per_s": _rate([entry.submitted for entry in entries]),
            "queue_ms": _percentiles([entry.queued for entry in entries]),
            "latency_from": "arrival",
            "late_ms": _percentiles([entry.late for entry in entries]),
        }
    return notes


def _good(entries: Sequence[ServedRequest], limits: LatencySLO) -> int:
    return sum(entry.outcome == "served" and meets(entry, limits) for entry in entries)


def _rate(times: Sequence[float]) -> float | None:
    """Return requests per second from the first to the last time; None if all times are equal."""
    span = max(times) - min(times)
    return (len(times) - 1) / span if span > 0 else None


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return median, 99th percentile and maximum in ms."""
    values = np.percentile(np.array(seconds) * 1e3, (50, 99, 100))
    return {k: round(float(v), 3) for k, v in zip(("p50", "p99", "max"), values, strict=True)}
