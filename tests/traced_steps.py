"""A trace with preemptions, shared prefixes and drafts, for tests of its readers."""

import itertools
import sys
from pathlib import Path

ENGINE_TESTS = str(Path(__file__).parent / "engine")


def traced_steps(limit=1_000, clock=None, **options):
    """Serve twelve requests and return the trace's report. The default clock counts its reads."""
    if ENGINE_TESTS not in sys.path:
        sys.path.append(ENGINE_TESTS)
    from stub_engine import Adversary, make_engine, request, run

    from labkit import config

    drafts = {} if options.get("pipeline") == "overlap" else {"proposer": Adversary()}
    chosen = {
        "prefixes": "radix",
        "reservation": config.Reservation.optimistic,
        "watermark": 0,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 12,
        **drafts,
        **options,
    }
    engine, _ = make_engine(14, **chosen)
    ticks = itertools.count()
    trace = engine.trace_steps(limit, clock or (lambda: next(ticks) / 1e6))
    prompt = list(range(8))
    run(engine, [request(f"r{i}", [*prompt, i, i], 14 + i) for i in range(12)])
    return trace.report()
