"""Serving metrics, by the field's definitions (those of vLLM's serving benchmark).

TTFT is submission to first token, E2E submission to last token, TPOT is
``(E2E - TTFT) / (tokens - 1)`` and so leaves the first token out, and ITL is the gap
between two chunks of one request, pooled over all requests. A chunk is what one engine
step gave a request: one token, or several where the engine speculates. Over HTTP it is what a
client read at once, and says nothing of how many tokens it is. Goodput counts the
requests that met every limit; TPOT is 0 there for a single token. All are of requests that
were served: a refused or failed one counts as itself, and is never good.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from labkit.config import Limits
from labkit.records import Metric

PERCENTILES = (50, 99)
Outcome = Literal["served", "refused", "failed"]


@dataclass(slots=True)
class ServedRequest:
    """What one request got and when; times are seconds on the driver's clock.

    ``admitted``: the beginning of its first step; None where the engine does not tell.
    ``stayed_steps``: steps that computed its row after it had ended. ``due``: when it should
    have been sent; None in a closed loop. ``late``: seconds by which the sender itself was
    late. ``error``: why it was refused or failed. ``counted`` and ``text``: how many tokens it
    has and what they say, where only that is known of them.
    """

    request_id: str
    prompt_tokens: int
    submitted: float
    tokens: list[int] = field(default_factory=list)
    margins: list[float | None] = field(default_factory=list)
    chunk_times: list[float] = field(default_factory=list)
    finish: str | None = None
    admitted: float | None = None
    stayed_steps: int = 0
    due: float | None = None
    late: float = 0.0
    error: str | None = None
    counted: int | None = None
    text: str | None = None

    @property
    def outcome(self) -> Outcome:
        """Whether it was served, refused (it ended before its first token) or failed."""
        if self.finish in ("stop", "length"):
            return "served"
        return "failed" if self.chunk_times else "refused"

    @property
    def output_tokens(self) -> int:
        """How many tokens it got."""
        return len(self.tokens) if self.counted is None else self.counted

    @property
    def queued(self) -> float:
        """Seconds that it waited at the client because no more might be in flight."""
        return 0.0 if self.due is None else self.submitted - self.due

    @property
    def row_steps(self) -> int:
        """Steps that gave it a token, and those that computed its row after it had ended."""
        return len(self.chunk_times) + self.stayed_steps

    @property
    def ttft(self) -> float:
        """Seconds from submission to the first token."""
        return self.chunk_times[0] - self.submitted

    @property
    def e2e(self) -> float:
        """Seconds from submission to the last token."""
        return self.chunk_times[-1] - self.submitted

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Seconds between successive chunks."""
        times = self.chunk_times
        return [after - before for before, after in pairwise(times)]


def serving_metrics(
    served: Sequence[ServedRequest],
    peak_kv_bytes: float | None,
    *,
    primary: bool = True,
    limits: Limits | None = None,
) -> tuple[Metric, ...]:
    """Compute one run's metrics.

    Parameters
    ----------
    served
        Requests that were served, each with at least one token.
    peak_kv_bytes
        The most KV memory that was in use at once, where the engine counts it.
    primary
        Whether the throughput of all tokens is the metric that decides.
    limits
        What goodput is counted under; without a limit there is none.

    Returns
    -------
    tuple of Metric
        Throughputs first. A metric without a value (TPOT where every request got one
        token) is left out.
    """
    wall = max(r.chunk_times[-1] for r in served) - min(r.submitted for r in served)
    output = sum(r.output_tokens for r in served)
    prompt = sum(r.prompt_tokens for r in served)
    metrics = [
        Metric("total_tok_s", "tok/s", "higher", primary, ((prompt + output) / wall,)),
        Metric("output_tok_s", "tok/s", "higher", False, (output / wall,)),
        Metric("request_s", "req/s", "higher", False, (len(served) / wall,)),
        Metric("wall_s", "s", "lower", False, (wall,)),
        *_percentiles("ttft", (r.ttft for r in served)),
        *_percentiles("tpot_excl_first", (r.tpot for r in served if r.tpot is not None)),
        *_percentiles("itl_chunk", (gap for r in served for gap in r.itl)),
        *_percentiles("e2e", (r.e2e for r in served)),
    ]
    if limits is not None and limits.any:
        good = sum(meets(r, limits) for r in served)
        metrics.insert(4, Metric("goodput_req_s", "req/s", "higher", False, (good / wall,)))
    if peak_kv_bytes is not None:
        metrics.append(Metric("peak_kv_bytes", "bytes", "lower", False, (float(peak_kv_bytes),)))
    return tuple(metrics)


