"""Serving metrics, as vLLM's serving benchmark defines them.

TTFT is the time from a request's arrival to its first token, E2E from its arrival to its last. In
an open loop a request arrives when it is due, so that a wait at the client counts; in a closed loop
it arrives when it is sent. TPOT is ``(E2E - TTFT) / (tokens - 1)``, so it excludes the first token;
where a first chunk is known to hold more tokens, it excludes them all. It also excludes a last
token of which a server's stream shows no time: one that ends the text and has neither text nor id.
``tpot_incl_first`` is ``E2E / tokens``, for tables that count the first token too. ITL is the gap
between two chunks of one request, pooled over all requests. A chunk is the output of one engine
step for a request: one token, or several with speculation. Over HTTP a chunk is the text that the
client gets from one read; it may hold any number of tokens. Goodput counts the requests that met
every limit. For goodput, a request whose tokens came all at once has a TPOT of 0. All metrics cover
served requests only, but the time of a run ends with its last request, served or not. Refused and
failed requests are counted separately and never toward goodput.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from labkit.config import LatencySLO, Workload
from labkit.records import Metric
from labkit.records.metric_registry import measured
from labkit.workload.tokenized_prompt import Prompt

PERCENTILES = (50, 99)
MAX_UNSERVED_NOTES = 8  # maximum number of unserved requests listed in the record
Outcome = Literal["served", "refused", "failed"]


@dataclass(slots=True)
class ServedRequest:
    """Tokens and times of one request; times are seconds on the load generator's clock.

    ``ended``: the time at which the request ended; None while it is live.
    ``admitted``: start of the request's first step; None if the engine does not report admissions.
    ``stayed_steps``: steps that computed the request's row after the request had ended. ``due``:
    the time at which the request should have been sent; None in a closed loop. ``late``: seconds
    by which the load generator sent the request late. ``error``: the reason that the request was
    refused or failed. ``counted``, ``text``: number and text of the request's tokens, if a server
    reports no token ids. ``first_chunk``: tokens that came in the first chunk; 1 if unknown.
    ``untimed_tokens``: tokens that came after the last chunk, at an unknown time.
    """

    request_id: str
    prompt_tokens: int
    submitted: float
    tokens: list[int] = field(default_factory=list)
    margins: list[float | None] = field(default_factory=list)
    chunk_times: list[float] = field(default_factory=list)
    finish: str | None = None
    ended: float | None = None
    admitted: float | None = None
    stayed_steps: int = 0
    due: float | None = None
    late: float = 0.0
    error: str | None = None
    counted: int | None = None
    text: str | None = None
    first_chunk: int = 1
    untimed_tokens: int = 0

    @property
    def outcome(self) -> Outcome:
        """Served, failed, or refused: ended, for whatever reason, before the first token."""
        if self.finish in ("stop", "length"):
            return "served"
        return "failed" if self.chunk_times else "refused"

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) if self.counted is None else self.counted

    @property
    def timed_tokens(self) -> int:
        """Number of tokens that came in the chunks."""
        return self.output_tokens - self.untimed_tokens

    @property
    def arrived(self) -> float:
        """When the request was due or, in a closed loop, sent: latencies count from this time."""
        return self.submitted if self.due is None else self.due

    @property
    def queued(self) -> float:
        """Seconds that the request waited at the client because of the concurrency limit."""
        return self.submitted - self.arrived

    @property
    def row_steps(self) -> int:
        """Steps that produced a token, plus steps wasted on the request's row after its end."""
        return len(self.chunk_times) + self.stayed_steps

    @property
    def ttft(self) -> float:
        return self.chunk_times[0] - self.arrived

    @property
    def e2e(self) -> float:
        return self.chunk_times[-1] - self.arrived

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first chunk, or None if there is no such token."""
        later = self.timed_tokens - self.first_chunk
        return (self.e2e - self.ttft) / later if later > 0 else None

    @property
    def itl(self) -> list[float]:
        return [after - before for before, after in pairwise(self.chunk_times)]


def span(entries: Sequence[ServedRequest]) -> float:
    """Return the seconds from the first arrival to the last token, or to the end of a failure.

    ``entries``: all requests, served or not. A request that hung before it failed counts in full.
    """
    ends = [
        entry.chunk_times[-1] if entry.outcome == "served" else entry.ended or entry.arrived
        for entry in entries
    ]
    return max(ends) - min(entry.arrived for entry in entries)


def serving_metrics(
    entries: Sequence[ServedRequest],
    peak_kv_bytes: float | None,
    *,
    limits: LatencySLO | None = None,
) -> tuple[Metric, ...]:
    """Compute throughput, latency and memory metrics of one run.

    Throughputs come first. Metrics without a value (TPOT if every request got one token) are
    omitted, and goodput if no limit is set. ``entries``: all requests, of which at least one was
    served. A served request has at least one token. ``peak_kv_bytes``: peak KV memory, if the
    engine counts it. ``limits``: latency limits of goodput.
    """
    wall, served = span(entries), [entry for entry in entries if entry.outcome == "served"]
    output = sum(r.output_tokens for r in served)
    prompt = sum(r.prompt_tokens for r in served)
    metrics = [
        measured("total_tok_s", ((prompt + output) / wall,)),
        measured("output_tok_s", (output / wall,)),
        measured("request_s", (len(served) / wall,)),
        measured("wall_s", (wall,)),
        *_percentiles("ttft", (r.ttft for r in served)),
        *_percentiles("tpot_excl_first", (r.tpot for r in served if r.tpot is not None)),
        *_mean("tpot_excl_first", (r.tpot for r in served if r.tpot is not None)),
        *_mean("tpot_incl_first", (r.e2e / r.timed_tokens for r in served)),
        *_percentiles("itl_chunk", (gap for r in served for gap in r.itl)),
        *_percentiles("e2e", (r.e2e for r in served)),
    ]
    if limits is not None and limits.is_set:
        good = sum(meets(r, limits) for r in served)
        metrics.insert(4, measured("goodput_req_s", (good / wall,)))
    if peak_kv_bytes is not None:
        metrics.append(measured("peak_kv_bytes", (float(peak_kv_bytes),)))
    return tuple(metrics)


def sending_metrics(entries: Sequence[ServedRequest]) -> tuple[Metric, ...]:
    """Return the request rate and the lateness of an open loop, or nothing in a closed loop.

    Requests that were all sent at the same time have no rate. ``entries``: all requests, served or
    not.
    """
    timed = [entry for entry in entries if entry.due is not None]
    if not timed:
        return ()
    late = np.percentile([entry.late * 1e3 for entry in timed], 99)
    lateness = measured("late_p99_ms", (float(late),))
    sent = _rate([entry.submitted for entry in timed])
    return (lateness,) if sent is None else (measured("sent_req_s", (sent,)), lateness)


def counted_metrics(counters: Mapping[str, float]) -> tuple[Metric, ...]:
    """Return metrics of an engine's steps and KV memory, computed from its counters.

    ``host_ms_per_step``: time per step in which the host does not wait for the model.
    ``shape_repeated_pct``: share of steps that have the same shape as the previous step and can
    reuse its graph. ``kv_waste_pct``: share of the KV memory of finished requests that no token
    filled. A metric is omitted if the engine lacks its counters.
    """
    steps, slots = counters.get("steps.total"), counters.get("kv.slots_held")
    values = {}
    if steps and "host_ms" in counters:
        values["host_ms_per_step"] = counters["host_ms"] / steps
    if steps and "shape.repeated" in counters:
        values["shape_repeated_pct"] = 100 * counters["shape.repeated"] / steps
    if slots and "kv.slots_filled" in counters:
        values["kv_waste_pct"] = 100 * (1 - counters["kv.slots_filled"] / slots)
    return tuple(measured(name, (value,)) for name, value in values.items())


def meets(served: ServedRequest, limits: LatencySLO) -> bool:
    """Return whether a served request met every limit that is set."""
    latencies = (served.ttft, served.tpot or 0.0, served.e2e)
    limits_ms = (limits.ttft_ms, limits.tpot_ms, limits.e2e_ms)
    return all(
        limit is None or seconds * 1e3 <= limit
        for seconds, limit in zip(latencies, limits_ms, strict=True)
    )


def request_metrics(served: ServedRequest) -> tuple[Metric, ...]:
    """Return one request's metrics: end-to-end latency and the steps of its row."""
    return (
        measured("e2e_ms", (served.e2e * 1e3,)),
        measured("row_steps", (float(served.row_steps),)),
    )


