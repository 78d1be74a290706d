"""The load generator's overhead: an open loop against an engine that computes nothing.

    python benchmarks/open_loop_overhead.py [--rate 50] [--seconds 20]

In every step, the engine sleeps and returns a token for each request, without computing it. So the
process's CPU time is that of the load generator: waiting, sending, time-stamping tokens, sampling
the engine's state. The target is under 5 % of a core at 50 requests/s.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from labkit.config import ArrivalKind, Arrivals, Workload
from labkit.engine.engine_protocol import TokenEvent
from labkit.workload.requests.serving_session import ServingSession
from labkit.workload.tokenized_prompt import Prompt

STEP_S = 0.01  # the engine sleeps while it works, so its time is not CPU time
TOKENS = 20


class Idle:
    """An engine whose step sleeps 10 ms and returns a token for every live request."""

    name = "stub"

    def __init__(self) -> None:
        self._left: dict[str, int] = {}

    def submit(self, request: Any) -> None:
        """Queue a request."""
        self._left[request.request_id] = request.params.max_tokens

    def has_work(self) -> bool:
        """Return whether a request is live."""
        return bool(self._left)

    def step(self) -> list[TokenEvent]:
        """Sleep 10 ms, then return a token for every live request."""
        time.sleep(STEP_S)
        events = []
        for request_id in list(self._left):
            self._left[request_id] -= 1
            end = not self._left[request_id]
            events.append(TokenEvent(request_id, 1, "length" if end else None, margin=1.0))
            if end:
                del self._left[request_id]
        return events

    def counters(self) -> dict[str, float]:
        """Return no counters."""
        return {}


def main() -> None:
    """Run the open loop and print the CPU time of the load generator and its lateness."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rate", type=float, default=50.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long")
    options = parser.parse_args()
    count = max(2, int(options.rate * options.seconds))
    prompts = [Prompt(f"r{i}", (1, 2, 3), TOKENS) for i in range(count)]
    arrivals = Arrivals(ArrivalKind.poisson, options.rate)
    workload = Workload(name="open_loop", arrivals=arrivals, concurrency=None)
    session = ServingSession(Idle(), prompts, workload, seed=0, vocab_size=8)  # type: ignore[arg-type]
    began, cpu = time.perf_counter(), time.process_time()
    measured = session.measure(lambda text: None)
    spent, used = time.perf_counter() - began, time.process_time() - cpu
    traffic = measured.cases[0].notes["traffic"]
    print(f"{count} requests in {spent:.1f} s: {traffic['sent_per_s']:.1f}/s sent")
    print(f"the process used {100 * used / spent:.2f} % of a core,")
    print(f"recorded for the sender alone: {100 * traffic['sender_cpu_share']:.2f} % of a core")
    late = traffic["late_ms"]
    print(
        f"late by {late['p50']:.3f} ms (median), {late['p99']:.3f} (p99), {late['max']:.3f} (max)"
    )


if __name__ == "__main__":
    main()