def sending_metrics(entries: Sequence[ServedRequest]) -> tuple[Metric, ...]:
    """Compute how requests that arrive by themselves were sent; nothing of a closed loop.

    ``entries``: all requests, served or not.
    """
    timed = [entry for entry in entries if entry.due is not None]
    sent = [entry.submitted for entry in timed]
    span = max(sent) - min(sent) if timed else 0.0
    if not span:
        return ()
    late = np.percentile([entry.late * 1e3 for entry in timed], 99)
    return (
        Metric("sent_req_s", "req/s", "higher", False, ((len(timed) - 1) / span,)),
        Metric("late_p99_ms", "ms", "lower", False, (float(late),)),
    )


def counted_metrics(counters: Mapping[str, float]) -> tuple[Metric, ...]:
    """Compute what an engine's counters say of its steps and of its KV memory.

    ``host_ms_per_step``: time of a step in which the host did not wait for the model.
    ``shape_repeated_pct``: steps of the shape of the one before, whose graph could be used again.
    ``kv_waste_pct``: of the KV memory that requests held when they ended, what no token ever
    filled. An engine that does not count what one needs has no such metric.
    """
    steps, held = counters.get("steps.total"), counters.get("kv.slots_held")
    found = []
    if steps and "host_ms" in counters:
        per_step = counters["host_ms"] / steps
        found.append(Metric("host_ms_per_step", "ms", "lower", False, (per_step,)))
    if steps and "shape.repeated" in counters:
        repeated = 100 * counters["shape.repeated"] / steps
        found.append(Metric("shape_repeated_pct", "%", "higher", False, (repeated,)))
    if held and "kv.slots_filled" in counters:
        waste = 100 * (1 - counters["kv.slots_filled"] / held)
        found.append(Metric("kv_waste_pct", "%", "lower", False, (waste,)))
    return tuple(found)


def meets(served: ServedRequest, limits: Limits) -> bool:
    """Tell whether a served request met every limit that there is."""
    found = (served.ttft, served.tpot or 0.0, served.e2e)
    allowed = (limits.ttft_ms, limits.tpot_ms, limits.e2e_ms)
    return all(
        most is None or seconds * 1e3 <= most for seconds, most in zip(found, allowed, strict=True)
    )


def request_metrics(served: ServedRequest) -> tuple[Metric, ...]:
    """Compute one request's own metrics: its latency, which decides, and its row's steps."""
    return (
        Metric("e2e_ms", "ms", "lower", True, (served.e2e * 1e3,)),
        Metric("row_steps", "steps", "lower", False, (float(served.row_steps),)),
    )


def _percentiles(name: str, seconds: Iterable[float]) -> list[Metric]:
    values = np.fromiter(seconds, dtype=np.float64)
    if not values.size:
        return []
    found = np.percentile(values * 1e3, PERCENTILES, method="linear")
    return [
        Metric(f"{name}_p{p}_ms", "ms", "lower", False, (float(value),))
        for p, value in zip(PERCENTILES, found, strict=True)
    ]


def request_notes(served: Sequence[ServedRequest]) -> list[dict[str, Any]]:
    """Return each request's times (ms, from the first submission), rounded to 1 us."""
    start = min(r.submitted for r in served)
    return [
        {
            "id": r.request_id,
            "prompt_tokens": r.prompt_tokens,
            "output_tokens": r.output_tokens,
            "submitted_ms": _ms(r.submitted - start),
            **({} if r.due is None else {"queued_ms": _ms(r.queued), "late_ms": _ms(r.late)}),
            **({} if r.admitted is None else {"admitted_ms": _ms(r.admitted - start)}),
            "ttft_ms": _ms(r.ttft),
            "e2e_ms": _ms(r.e2e),
            "itl_ms": [_ms(gap) for gap in r.itl],
        }
        for r in served
    ]


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