def _percentiles(name: str, seconds: Iterable[float]) -> list[Metric]:
    values = np.fromiter(seconds, dtype=np.float64)
    if not values.size:
        return []
    percentiles = np.percentile(values * 1e3, PERCENTILES, method="linear")
    return [
        measured(f"{name}_p{p}_ms", (float(value),))
        for p, value in zip(PERCENTILES, percentiles, strict=True)
    ]


def _mean(name: str, seconds: Iterable[float]) -> list[Metric]:
    values = np.fromiter(seconds, dtype=np.float64)
    return [measured(f"{name}_mean_ms", (float(values.mean()) * 1e3,))] if values.size else []


def request_notes(entries: Sequence[ServedRequest]) -> list[dict[str, Any]]:
    """Return each served request's times (ms, rounded to 1 us).

    They count from the first arrival of all requests, with which the memory's timeline begins.
    """
    start = min(r.arrived for r in entries)

    def arrival_notes(r: ServedRequest) -> dict[str, float]:
        times = {"arrived": r.arrived - start, "queued": r.queued, "late": r.late}
        return {f"{name}_ms": _ms(time) for name, time in times.items()}

    return [
        {
            "id": r.request_id,
            "prompt_tokens": r.prompt_tokens,
            "output_tokens": r.output_tokens,
            **({} if r.first_chunk == 1 else {"first_chunk": r.first_chunk}),
            **({} if r.untimed_tokens == 0 else {"untimed_tokens": r.untimed_tokens}),
            "submitted_ms": _ms(r.submitted - start),
            **({} if r.due is None else arrival_notes(r)),
            **({} if r.admitted is None else {"admitted_ms": _ms(r.admitted - start)}),
            "ttft_ms": _ms(r.ttft),
            "e2e_ms": _ms(r.e2e),
            "itl_ms": [_ms(gap) for gap in r.itl],
        }
        for r in entries
        if r.outcome == "served"
    ]


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def outcome_notes(
    entries: Sequence[ServedRequest], workload: Workload, *, rate_unit: str, cpu_s: float
) -> dict[str, Any]:
    """Return a record's notes on the outcomes and arrivals of a run's requests.

    They are counts by outcome. In an open loop they are also the rate that was configured and its
    unit, the request rates (per second) that were drawn and sent, the wait at the client and the
    load generator's lateness (ms), and where latencies begin (older records lack it: they began
    when a request was sent).

    ``entries``: all requests, served or not. ``rate_unit``: what arrives at the workload's rate,
    ``requests/s`` or ``sessions/s``. ``cpu_s``: CPU seconds of the load generator, everything but
    the engine's steps.
    """
    outcomes, seconds = Counter(entry.outcome for entry in entries), span(entries)
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
        notes["good"] = sum(e.outcome == "served" and meets(e, workload.limits) for e in entries)
    due = [entry.due for entry in entries if entry.due is not None]
    if due:
        notes |= {
            "asked_per_s": workload.arrivals.rate,
            "asked_unit": rate_unit,
            "due_per_s": _rate(due),
            "sent_per_s": _rate([entry.submitted for entry in entries]),
            "queue_ms": _spread_ms([entry.queued for entry in entries]),
            "latency_from": "arrival",
            "late_ms": _spread_ms([entry.late for entry in entries]),
        }
    return notes


