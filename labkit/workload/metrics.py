"""Serving metrics, by the field's definitions (those of vLLM's serving benchmark).

TTFT is submission to first token, E2E submission to last token, TPOT is
``(E2E - TTFT) / (tokens - 1)`` and so leaves the first token out, and ITL is the gap
between two chunks of one request, pooled over all requests. A chunk is what one engine
step gave a request: one token, or several where the engine speculates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from labkit.records import Metric

PERCENTILES = (50, 99)


@dataclass(slots=True)
class Served:
    """What one request got and when; times are seconds on the driver's clock.

    ``admitted``: the beginning of its first step; None where the engine does not tell.
    ``stayed_steps``: steps that computed its row after it had ended.
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
        if len(self.tokens) < 2:
            return None
        return (self.e2e - self.ttft) / (len(self.tokens) - 1)

    @property
    def itl(self) -> list[float]:
        """Seconds between successive chunks."""
        times = self.chunk_times
        return [after - before for before, after in pairwise(times)]


def serving_metrics(
    served: Sequence[Served], peak_kv_bytes: float | None, *, primary: bool = True
) -> tuple[Metric, ...]:
    """Compute one run's metrics.

    Parameters
    ----------
    served
        Finished requests, each with at least one token.
    peak_kv_bytes
        The most KV memory that was in use at once, where the engine counts it.
    primary
        Whether the throughput of all tokens is the metric that decides.

    Returns
    -------
    tuple of Metric
        Throughputs first. A metric without a value (TPOT where every request got one
        token) is left out.
    """
    wall = max(r.chunk_times[-1] for r in served) - min(r.submitted for r in served)
    output = sum(len(r.tokens) for r in served)
    prompt = sum(r.prompt_tokens for r in served)
    metrics = [
        Metric("total_tok_s", "tok/s", "higher", primary, ((prompt + output) / wall,)),
        Metric("output_tok_s", "tok/s", "higher", False, (output / wall,)),
        Metric("request_s", "req/s", "higher", False, (len(served) / wall,)),
        *_percentiles("ttft", (r.ttft for r in served)),
        *_percentiles("tpot_excl_first", (r.tpot for r in served if r.tpot is not None)),
        *_percentiles("itl_chunk", (gap for r in served for gap in r.itl)),
        *_percentiles("e2e", (r.e2e for r in served)),
    ]
    if peak_kv_bytes is not None:
        metrics.append(Metric("peak_kv_bytes", "bytes", "lower", False, (float(peak_kv_bytes),)))
    return tuple(metrics)


def request_metrics(served: Served) -> tuple[Metric, ...]:
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


def request_notes(served: Sequence[Served]) -> list[dict[str, Any]]:
    """Return each request's times (ms, from the first submission), rounded to 1 us."""
    start = min(r.submitted for r in served)
    return [
        {
            "id": r.request_id,
            "prompt_tokens": r.prompt_tokens,
            "output_tokens": len(r.tokens),
            "submitted_ms": _ms(r.submitted - start),
            **({} if r.admitted is None else {"admitted_ms": _ms(r.admitted - start)}),
            "ttft_ms": _ms(r.ttft),
            "e2e_ms": _ms(r.e2e),
            "itl_ms": [_ms(gap) for gap in r.itl],
        }
        for r in served
    ]


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
