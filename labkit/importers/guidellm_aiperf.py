"""GuideLLM, AIPerf and genai-perf: a call of the load generator is a run.

The three may have measured the same server many times: then the runs share its process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.importers.imported_run import (
    Fields,
    ImportedRun,
    ResultFormat,
    first_item,
    has_fields,
    is_number,
    metric,
    seconds,
)
from labkit.records import CaseRecord, Metric

# GuideLLM's metrics of successful requests: our name, their statistic, and whether it is primary.
GUIDELLM: Mapping[str, tuple[tuple[str, str, bool], ...]] = {
    "output_tokens_per_second": (("output_tok_s", "mean", True),),
    "tokens_per_second": (("total_tok_s", "mean", False),),
    "requests_per_second": (("request_s", "mean", False),),
    "time_to_first_token_ms": (("ttft_p50_ms", "p50", True), ("ttft_p99_ms", "p99", False)),
    "inter_token_latency_ms": (
        ("tpot_excl_first_p50_ms", "p50", True), ("tpot_excl_first_p99_ms", "p99", False),
    ),
    "time_per_output_token_ms": (("tpot_incl_first_mean_ms", "mean", False),),
}  # fmt: skip
GUIDELLM_REPORT = {"type_", "metadata", "args", "config", "benchmarks", "conclusions"}
GUIDELLM_BENCHMARK = {
    "type_", "config", "scheduler_state", "scheduler_metrics", "metrics", "requests", "warnings",
    "start_time", "end_time", "duration", "warmup_duration", "cooldown_duration",
}  # fmt: skip
GUIDELLM_METRICS = {
    *GUIDELLM, "request_totals", "request_concurrency", "request_latency",
    "request_streaming_iterations_count", "prompt_token_count", "output_token_count",
    "total_token_count", "prompt_tokens_per_second", "output_tokens_per_iteration",
    "iter_tokens_per_iteration", "text", "image", "video", "audio",
}  # fmt: skip
STATUSES = {"successful", "errored", "incomplete", "total"}
SUMMARY = {
    "mean", "median", "mode", "variance", "std_dev", "min", "max", "count", "total_sum",
    "percentiles", "pdf", "cumulative_distribution_function", "mean_ci", "percentile_cis",
}  # fmt: skip
PERCENTILE = r"p\d+"
STATISTICS = {"unit", "avg", "min", "max", "std", "count", "sum"}  # of AIPerf
# What was asked, in the config that a tool repeats in its report: AIPerf, older versions of it and
# genai-perf; GuideLLM, and older versions of it.
ASKED = (
    ("phases",), ("datasets",), ("loadgen",), ("perf_analyzer", "stimulus"), ("input", "prompt"),
    ("input", "synthetic_tokens"), ("input", "output_tokens"),
)  # fmt: skip
GUIDELLM_ASKED = (
    ("config", "spec", "data"), ("config", "spec", "constraints"), ("config", "spec", "profile"),
    ("config", "benchmarks"), ("args", "data"), ("args", "data_args"), ("args", "max_requests"),
    ("args", "max_seconds"), ("args", "rate"),
)  # fmt: skip
# AIPerf's metrics: their unit, and as above. Its inter-token latency is labkit's TPOT.
AIPERF: Mapping[str, tuple[tuple[str, ...], tuple[tuple[str, str, bool], ...]]] = {
    "output_token_throughput": (("tokens/sec",), (("output_tok_s", "avg", True),)),
    "request_throughput": (("requests/sec",), (("request_s", "avg", False),)),
    "time_to_first_token": (
        ("ms",), (("ttft_p50_ms", "p50", True), ("ttft_p99_ms", "p99", False)),
    ),
    "inter_token_latency": (
        ("ms",),
        (("tpot_excl_first_p50_ms", "p50", True), ("tpot_excl_first_p99_ms", "p99", False)),
    ),
    "request_latency": (("ms",), (("e2e_p50_ms", "p50", False), ("e2e_p99_ms", "p99", False))),
}  # fmt: skip


def _read_guidellm(document: Any, file: Path) -> Iterator[ImportedRun]:
    """Yield one run. A case is a strategy, such as a rate of requests."""
    cases: list[CaseRecord] = []
    failures, starts, unjudged = [], [], dict[str, None]()
    given, generated = dict[str, float](), dict[str, float]()
    report = Fields.of(document, f"{file}: ")
    report.only(GUIDELLM_REPORT)
    for benchmark in report.each("benchmarks"):
        benchmark.only(GUIDELLM_BENCHMARK)
        strategy = benchmark.at("config").at("strategy")
        rates = [strategy.data.get(key) for key in ("rate", "streams", "max_concurrency")]
        name = " ".join([strategy.text("type_"), *(str(rate) for rate in rates[:2] if rate)])
        metrics = benchmark.at("metrics")
        unjudged |= dict.fromkeys(key for key in metrics.data if key not in GUIDELLM_METRICS)
        own = (
            metric(ours, [_statistic(metrics.at(theirs), which)], primary=primary)
            for theirs, wanted in GUIDELLM.items()
            if theirs in metrics
            for ours, which, primary in wanted
        )
        cases.append(CaseRecord(name, metrics=tuple(own)))
        for amounts, key in ((given, "prompt_token_count"), (generated, "output_token_count")):
            if key in metrics:  # per request, because the number of requests may follow from time
                amounts[f"{key} of {name}"] = _statistic(metrics.at(key), "mean")
        scheduler = benchmark.at("scheduler_metrics")
        starts.append(scheduler.number("start_time"))
        made = scheduler.at("requests_made")
        made.only(STATUSES)
        if errored := made.number("errored"):
            failures.append(f"{name}: {errored:.0f} requests failed")
    yield ImportedRun(
        "GuideLLM",
        file,
        tuple(cases),
        min(starts),
        work=_asked(report.data, GUIDELLM_ASKED),
        given=given,
        generated=generated,
        failure="; ".join(failures) or None,
        unjudged=tuple(unjudged),
    )


def _statistic(measured: Fields, which: str) -> float:
    measured.only(STATUSES)
    summary = measured.at("successful")
    summary.only(SUMMARY)
    percentiles = summary.at("percentiles")
    percentiles.only((), PERCENTILE)
    return summary.number(which) if which == "mean" else percentiles.number(which)


def _read_aiperf(document: Any, file: Path) -> Iterator[ImportedRun]:
    report = Fields.of(document, f"{file}: ")
    metrics: list[Metric] = []
    for theirs, (units, wanted) in AIPERF.items():
        if theirs not in report:
            continue
        one = report.at(theirs)
        one.only(STATISTICS, PERCENTILE)
        if one.text("unit") not in units:
            raise one.error_at("unit", f"is {one.text('unit')!r}, not {units[0]!r}")
        for ours, which, primary in wanted:
            metrics.append(metric(ours, [one.number(which)], primary=primary))
    errors = "error_request_count"
    failed = report.at(errors).number("avg") if errors in report else 0.0
    failure = f"{failed:.0f} requests failed" if failed else None
    if report.data.get("was_cancelled"):
        failure = "the run was cancelled"
    measured = [
        k for k, value in report.data.items() if isinstance(value, dict) and "unit" in value
    ]
    # Measurements are objects with a unit; texts and lists describe the run.
    report.only([key for key, value in report.data.items() if not is_number(value)])
    yield ImportedRun(
        "AIPerf" if "schema_version" in report else "genai-perf",
        file,
        (CaseRecord("all", metrics=tuple(metrics)),),
        started=seconds(report, "start_time") if "start_time" in report else None,
        work=_asked(report.data["input_config"], ASKED),
        given=_mean(report, "input_sequence_length"),
        generated=_mean(report, "output_sequence_length"),
        failure=failure,
        unjudged=tuple(key for key in measured if key not in AIPERF),
    )


def _mean(report: Fields, key: str) -> Mapping[str, float]:
    return {key: report.at(key).number("avg")} if key in report else {}


def _asked(config: Any, paths: Sequence[Sequence[str]]) -> Mapping[str, Any]:
    """Return the load, the data and the lengths of a config, as far as it names them."""
    found = {}
    for path in paths:
        value = config
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            found[".".join(path)] = value
    return found


FORMATS = (
    ResultFormat(
        "GuideLLM",
        lambda document: "scheduler_metrics" in first_item(document, "benchmarks"),
        _read_guidellm,
    ),
    ResultFormat(
        "AIPerf, genai-perf", has_fields("input_config", "request_throughput"), _read_aiperf
    ),
)