def _rate(times: Sequence[float]) -> float | None:
    """Return requests per second from the first to the last time; None if all times are equal."""
    span = max(times) - min(times)
    return (len(times) - 1) / span if span > 0 else None


def _spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Return median, 99th percentile and maximum in ms."""
    values = np.percentile(np.array(seconds) * 1e3, (50, 99, 100))
    return {k: round(float(v), 3) for k, v in zip(("p50", "p99", "max"), values, strict=True)}


def rectangle_notes(lengths: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Return the KV slots of the requests without padding and in one padded rectangular batch.

    ``lengths``: prompt and output tokens of each request, as served. In the rectangle, every row
    has the length of the longest prompt plus the longest output. The last output token needs no
    slot.
    """
    longest = max(p for p, _ in lengths) + max(o for _, o in lengths) - 1
    return {"tokens": sum(p + o - 1 for p, o in lengths), "slots": len(lengths) * longest}


def sharing_notes(
    prompts: Sequence[Prompt], block_size: int, *, warm: bool, unshared: bool
) -> dict[str, Any]:
    """Return the notes on shared prefixes for a record.

    ``unshared``: whether the prompts were changed so that no two share a prefix.
    """
    return {
        "prompt_tokens": sum(len(prompt.token_ids) for prompt in prompts),
        "shared_tokens": _shared_tokens(prompts, block_size, warm),
        "block_size": block_size,
        "unshared": unshared,
    }


def _shared_tokens(prompts: Sequence[Prompt], block_size: int, warm: bool) -> int:
    """Return the number of prompt tokens that a cache of unlimited memory would hit.

    They are in full blocks of ``block_size`` tokens that are also a prefix of an earlier prompt.
    Hits on generated tokens, which are unknown beforehand, are not counted, and a prompt's last
    token is always computed. The prompts are in the order of submission. Each is assumed to be
    computed before the next arrives. ``warm``: whether all were served once before.
    """
    cached: set[bytes] = set()
    if warm:
        cached.update(digest for prompt in prompts for digest in _prefixes(prompt, block_size))
    hit_tokens = 0
    for prompt in prompts:
        prefixes = _prefixes(prompt, block_size)
        max_blocks = (len(prompt.token_ids) - 1) // block_size
        hits = next((i for i, digest in enumerate(prefixes) if digest not in cached), max_blocks)
        hit_tokens += min(hits, max_blocks) * block_size
        cached.update(prefixes)
    return hit_tokens


def _prefixes(prompt: Prompt, block_size: int) -> list[bytes]:
    """Return the digests of the prompt's first block, of its first two blocks, and so on."""
    digest, prefixes = hashlib.blake2b(digest_size=16), []
    ids = np.asarray(prompt.token_ids, "<u4")
    for end in range(block_size, len(ids) + 1, block_size):
        digest.update(ids[end - block_size : end].tobytes())
        prefixes.append(digest.digest())
    return prefixes
