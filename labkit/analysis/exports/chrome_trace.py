"""Traced steps as Chrome's trace-event JSON, which Perfetto and ``chrome://tracing`` open.

One track shows the steps, one the host's work in each step, and one the model's work (plan and
forward). Each request has a track with its chunks. Further tracks count tokens, requests, KV bytes
and KV blocks. Times are microseconds from the first step.

Source: "Trace Event Format" (Google, 2016).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]
ENGINE, REQUESTS = 1, 2  # process ids
STEPS, HOST, MODEL = 1, 2, 3  # thread ids of the engine
MODEL_PARTS = ("plan", "forward")
ROUNDING = 2  # tenths of a microsecond: the largest difference of two ends that are equal


def chrome_trace(trace: Json, title: str) -> dict[str, Any]:
    """Return traced steps (:mod:`labkit.records.step_trace_file`) as a trace-event object."""
    events = [*_names(trace, title)]
    admitted: set[int] = set()
    for number, step in enumerate(trace["steps"]):
        admitted -= {*step["released"], *step["preempted"]}
        events += _step_events(number, step, trace, admitted)
    return {
        "traceEvents": _without_overlaps(events),
        "displayTimeUnit": "ms",
        "otherData": {"run": title, "steps": len(trace["steps"]), "of": trace["steps_total"]},
    }


def _without_overlaps(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events with times that do not cross on any track.

    Older records have starts and durations in tenths of a microsecond, each rounded. So a slice may
    seem to end up to ``ROUNDING`` tenths after the next begins, or after the slice that it lies in.
    It is cut there.
    """
    ends, open_slices = dict[int, int](), dict[tuple[int, int], list[int]]()
    starts = {i: _tenths(event["ts"]) for i, event in enumerate(events) if event["ph"] == "X"}
    for i in starts:
        ends[i] = _tenths(events[i]["ts"] + events[i]["dur"])
    for i in sorted(starts, key=lambda i: (starts[i], -ends[i])):
        stack = open_slices.setdefault((events[i]["pid"], events[i]["tid"]), [])
        while stack and ends[stack[-1]] <= starts[i] + (ends[stack[-1]] < ends[i]):
            last = stack.pop()
            ends[last] = min(ends[last], starts[i])
        if stack and ends[i] <= ends[stack[-1]] + ROUNDING:
            ends[i] = min(ends[i], ends[stack[-1]])
        stack.append(i)
    return [
        {**event, "ts": _us(starts[i]), "dur": _us(ends[i] - starts[i])} if i in starts else event
        for i, event in enumerate(events)
    ]


def _tenths(us: float) -> int:
    return round(10 * us)


def _us(tenths: int) -> float:
    """Return tenths in microseconds, such that 1,000 times the number truncates to nanoseconds.

    Readers truncate: 32.3 would be 32,299 ns, and overlap a slice that ends at 32,300 ns.
    """
    us = tenths / 10
    return us if int(1000 * us) == 100 * tenths else math.nextafter(us, math.inf)


def _names(trace: Json, title: str) -> Iterator[dict[str, Any]]:
    yield _name("process_name", f"engine of {title}", ENGINE)
    yield _name("process_name", "requests", REQUESTS)
    for thread, name in ((STEPS, "steps"), (HOST, "host"), (MODEL, "model")):
        yield _name("thread_name", name, ENGINE, thread)
    for index, request in enumerate(trace["requests"]):
        yield _name("thread_name", request["id"], REQUESTS, index + 1)


def _name(kind: str, name: str, process: int, thread: int = 0) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _step_events(
    number: int, step: Json, trace: Json, admitted: set[int]
) -> Iterator[dict[str, Any]]:
    """Yield a step's events; add the requests that it admits to ``admitted``."""
    for part, (start, duration) in step["times_us"].items():
        thread = MODEL if part in MODEL_PARTS else HOST
        yield _slice(part, start, duration, ENGINE, thread, {"step": number})
    begin, end = model_span(step)
    yield _slice(_summary(step), begin, end - begin, ENGINE, STEPS, _arguments(number, step))
    drafts = {request: (drafted, accepted) for request, drafted, accepted in step["drafts"]}
    for request, first, tokens, prefill, samples in step["chunks"]:
        arguments = {"step": number, "tokens": [first, first + tokens], "samples": bool(samples)}
        if request in drafts:
            arguments["drafts"], arguments["accepted"] = drafts[request]
        if request not in admitted:
            admitted.add(request)
            if first:
                arguments["cached"] = first
        name = f"prefill {tokens}" if prefill else "decode"
        yield _slice(name, begin, end - begin, REQUESTS, request + 1, arguments)
    for request in step["preempted"]:
        instant = {"ph": "i", "s": "t", "ts": begin, "pid": REQUESTS, "tid": request + 1}
        yield {"name": "preempted", "args": {"step": number}, **instant}
    for name, values in counters(step, trace["num_blocks"]).items():
        yield {"name": name, "ph": "C", "ts": begin, "pid": ENGINE, "tid": 0, "args": values}


def model_span(step: Json) -> tuple[float, float]:
    """Return the start and the end (us) of the model's work in a step."""
    times = step["times_us"]
    spans = [times[part] for part in MODEL_PARTS if part in times] or list(times.values())
    ends = (start + duration for start, duration in spans)
    return min((start for start, _ in spans), default=0.0), max(ends, default=0.0)


def counters(step: Json, num_blocks: int | None) -> dict[str, dict[str, int]]:
    """Return the values of a step's counter tracks: ``{track: {series: value}}``."""
    tokens = {"prefill": 0, "decode": 0, "draft": 0, "padding": step["padding"]}
    for _, _, count, prefill, _ in step["chunks"]:
        tokens["prefill" if prefill else "decode"] += count
    tokens["draft"] = sum(drafted for _, drafted, _ in step["drafts"])
    values = {
        "tokens": tokens,
        "requests": {"scheduled": len(step["chunks"]), "waiting": step["waiting"]},
        "KV bytes": {"used": step["used_bytes"], "reserved": step["reserved_bytes"]},
    }
    if num_blocks is not None:
        free, evictable = step["free_blocks"], step["evictable_blocks"]
        used = num_blocks - 1 - free - evictable
        values["KV blocks"] = {"used": used, "evictable": evictable, "free": free}
    return values


def _summary(step: Json) -> str:
    tokens = counters(step, None)["tokens"]
    return ", ".join(f"{kind} {count}" for kind, count in tokens.items() if count) or "empty"


def _arguments(number: int, step: Json) -> dict[str, Any]:
    names = ("cu_seqlens_q", "padding", "waiting", "free_blocks", "evictable_blocks")
    return {"step": number, **{name: step[name] for name in names}}


def _slice(
    name: str, start: float, duration: float, process: int, thread: int, arguments: Json
) -> dict[str, Any]:
    span = {"ts": start, "dur": duration, "pid": process, "tid": thread}
    return {"name": name, "ph": "X", **span, "args": arguments}
