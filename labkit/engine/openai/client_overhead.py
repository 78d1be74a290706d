"""What the client alone costs: its own measure of a server that computes nothing."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from labkit.engine.engine_protocol import Counters, EngineError
from labkit.engine.openai.http_client import HttpClient
from labkit.engine.openai.null_server import DEFAULT_MAX_TOKENS, FIRST_TOKEN_MS, TOKEN_INTERVAL_MS
from labkit.engine.openai.server_process import POLL_S, free_port
from labkit.engine.openai.streamed_response import StreamedResponse
from labkit.engine.request import Request, SamplingParams
from labkit.machine.server_supervisor import SupervisedServer, SupervisorError

MEASURED_ROUNDS = 2  # after one that opens the connections
START_TIMEOUT_S, ROUND_TIMEOUT_S = 20.0, 20.0


def measure(streams: int, silence_s: float) -> dict[str, Any]:
    """Serve ``streams`` at once by a null server, a few times over.

    Returns
    -------
    dict
        ``ttft_ms``: the client's part of the time to a first token, from the request's being handed
        in to the null server's having it, and from its writing the first token to the client's
        having it. ``chunk_ms``: from its writing a chunk to the client's having it. ``itl_ms``: by
        how much a gap between two chunks was measured wrong. Each as p50, p99 and max.
        ``chunk_us``: the client's CPU time per chunk. ``streams``, ``chunks``.

    Raises
    ------
    EngineError
        The null server does not answer.
    """
    port = free_port()
    command = [sys.executable, "-m", "labkit.engine.openai.null_server", "--port", str(port)]
    try:
        kept = SupervisedServer(command)
    except SupervisorError as error:
        raise EngineError(f"the null server: {error}") from None
    try:
        client = HttpClient(f"http://127.0.0.1:{port}", silence_s)
        try:
            _wait_until_ready(client)
            _run_round(client, streams, 0)
            cpu = time.process_time()
            rounds = [_run_round(client, streams, n + 1) for n in range(MEASURED_ROUNDS)]
            cpu = time.process_time() - cpu
        finally:
            client.close()
    finally:
        kept.stop()
    return _summarize([one for answers in rounds for one in answers], cpu, streams)


def _wait_until_ready(client: HttpClient) -> None:
    deadline, tries = time.monotonic() + START_TIMEOUT_S, 0
    while time.monotonic() < deadline:
        tries += 1
        if _send_and_collect(client, [f"try {tries}"], 1)[0][1].ended:
            return
        time.sleep(POLL_S)
    raise EngineError("the null server gave no token")


def _run_round(
    client: HttpClient, streams: int, number: int
) -> list[tuple[float, StreamedResponse]]:
    answers = _send_and_collect(
        client, [f"null {number} {n}" for n in range(streams)], DEFAULT_MAX_TOKENS
    )
    if not all(answer.ended for _, answer in answers):
        raise EngineError("the null server did not answer all that it was asked")
    return answers


def _send_and_collect(
    client: HttpClient, keys: Sequence[str], tokens: int
) -> list[tuple[float, StreamedResponse]]:
    """Ask for so many tokens under every key; return when each was asked, and its answer."""
    body = json.dumps({"prompt": "a", "max_tokens": tokens, "stream": True}).encode()
    params = SamplingParams(max_tokens=tokens)
    asked: dict[str, float] = {}
    answers = {key: StreamedResponse(Request(key, (0,), params)) for key in keys}
    for key in keys:
        asked[key] = time.perf_counter()
        client.send(key, "/v1/completions", body)
    live, counters, deadline = set(keys), Counters(), time.monotonic() + ROUND_TIMEOUT_S
    while live and time.monotonic() < deadline:
        client.wait(POLL_S)
        for arrival in client.completed_responses():
            for block in arrival.blocks:
                list(answers[arrival.key].take(block.data, block.at, counters))
            live.discard(arrival.key)
    return [(asked[key], answers[key]) for key in keys]


def _summarize(
    answers: Sequence[tuple[float, StreamedResponse]], cpu_s: float, streams: int
) -> dict[str, Any]:
    chunks = sum(len(answer.null_timings) for _, answer in answers)
    first = [
        (got - asked) + (received - sent)
        for asked, answer in answers
        for got, sent, received in answer.null_timings[:1]
    ]
    late = [received - sent for _, answer in answers for _, sent, received in answer.null_timings]
    wrong = [
        abs((after[2] - before[2]) - (after[1] - before[1]))
        for _, answer in answers
        for before, after in pairwise(answer.null_timings)
    ]
    return {
        "ttft_ms": percentiles_ms(first),
        "chunk_ms": percentiles_ms(late),
        "itl_ms": percentiles_ms(wrong),
        "chunk_us": round(1e6 * cpu_s / chunks, 2),
        "streams": streams,
        "chunks": chunks,
        "first_ms": FIRST_TOKEN_MS,
        "between_ms": TOKEN_INTERVAL_MS,
    }


def percentiles_ms(seconds: Iterable[float]) -> dict[str, float] | None:
    """Return median, 99th percentile and maximum in ms; None where there is nothing."""
    values = np.fromiter(seconds, dtype=np.float64)
    if not values.size:
        return None
    found = np.percentile(values * 1e3, (50, 99, 100))
    return {k: round(float(v), 3) for k, v in zip(("p50", "p99", "max"), found, strict=True)}
