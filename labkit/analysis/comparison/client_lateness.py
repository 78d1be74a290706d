"""Lateness of the client of a server: runs in which the client was the bottleneck."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from labkit.records import Record

Json = Mapping[str, Any]
MAX_LATE_SHARE = 0.2  # of an arm's runs with a late client, which then are no rare disturbance
# The times that engine.server.most_late_ms limits: path in the client's notes, and text.
BOUNDED_TIMES = {
    "lag_ms.p99": "its event loop woke {} ms late (99th percentile)",
    "late_ms.p99": "it sent requests {} ms late (99th percentile)",
    "floor.ttft_ms.p50": "its own part of TTFT, measured with a null server, is {} ms (median)",
    "floor.chunk_ms.p99": "it saw a null server's chunks {} ms late (99th percentile)",
}


def server_and_client(record: Record) -> tuple[Json, Json] | None:
    """Return a run's notes on its server and its client, or None if the arm is not a server."""
    engine = record.known_notes.get("engine") or {}
    server, client = engine.get("server"), engine.get("client")
    return None if server is None or client is None else (server, client)


def lateness_errors(record: Record) -> Iterator[str]:
    """Yield an error for each of the client's delays above ``engine.server.most_late_ms``."""
    notes = server_and_client(record)
    if notes is None:
        return
    client = notes[1]
    max_late_ms = float(client["most_late_ms"])
    arrivals = "it sent arrivals {} ms late (99th percentile)"
    traffic = (case.known_notes.get("traffic") for case in record.cases)
    times = [(text, number_at(client, path)) for path, text in BOUNDED_TIMES.items()]
    times += ((arrivals, number_at(note, "late_ms.p99")) for note in traffic)
    for description, value in times:
        if value is not None and value > max_late_ms:
            lateness = description.format(f"{value:.1f}")
            yield (
                f"the client is the bottleneck: {lateness}; the limit is {max_late_ms:g} ms "
                "(engine.server.most_late_ms)"
            )


def often_late_runs(records: Sequence[Record]) -> list[Record]:
    """Return the runs with a late client of the arms whose client was often late.

    A rare delay is the machine's, as other disturbances are. A frequent one may be the arm's: a
    server that leaves the client no CPU time. One late run of three or more is rare: a machine that
    is late in 5 % of the runs is so in one of four runs in every sixth study, in two in every 70th.
    """
    runs, late = Counter(r.arm for r in records), [r for r in records if any(lateness_errors(r))]
    by_arm = Counter(record.arm for record in late)
    often = {
        arm
        for arm, count in by_arm.items()
        if count > max(1, MAX_LATE_SHARE * runs[arm]) or 2 * count >= runs[arm]
    }
    return [record for record in late if record.arm in often]


def number_at(notes: object, path: str) -> float | None:
    """Return the number at a path of keys such as ``late_ms.p99``, or None if a key is missing."""
    for name in path.split("."):
        notes = notes.get(name) if isinstance(notes, Mapping) else None
    return None if notes is None else float(notes)  # type: ignore[arg-type]
