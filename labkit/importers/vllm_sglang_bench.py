"""``vllm bench`` and SGLang's ``bench_serving``: a call of the client is a run.

The two name their results alike, because SGLang's client began as a copy of vLLM's. Both may have
measured the same server many times: then the runs share its process.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from labkit.importers.imported_run import (
    Fields,
    ImportedRun,
    ResultFormat,
    has_fields,
    metric,
    seconds,
)
from labkit.records import CaseRecord, Metric

WORK = (
    "num_prompts", "request_rate", "max_concurrency", "burstiness", "dataset_name",
    "random_input_len", "random_output_len", "random_range_ratio", "sharegpt_output_len",
    "ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps",
)  # fmt: skip
LATENCIES = {"ttft": "ttft", "tpot": "tpot_excl_first", "itl": "itl_chunk"}
E2E = {"e2el": "e2e", "e2e_latency": "e2e"}  # vLLM's name, and SGLang's
STATISTIC = re.compile(r"(mean|median|std|p[\d.]+)_(ttft|tpot|itl|e2el|e2e_latency)_ms")
KNOWN = {
    *WORK, "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "output_throughput", "total_token_throughput", "total_throughput",
    "input_throughput", "request_goodput", "request_goodput:", "rtfx", "concurrency",
    "max_output_tokens_per_s", "max_concurrent_requests", "total_input_text_tokens",
    "total_input_vision_tokens", "total_output_tokens_retokenized", "accept_length", "run_number",
    "max_concurrent_requests_per_s",
}  # fmt: skip
WARM_UP = -1  # the ``run_number`` of a warm-up of ``vllm bench sweep serve``
VLLM_DATE = "%Y%m%d-%H%M%S"
VLLM_THROUGHPUT = {
    "model_id", "elapsed_time", "num_requests", "total_num_tokens", "requests_per_second",
    "tokens_per_second",
}  # fmt: skip


def _read_vllm_serve(document: Any, file: Path) -> Iterator[ImportedRun]:
    for result in Fields.listed(document, file, "result"):
        if result.data.get("run_number") == WARM_UP:
            raise result.error_at("run_number", "is -1, a warm-up's; leave this file out")
        yield ImportedRun(
            "vllm bench serve",
            file,
            _case(result, "total_token_throughput"),
            started=seconds(result, "date", VLLM_DATE),
            work=_work(result),
            **_facts(result),
            settings={k: result.data.get(k) for k in ("backend", "model_id", "tokenizer_id")},
            failure=_failure(result),
        )


def _facts(result: Fields) -> dict[str, Any]:
    """Return what is read alike from results of vLLM's client and of SGLang's."""
    # Numbers that labkit does not know, such as those of later versions.
    numbers = [key for key, value in result.data.items() if isinstance(value, int | float)]
    unknown = (key for key in numbers if key not in KNOWN and not STATISTIC.fullmatch(key))
    return {
        "given": result.known_numbers("total_input_tokens"),
        "generated": result.known_numbers("total_output_tokens"),
        "unjudged": tuple(unknown),
        "digest": hashlib.sha256(json.dumps(result.data, sort_keys=True).encode()).hexdigest(),
    }


def _failure(result: Fields) -> str | None:
    """Return how many requests failed, or None.

    A small data set has fewer requests than ``num_prompts``, which is -1 for all of them, so that
    the difference counts only in older files, which do not say how many failed.
    """
    asked, completed = result.number("num_prompts"), result.number("completed")
    failed = result.number("failed") if "failed" in result else max(asked - completed, 0.0)
    if failed:
        return f"{failed:.0f} of {completed + failed:.0f} requests failed"
    return None if completed else "no request was served"


def _read_sglang(document: Any, file: Path) -> Iterator[ImportedRun]:
    for result in Fields.listed(document, file, "result"):
        completed = result.number("completed")
        yield ImportedRun(
            "SGLang bench_serving",
            file,
            _case(result, "total_throughput"),
            work={**_work(result), "completed": completed},  # it does not say how many failed
            **_facts(result),
            settings={key: result.data.get(key) for key in ("backend", "tag")},
            failure=None if completed else "no request was served",
        )


def _case(result: Fields, total: str) -> tuple[CaseRecord, ...]:
    """Return the metrics of a run, in labkit's names."""
    duration = result.number("duration")
    result.agrees("output_throughput", result.number("total_output_tokens") / duration)
    result.agrees("request_throughput", result.number("completed") / duration)
    names = {
        "output_throughput": ("output_tok_s", True),
        total: ("total_tok_s", False),
        "request_throughput": ("request_s", False),
        "request_goodput": ("goodput_req_s", False),  # null without vLLM's --goodput
        "request_goodput:": ("goodput_req_s", False),  # its name in older versions
    }
    for theirs, ours in {**LATENCIES, **E2E}.items():
        names[f"median_{theirs}_ms"] = f"{ours}_p50_ms", ours in ("ttft", "tpot_excl_first")
        names[f"p99_{theirs}_ms"] = f"{ours}_p99_ms", False
    names["mean_tpot_ms"] = "tpot_excl_first_mean_ms", False
    required = ("output_throughput", "median_ttft_ms", "median_tpot_ms")
    metrics: list[Metric] = [
        metric(ours, [result.number(theirs)], primary=primary)
        for theirs, (ours, primary) in names.items()
        if theirs in result or theirs in required
    ]
    return (CaseRecord("all", metrics=tuple(metrics)),)


def _work(result: Fields) -> Mapping[str, Any]:
    return {key: result.data[key] for key in WORK if key in result.data}


def _read_vllm_throughput(document: Any, file: Path) -> Iterator[ImportedRun]:
    """Yield one run: a call of the program, with an engine of its own."""
    result = Fields.of(document, f"{file}: ")
    result.only(VLLM_THROUGHPUT)
    elapsed, tokens = result.number("elapsed_time"), result.number("total_num_tokens")
    result.agrees("tokens_per_second", tokens / elapsed)
    metrics = (
        metric("total_tok_s", [result.number("tokens_per_second")]),
        metric("request_s", [result.number("requests_per_second")], primary=False),
    )
    yield ImportedRun(
        "vllm bench throughput",
        file,
        (CaseRecord("all", metrics=metrics),),
        work={"num_requests": result.number("num_requests")},
        given={"total_num_tokens": tokens},
        settings={"model_id": result.data.get("model_id")},
    )


FORMATS = (
    ResultFormat(
        "vllm bench serve",
        has_fields("num_prompts", "request_throughput", listed=True),
        _read_vllm_serve,
    ),
    ResultFormat("vllm bench throughput", has_fields("tokens_per_second"), _read_vllm_throughput),
    ResultFormat(
        "SGLang bench_serving",
        has_fields("random_range_ratio", "total_throughput", listed=True),
        _read_sglang,
    ),
)
