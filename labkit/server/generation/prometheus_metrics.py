"""Prometheus metrics under vLLM's names, so that vLLM's dashboards work.

The counters of the prefix cache, preemptions and speculative decoding are the engine's own
counters, as they were after its latest step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily

from labkit.engine.request import Request
from labkit.server.generation.api_generation import RequestTimestamps
from labkit.server.generation.engine_thread import EngineStep

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_PENDING_GAPS = 4096
LABELS = ("model_name", "engine")

SHORT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
LONG_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
COUNT_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
HISTOGRAMS = {
    "time_to_first_token_seconds": ("from a request's arrival to its first token", LONG_BUCKETS_S),
    "inter_token_latency_seconds": ("between two tokens of a request", SHORT_BUCKETS_S),
    "e2e_request_latency_seconds": ("from a request's arrival to its end", LONG_BUCKETS_S),
    "request_queue_time_seconds": ("from a request's arrival to its first step", LONG_BUCKETS_S),
    "request_inference_time_seconds": ("from a request's first step to its end", LONG_BUCKETS_S),
    "request_prefill_time_seconds": (
        "from a request's first step to its first token",
        LONG_BUCKETS_S,
    ),
    "request_decode_time_seconds": ("from a request's first token to its end", LONG_BUCKETS_S),
    "request_prompt_tokens": ("prompt tokens of a request", COUNT_BUCKETS),
    "request_generation_tokens": ("generated tokens of a request", COUNT_BUCKETS),
    "request_params_n": ("choices per request (n)", COUNT_BUCKETS[:8]),
    "request_params_max_tokens": ("max_tokens of a request", COUNT_BUCKETS),
    "iteration_tokens_total": ("tokens computed in a step", COUNT_BUCKETS),
}
# (engine counter, description) by the metric's name.
ENGINE_COUNTERS = {
    "prefix_cache_queries": ("prefix.queried_tokens", "prompt tokens looked up in the cache"),
    "prefix_cache_hits": ("prefix.hit_tokens", "prompt tokens found in the cache"),
    "num_preemptions": ("preemptions", "requests preempted"),
    "spec_decode_num_drafts": ("spec.drafted.pos0", "drafts proposed"),
    "spec_decode_num_draft_tokens": ("spec.drafted", "draft tokens proposed"),
    "spec_decode_num_accepted_tokens": ("spec.accepted", "draft tokens accepted"),
}


class Metrics:
    """One server's metrics, and a collector of its engine's counters for Prometheus.

    ``model``: the model's name in requests, which is also the value of the label ``model_name``.
    ``cache_config``: additional labels of ``vllm:cache_config_info``, and their values.
    """

    def __init__(self, model: str, cache_config: Mapping[str, str]) -> None:
        self._registry = CollectorRegistry()
        self.labels = (model, "0")
        self.running = self._gauge("num_requests_running", "running requests")
        self.waiting = self._gauge("num_requests_waiting", "waiting requests")
        self._kv_usage = self._gauge(
            "kv_cache_usage_perc", "share of the KV memory that is reserved, 0 to 1"
        )
        self._prompt_tokens = self._counter(
            "prompt_tokens", "prompt tokens of requests that have their first token"
        )
        self._generation_tokens = self._counter("generation_tokens", "generated tokens")
        self._finished = Counter(
            "vllm:request_success",
            "finished requests",
            [*LABELS, "finished_reason"],
            registry=self._registry,
        )
        for reason in ("stop", "length", "abort"):  # exported as 0 from the start
            self._finished.labels(*self.labels, reason)
        info = Gauge(
            "vllm:cache_config_info",
            "configuration of the KV cache",
            [*LABELS, *cache_config],
            registry=self._registry,
        )
        info.labels(*self.labels, *cache_config.values()).set(1)
        self._histograms = {
            name: Histogram(
                f"vllm:{name}", description, LABELS, registry=self._registry, buckets=buckets
            ).labels(*self.labels)
            for name, (description, buckets) in HISTOGRAMS.items()
        }
        # Inter-token latencies (seconds), observed in batches because each observation is slow.
        self._pending_gaps_s: list[float] = []
        self._engine_counters: Mapping[str, float] = {}
        self._registry.register(self)

    def _gauge(self, name: str, description: str) -> Gauge:
        gauge = Gauge(f"vllm:{name}", description, LABELS, registry=self._registry)
        return gauge.labels(*self.labels)

    def _counter(self, name: str, description: str) -> Counter:
        counter = Counter(f"vllm:{name}", description, LABELS, registry=self._registry)
        return counter.labels(*self.labels)

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram."""
        self._histograms[name].observe(value)

    def record_prompt(self, num_tokens: int) -> None:
        """Record that a prompt has been computed: its first token was generated."""
        self._prompt_tokens.inc(num_tokens)

    def record_token(self, times: RequestTimestamps, now: float) -> None:
        """Record a token generated at the time ``now`` (seconds), and update ``times`` with it."""
        times.tokens += 1
        self._generation_tokens.inc()
        if times.first is None:
            times.first = now
            self.observe("time_to_first_token_seconds", now - times.arrived)
        elif times.last is not None:
            self._pending_gaps_s.append(now - times.last)
            if len(self._pending_gaps_s) >= MAX_PENDING_GAPS:
                self._observe_gaps()
        times.last = now

    def _observe_gaps(self) -> None:
        for gap in self._pending_gaps_s:
            self.observe("inter_token_latency_seconds", gap)
        self._pending_gaps_s.clear()

    def record_step(self, step: EngineStep) -> None:
        """Record an engine step: the tokens computed, the engine's counters and the KV usage."""
        if step.counters is not None:
            before = self._engine_counters.get("tokens.computed", 0.0)
            computed = step.counters.get("tokens.computed", 0.0) - before
            self.observe("iteration_tokens_total", computed)
            self._engine_counters = step.counters
        if step.kv_usage is not None:
            self._kv_usage.set(step.kv_usage)

    def record_end(
        self, request: Request, times: RequestTimestamps, now: float, reason: str
    ) -> None:
        """Record the end of a request for the given reason: stop, length or abort."""
        prompt_tokens = len(request.prompt_token_ids)
        self._finished.labels(*self.labels, reason).inc()
        self.observe("request_prompt_tokens", prompt_tokens)
        self.observe("request_generation_tokens", times.tokens)
        self.observe("e2e_request_latency_seconds", now - times.arrived)
        if times.admitted is None:
            return
        self.observe("request_queue_time_seconds", max(0.0, times.admitted - times.arrived))
        self.observe("request_inference_time_seconds", now - times.admitted)
        if times.first is not None:
            self.observe("request_prefill_time_seconds", times.first - times.admitted)
            self.observe("request_decode_time_seconds", now - times.first)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        self._observe_gaps()
        return generate_latest(self._registry)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield every counter of the engine. Those that the engine does not have are 0."""
        for name, (counter, description) in ENGINE_COUNTERS.items():
            family = CounterMetricFamily(f"vllm:{name}", description, labels=LABELS)
            family.add_metric(self.labels, self._engine_counters.get(counter, 0.0))
            yield family
