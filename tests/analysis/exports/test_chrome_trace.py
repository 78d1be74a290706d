"""Chrome's trace events: every step, part, chunk and preemption is an event in its place."""

import itertools
import json
import random
from collections import Counter, defaultdict

import pytest
from traced_steps import traced_steps

from labkit.analysis.exports.chrome_trace import HOST, MODEL, REQUESTS, STEPS, chrome_trace


@pytest.fixture(scope="module", params=["sync", "overlap"])
def exported(request):
    trace = traced_steps(pipeline=request.param)
    return trace, chrome_trace(trace, "b00-p00-base")["traceEvents"]


def test_every_event_has_what_the_format_requires(exported):
    _, events = exported
    required = {"X": {"ts", "dur"}, "i": {"ts", "s"}, "C": {"ts"}, "M": set()}
    for event in events:
        assert {"name", "ph", "pid", "tid", "args"} | required[event["ph"]] == set(event)
    json.loads(json.dumps(events), parse_constant=pytest.fail)


def test_steps_chunks_and_preemptions_are_complete(exported):
    trace, events = exported
    steps, count = trace["steps"], Counter((e["ph"], e["pid"], e["tid"]) for e in events)
    assert count["X", 1, STEPS] == len(steps)
    assert count["X", 1, HOST] + count["X", 1, MODEL] == sum(len(s["times_us"]) for s in steps)
    chunks = [e for e in events if e["ph"] == "X" and e["pid"] == REQUESTS]
    assert len(chunks) == sum(len(s["chunks"]) for s in steps)
    accepted = [sum(d[2] for d in s["drafts"]) for s in steps]
    assert sum(e["args"].get("accepted", 0) for e in chunks) == sum(accepted)
    assert (sum(accepted) > 0) == any(s["drafts"] for s in steps)
    preempted = [e for e in events if e["name"] == "preempted"]
    assert len(preempted) == sum(len(s["preempted"]) for s in steps) > 0
    cached = [e["args"]["cached"] for e in chunks if "cached" in e["args"]]
    assert cached and all(tokens % 4 == 0 for tokens in cached)  # whole blocks of the stub
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {"steps", "host", "model", *(f"r{i}" for i in range(12))}


def test_a_request_s_chunks_and_preemptions_lie_on_the_track_of_its_name(exported):
    trace, events = exported
    names = [request["id"] for request in trace["requests"]]
    requests = [event for event in events if event["pid"] == REQUESTS]
    tracks = {e["tid"]: e["args"]["name"] for e in requests if e["name"] == "thread_name"}
    computed = [names[chunk[0]] for step in trace["steps"] for chunk in step["chunks"]]
    preempted = [names[index] for step in trace["steps"] for index in step["preempted"]]
    for phase, wanted in (("X", computed), ("i", preempted)):
        assert [tracks.get(e["tid"]) for e in requests if e["ph"] == phase] == wanted != []


def crossing_slices(events, nanoseconds):
    """Return the pairs of slices of one track that cross; a viewer truncates to nanoseconds."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start, took = nanoseconds(event["ts"]), nanoseconds(event["dur"])
            tracks[event["pid"], event["tid"]].append((start, start + took))
    return [
        ((a, b), (c, d))
        for spans in tracks.values()
        for (a, b), (c, d) in itertools.combinations(spans, 2)
        if not (b <= c or d <= a or (a <= c and d <= b) or (c <= a and b <= d))
    ]


@pytest.mark.parametrize("pipeline", ["sync", "overlap"])
@pytest.mark.parametrize("older", [False, True])
def test_slices_of_a_track_never_cross(pipeline, older):
    """A viewer draws slices of one track in each other or beside each other.

    In older records, starts and durations are rounded to tenths, so that ends overlap by a tenth.
    """
    rng = random.Random(5)
    moments = itertools.accumulate(rng.expovariate(1e6) for _ in itertools.count())
    trace = traced_steps(clock=lambda: next(moments), pipeline=pipeline)
    steps = trace["steps"]
    if older:
        steps = [
            {**s, "times_us": {k: (t, round(d + rng.choice((0, 0.1)), 1))
                               for k, (t, d) in s["times_us"].items()}}
            for s in steps
        ]  # fmt: skip
    events = chrome_trace({**trace, "steps": steps}, "b00-p00-base")["traceEvents"]
    assert crossing_slices(events, lambda us: int(1000 * us)) == []
    exact = {round(10 * t) for s in steps for t, _ in s["times_us"].values()}
    assert {round(10 * e["ts"]) for e in events if e["ph"] == "X"} <= exact
    recorded = [
        {"ph": "X", "pid": 1, "tid": 1, "ts": start, "dur": took}
        for step in steps
        for part, (start, took) in step["times_us"].items()
        if part != "draft"  # lies in ``schedule``
    ]
    # With overlap, two threads read the clock: parts of newer records may cross, too.
    assert crossing_slices(recorded, lambda us: round(10 * us)) or not older


def test_counters_of_blocks_add_up_to_the_pool(exported):
    trace, events = exported
    for event in events:
        if event["ph"] == "C" and event["name"] == "KV blocks":
            assert sum(event["args"].values()) == trace["num_blocks"] - 1
    tokens = [e["args"] for e in events if e["ph"] == "C" and e["name"] == "tokens"]
    totals = [s["cu_seqlens_q"][-1] for s in trace["steps"]]
    assert [sum(values.values()) for values in tokens] == totals
