"""Metrics of a life of requests with known times: each has its value under vLLM's name."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from labkit.engine.request import Request
from labkit.engine.sampling.sampling_params import SamplingParams
from labkit.server.generation import prometheus_metrics
from labkit.server.generation.api_generation import RequestTimestamps
from labkit.server.generation.engine_thread import EngineStep
from labkit.server.generation.prometheus_metrics import Metrics

OWN = {"model_name": "tiny", "engine": "0"}


def values(metrics):
    """Return every sample by its name and the labels that only some have."""
    return {
        (sample.name.removeprefix("vllm:"), *sample.labels.keys() - OWN.keys(),
         *(v for k, v in sample.labels.items() if k not in OWN)): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if OWN.items() <= sample.labels.items()
    }  # fmt: skip


def ended(metrics, times, reason, tokens=()):
    """End a request of three prompt tokens at 20 s, after tokens at these times."""
    if tokens:
        metrics.record_prompt(3)
    for now in tokens:
        metrics.record_token(times, now)
    params = SamplingParams(max_tokens=8)
    metrics.record_end(Request("a", (1, 2, 3), params), times, 20.0, reason)


def test_a_request_is_counted_and_its_times_are_observed():
    metrics = Metrics("tiny", {"num_gpu_blocks": "12"})
    ended(metrics, RequestTimestamps(1.0, admitted=3.0), "length", tokens=(6.0, 6.5, 8.0))
    found = values(metrics)
    assert found["cache_config_info", "num_gpu_blocks", "12"] == 1
    for reason, number in {"length": 1, "stop": 0, "abort": 0}.items():
        assert found["request_success_total", "finished_reason", reason] == number
    assert (found["prompt_tokens_total",], found["generation_tokens_total",]) == (3, 3)
    for name, total, count in (
        ("time_to_first_token_seconds", 5.0, 1),
        ("inter_token_latency_seconds", 2.0, 2),
        ("e2e_request_latency_seconds", 19.0, 1),
        ("request_queue_time_seconds", 2.0, 1),
        ("request_inference_time_seconds", 17.0, 1),
        ("request_prefill_time_seconds", 3.0, 1),
        ("request_decode_time_seconds", 14.0, 1),
        ("request_prompt_tokens", 3, 1),
        ("request_generation_tokens", 3, 1),
        ("request_params_max_tokens", 0, 0),  # the service observes what was asked for
        ("request_params_n", 0, 0),
    ):
        assert (found[f"{name}_sum",], found[f"{name}_count",]) == (total, count), name
    metrics.render()  # gaps are observed once
    assert values(metrics) == found


def test_a_request_that_never_ran_or_never_generated_has_only_the_times_it_reached():
    metrics = Metrics("tiny", {})
    ended(metrics, RequestTimestamps(1.0), "abort")
    ended(metrics, RequestTimestamps(5.0, admitted=4.0), "stop")  # the clocks of two threads
    found = values(metrics)
    counts = {name[0][:-6]: n for name, n in found.items() if name[0].endswith("_count")}
    assert counts["e2e_request_latency_seconds"] == 2
    assert counts["request_queue_time_seconds"] == counts["request_inference_time_seconds"] == 1
    assert found["request_queue_time_seconds_sum",] == 0
    assert counts["request_prefill_time_seconds"] == counts["request_decode_time_seconds"] == 0


def test_a_step_adds_what_it_computed_and_sets_the_engine_s_counters():
    metrics = Metrics("tiny", {})
    own = {"prefix.queried_tokens": 7, "prefix.hit_tokens": 6, "preemptions": 5,
           "spec.drafted.pos0": 4, "spec.drafted": 3, "spec.accepted": 2}  # fmt: skip
    for computed, kv_usage in ((5, 0.25), (12, None), (12, 0.0)):
        counters = {"tokens.computed": computed, **own}
        metrics.record_step(EngineStep(0.0, 1.0, [], set(), counters, kv_usage))
        found = values(metrics)
        assert found["kv_cache_usage_perc",] == (0.25 if kv_usage != 0 else 0)
    assert (found["iteration_tokens_total_sum",], found["iteration_tokens_total_count",]) == (12, 3)
    assert [
        found[f"{name}_total",]
        for name in (
            "prefix_cache_queries", "prefix_cache_hits", "num_preemptions",
            "spec_decode_num_drafts", "spec_decode_num_draft_tokens",
            "spec_decode_num_accepted_tokens",
        )
    ] == [*own.values()]  # fmt: skip
    metrics.record_step(EngineStep(0.0, 1.0, [], set(), {}, None))  # not known: as before
    found = values(metrics)
    assert (found["kv_cache_usage_perc",], found["num_preemptions_total",]) == (0, 0)


def test_gaps_are_observed_before_they_fill_memory(monkeypatch):
    monkeypatch.setattr(prometheus_metrics, "MAX_PENDING_GAPS", 3)
    metrics, times = Metrics("tiny", {}), RequestTimestamps(0.0)
    for now in range(5):  # four gaps
        metrics.record_token(times, float(now))
        assert len(metrics._pending_gaps_s) == [0, 1, 2, 0, 1][now]
    assert values(metrics)["inter_token_latency_seconds_sum",] == pytest.approx(4)


def test_buckets_are_vllm_s():
    """Dashboards compute percentiles from them."""
    steps = (1, 2.5, 5)
    fine = [s * 10**e for e in (-3, -2) for s in steps]
    tens = [0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60]
    assert pytest.approx([*fine, *tens]) == prometheus_metrics.SHORT_BUCKETS_S
    longer = [0.01, 0.05, *tens, 120, 300, 600]
    assert pytest.approx(longer) == prometheus_metrics.LONG_BUCKETS_S
    assert tuple(2**i for i in range(16)) == prometheus_metrics.COUNT_BUCKETS
    bounds = [key[-1] for key in values(Metrics("tiny", {})) if key[0] == "request_params_n_bucket"]
    assert bounds == [*(f"{2.0**i}" for i in range(8)), "+Inf"]
