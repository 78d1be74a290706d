"""Request runs as vLLM's serving benchmark writes them.

Names and definitions are vLLM's: TTFT from sending to the first token, TPOT is
``(E2E - TTFT) / (tokens - 1)``, ITL per chunk, pooled over all requests; sums of times in
ms, the lists per request in seconds. Texts are not recorded, so ``generated_texts`` is
left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from labkit.analysis.cell_analysis import CellData
from labkit.analysis.rows import MEASURED
from labkit.records import Arm, Record

Json = Mapping[str, Any]


def vllm_runs(data: CellData) -> Iterator[dict[str, Any]]:
    """Give one result per run that served requests and recorded their times."""
    arms = {arm.name: arm for arm in data.arms}
    for number, record in enumerate(data.records):
        for case in record.cases:
            requests = case.notes.get("requests")
            if requests and record.outcome in MEASURED:
                yield _run(number, record, arms[record.arm], requests)


def _run(number: int, record: Record, arm: Arm, requests: Sequence[Json]) -> dict[str, Any]:
    workload, model = arm.config.get("workload", {}), arm.config.get("model", {})
    name = model.get("path") or model.get("name")
    inputs = [int(r["prompt_tokens"]) for r in requests]
    outputs = [int(r["output_tokens"]) for r in requests]
    starts = [r["submitted_ms"] / 1e3 for r in requests]
    ends = [(r["submitted_ms"] + r["e2e_ms"]) / 1e3 for r in requests]
    duration = max(ends) - min(starts)
    return {
        "run_number": number,
        "run": record.run,
        "date": record.started.replace("-", "").replace(":", "").replace("T", "-")[:15],
        "endpoint_type": "labkit",
        "backend": arm.config.get("engine", {}).get("name"),
        "label": record.arm,
        "model_id": name,
        "tokenizer_id": name,
        "num_prompts": len(requests),
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": workload.get("concurrency"),
        "duration": duration,
        "completed": len(requests),
        "failed": 0,
        "total_input_tokens": sum(inputs),
        "total_output_tokens": sum(outputs),
        "request_throughput": len(requests) / duration,
        "request_goodput": None,
        "output_throughput": sum(outputs) / duration,
        "total_token_throughput": (sum(inputs) + sum(outputs)) / duration,
        **_latencies(requests),
        "input_lens": inputs,
        "output_lens": outputs,
        "ttfts": [r["ttft_ms"] / 1e3 for r in requests],
        "itls": [[gap / 1e3 for gap in r["itl_ms"]] for r in requests],
        "start_times": starts,
        "errors": ["" for _ in requests],
    }


def _latencies(requests: Sequence[Json]) -> dict[str, float | None]:
    times = {
        "ttft": [r["ttft_ms"] for r in requests],
        "tpot": [
            (r["e2e_ms"] - r["ttft_ms"]) / (r["output_tokens"] - 1)
            for r in requests
            if r["output_tokens"] > 1
        ],
        "itl": [gap for r in requests for gap in r["itl_ms"]],
        "e2el": [r["e2e_ms"] for r in requests],
    }
    found: dict[str, float | None] = {}
    for name, values in times.items():
        known = np.array(values, np.float64) if values else None
        found[f"mean_{name}_ms"] = None if known is None else float(known.mean())
        found[f"median_{name}_ms"] = None if known is None else float(np.median(known))
        found[f"std_{name}_ms"] = None if known is None else float(known.std())
        found[f"p99_{name}_ms"] = None if known is None else float(np.percentile(known, 99))
    return found
