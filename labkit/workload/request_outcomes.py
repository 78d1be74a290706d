"""What became of the requests of a run, how they were sent, and what sending cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from labkit.config import Limits, Workload
from labkit.workload.serving_metrics import ServedRequest, meets

SHOWN = 8  # reasons of requests that were not served


def traffic_notes(
    entries: Sequence[ServedRequest], workload: Workload, *, cpu_s: float, seconds: float
) -> dict[str, Any]:
    """Return what a record says of a run's traffic.

    Parameters
    ----------
    entries
        All requests, served or not.
    workload
        How they were asked.
    cpu_s
        CPU seconds of the sender: everything besides the engine's own steps.
    seconds
        From the first request to the last answer.

    Returns
    -------
    dict
        Counts by outcome; where requests arrive by themselves also the rates (per second)
        asked for, due as drawn and sent, the wait at the client and the sender's lateness (ms).
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
            {"id": e.request_id, "outcome": e.outcome, "error": e.error} for e in unserved[:SHOWN]
        ]
    if workload.limits.any:
        notes["good"] = _good(entries, workload.limits)
    due = [entry.due for entry in entries if entry.due is not None]
    if due:
        notes |= {
            "asked_per_s": workload.arrivals.rate,
            "due_per_s": _rate(due),
            "sent_per_s": _rate([entry.submitted for entry in entries]),
            "queue_ms": _spread([entry.queued for entry in entries]),
            "late_ms": _spread([entry.late for entry in entries]),
        }
    return notes


def _good(entries: Sequence[ServedRequest], limits: Limits) -> int:
    return sum(entry.outcome == "served" and meets(entry, limits) for entry in entries)


def _rate(times: Sequence[float]) -> float | None:
    """Return how many come per second, by the span from the first to the last; None: at once."""
    span = max(times) - min(times)
    return (len(times) - 1) / span if span > 0 else None


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return median, 99th percentile and maximum in ms."""
    found = np.percentile(np.array(seconds) * 1e3, (50, 99, 100))
    return {k: round(float(v), 3) for k, v in zip(("p50", "p99", "max"), found, strict=True)}
