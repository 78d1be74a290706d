"""The latency and CPU time that labkit's own HTTP client adds, measured with a null server."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from labkit.engine.engine_protocol import Counters, EngineError
from labkit.engine.openai.http_client import HttpClient
from labkit.engine.openai.null_server import DEFAULT_MAX_TOKENS, FIRST_TOKEN_MS, TOKEN_INTERVAL_MS
from labkit.engine.openai.server_process import POLL_S, free_port
from labkit.engine.openai.streamed_response import StreamedResponse
from labkit.engine.request import Request
from labkit.engine.sampling.sampling_params import SamplingParams
from labkit.machine.processes.server_supervisor import SupervisedServer, SupervisorError

MEASURED_ROUNDS = 1  # after one warm-up round
START_TIMEOUT_S, ROUND_TIMEOUT_S = 20.0, 20.0


class TimedResponse(NamedTuple):
    """A response, and the time at which its request was submitted (``time.perf_counter``)."""

    submitted: float
    response: StreamedResponse


def measure(streams: int, silence_s: float) -> dict[str, Any]:
    """Measure the client's overhead with a null server that serves ``streams`` concurrent requests.

    ``silence_s`` is passed to ``HttpClient``. Raises ``EngineError`` if the null server does not
    start or does not answer.

    Three values of the result are dicts of p50, p99 and max in ms. ``ttft_ms`` is the client's part
    of the time to first token: from the request's submission to its arrival at the null server,
    plus from the null server's write of the first token to its arrival at the client. ``chunk_ms``
    is the time from the write of a chunk to its arrival at the client. ``itl_ms`` is the error of
    the measured gap between two chunks. ``chunk_us`` is the client's CPU time per chunk (us),
    ``streams`` the number of concurrent requests, ``chunks`` that of the measured chunks.
    ``first_ms`` and ``between_ms`` are the null server's settings.
    """
    port = free_port()
    command = [sys.executable, "-m", "labkit.engine.openai.null_server", "--port", str(port)]
    try:
        server = SupervisedServer(command)
    except SupervisorError as error:
        raise EngineError(f"the null server failed: {error}") from None
    with ExitStack() as cleanup:
        cleanup.callback(server.stop)
        client = HttpClient(f"http://127.0.0.1:{port}", silence_s)
        cleanup.callback(client.close)
        _wait_until_ready(client)
        _run_round(client, streams, 0)
        cpu = time.process_time()
        rounds = [_run_round(client, streams, n + 1) for n in range(MEASURED_ROUNDS)]
        cpu = time.process_time() - cpu
    return _summarize([timed for responses in rounds for timed in responses], cpu, streams)


def _wait_until_ready(client: HttpClient) -> None:
    deadline, tries = time.monotonic() + START_TIMEOUT_S, 0
    while time.monotonic() < deadline:
        tries += 1
        (timed,) = _send_and_collect(client, [f"try {tries}"], 1)
        if timed.response.ended:
            return
        time.sleep(POLL_S)
    raise EngineError(f"the null server returned no token within {START_TIMEOUT_S:g} s")


def _run_round(client: HttpClient, streams: int, number: int) -> list[TimedResponse]:
    keys = [f"null {number} {n}" for n in range(streams)]
    responses = _send_and_collect(client, keys, DEFAULT_MAX_TOKENS)
    unfinished = sum(not timed.response.ended for timed in responses)
    if unfinished:
        raise EngineError(
            f"the null server left {unfinished} of {streams} requests unfinished after "
            f"{ROUND_TIMEOUT_S:g} s"
        )
    return responses


def _send_and_collect(client: HttpClient, keys: Sequence[str], tokens: int) -> list[TimedResponse]:
    """Send a request under each key; return the responses in order, late ones incomplete."""
    body = json.dumps({"prompt": "a", "max_tokens": tokens, "stream": True}).encode()
    params = SamplingParams(max_tokens=tokens)
    submitted: dict[str, float] = {}
    responses = {key: StreamedResponse(Request(key, (0,), params)) for key in keys}
    for key in keys:
        submitted[key] = time.perf_counter()
        client.send(key, "/v1/completions", body)
    live, counters, deadline = set(keys), Counters(), time.monotonic() + ROUND_TIMEOUT_S
    while live and time.monotonic() < deadline:
        client.wait(POLL_S)
        for completed in client.completed_responses():
            for part in completed.parts:
                list(responses[completed.key].feed(part.data, part.at, counters))
            live.discard(completed.key)
    return [TimedResponse(submitted[key], responses[key]) for key in keys]


def _summarize(responses: Sequence[TimedResponse], cpu_s: float, streams: int) -> dict[str, Any]:
    timings = [timed.response.null_timings for timed in responses]
    num_chunks = sum(map(len, timings))
    first_chunk_s = [
        (first.request_received - timed.submitted) + (first.chunk_received - first.chunk_sent)
        for timed in responses
        for first in timed.response.null_timings[:1]
    ]
    chunk_s = [chunk.chunk_received - chunk.chunk_sent for chunks in timings for chunk in chunks]
    gap_error_s = [
        abs((b.chunk_received - a.chunk_received) - (b.chunk_sent - a.chunk_sent))
        for chunks in timings
        for a, b in pairwise(chunks)
    ]
    return {
        "ttft_ms": percentiles_ms(first_chunk_s),
        "chunk_ms": percentiles_ms(chunk_s),
        "itl_ms": percentiles_ms(gap_error_s),
        "chunk_us": round(1e6 * cpu_s / num_chunks, 2),
        "streams": streams,
        "chunks": num_chunks,
        "first_ms": FIRST_TOKEN_MS,
        "between_ms": TOKEN_INTERVAL_MS,
    }


def percentiles_ms(seconds: Iterable[float]) -> dict[str, float] | None:
    """Return median, 99th percentile and maximum in ms, or None for no values."""
    values = np.fromiter(seconds, dtype=np.float64)
    if not values.size:
        return None
    results = np.percentile(values * 1e3, (50, 99, 100))
    return {k: round(float(v), 3) for k, v in zip(("p50", "p99", "max"), results, strict=True)}
