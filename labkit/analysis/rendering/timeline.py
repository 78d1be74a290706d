"""One run's memory over time and its requests' phases, read from the record.

Of every arm but the control the first good run that noted them; times are seconds from
the first submission.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.records import Record

# Column of the record's timeline -> what readers call it; those that stay 0 are not shown.
SERIES = {
    "rss_bytes": "process, resident",
    "swap_bytes": "process, in swap",
    "kv_reserved_bytes": "KV reserved",
    "kv_used_bytes": "KV used",
    "mlx_active_bytes": "MLX active",
    "mlx_cache_bytes": "MLX cache",
    "mlx_peak_bytes": "MLX peak",
}
PHASES = ("waiting", "prefill", "decode")
MOST_BARS = 200  # requests drawn, in the order of submission


@dataclass(frozen=True)
class Bar:
    """A request's phases: seconds at which it was submitted, admitted, answered, done.

    ``admitted`` is None where the engine does not tell; waiting and prefill are one then.
    """

    request: str
    submitted: float
    admitted: float | None
    first: float
    end: float

    def phases(self) -> Iterator[tuple[str, float, float]]:
        """Give each phase's name, beginning and end."""
        if self.admitted is not None:
            yield "waiting", self.submitted, self.admitted
        begun = self.submitted if self.admitted is None else self.admitted
        yield "prefill", begun, self.first
        yield "decode", self.first, self.end


@dataclass(frozen=True)
class Timeline:
    """A run's memory (MiB by column) at ``t_s``, and its requests."""

    arm: str
    run: str
    t_s: tuple[float, ...]
    memory: Mapping[str, tuple[float, ...]]
    bars: tuple[Bar, ...]

    @property
    def waiting_known(self) -> bool:
        """Whether the engine told when it admitted a request."""
        return all(bar.admitted is not None for bar in self.bars)

    @property
    def end(self) -> float:
        """Give the last moment there is anything to show of."""
        return max([*self.t_s, *(bar.end for bar in self.bars)])

    @property
    def phases(self) -> tuple[str, ...]:
        """Name the phases that can be told apart."""
        return PHASES if self.waiting_known else PHASES[1:]

    def caption(self) -> str:
        """Say which run this is and what is not in it."""
        text = f"{self.arm}, run {self.run}: memory, and below it each request's phases"
        if not self.waiting_known:
            text += " (prefill includes waiting: this engine does not tell them apart)"
        if len(self.bars) == MOST_BARS:
            text += f"; the first {MOST_BARS} requests"
        return text


def timelines(records: Sequence[Record], arms: Sequence[str]) -> list[Timeline]:
    """Give the first timeline of each of ``arms`` that has one."""
    found: dict[str, Timeline] = {}
    for record in records:
        if record.ok and record.arm in arms and record.arm not in found:
            timeline = _timeline(record)
            if timeline is not None:
                found[record.arm] = timeline
    return [found[arm] for arm in arms if arm in found]


def _timeline(record: Record) -> Timeline | None:
    noted = record.notes.get("timeline") or {}
    requests = next((c.notes["requests"] for c in record.cases if c.notes.get("requests")), ())
    if not noted.get("t_s") or not requests:
        return None
    memory = {
        name: tuple(float(x or 0) / 2**20 for x in noted[name])
        for name in SERIES
        if any(noted.get(name) or ())
    }
    bars = tuple(map(_bar, requests[:MOST_BARS]))
    return Timeline(record.arm, record.run, tuple(map(float, noted["t_s"])), memory, bars)


def _bar(request: Mapping[str, Any]) -> Bar:
    submitted, admitted = request["submitted_ms"] / 1e3, request.get("admitted_ms")
    return Bar(
        str(request["id"]),
        submitted,
        None if admitted is None else admitted / 1e3,
        submitted + request["ttft_ms"] / 1e3,
        submitted + request["e2e_ms"] / 1e3,
    )
