"""A study as CSV with every number unrounded, as LaTeX, and for benchstat, pyperf, vLLM, GitHub.

For other tools, each run is one sample, so that no tool counts repeats as independent samples.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from labkit.analysis.comparison.cell_analysis import CellAnalysis
from labkit.analysis.comparison.observations import MEASURED_OUTCOMES, run_value
from labkit.analysis.comparison.output_identity import IDENTITY_CLAIMS
from labkit.analysis.comparison.perplexity_and_kl import limit_fields
from labkit.analysis.document.table_model import Table
from labkit.analysis.findings.verdict_sentences import cell_phrases, verdict_sentence
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.model.result_row import Comparison, Row
from labkit.analysis.number_format import significant_text
from labkit.analysis.statistics.permutation_test import Floats
from labkit.analysis.studies.data_frames import ROW_COLUMNS, SUMMARY_COLUMNS
from labkit.records import Arm, Record
from labkit.records.record_notes_schema import RequestNote, TrafficNote

SECONDS_PER_UNIT = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
COMPARISON_COLUMNS = (
    "effect_pct", "ci_low_pct", "ci_high_pct", "level", "ci_raw_low_pct", "ci_raw_high_pct",
    "p", "p_adjusted", "p_floor", "mde_pct", "wins", "blocks", "verdict", "reason", "difference",
    "as_measured_pct",
)  # fmt: skip
WITHOUT_STALLS = "without stalls, which the times of the report include"


class FormatError(ValueError):
    """A study lacks data that the format needs. The message is a single line."""


def _measured(analysis: CellAnalysis) -> list[Record]:
    """Return the runs with measurements. The baseline comes first, as tools compare with it."""
    order = {arm.name: i for i, arm in enumerate(analysis.data.arms)}
    records = [r for r in analysis.data.judged_records if r.outcome in MEASURED_OUTCOMES]
    return sorted(records, key=lambda r: order[r.arm])


def benchstat(analyses: Sequence[CellAnalysis]) -> str:
    """Return the runs in Go's benchmark format, a line per run and case.

    ``benchstat -col /arm`` compares the arms. Its lines have no units, so runs that report a
    metric in different ones raise ``FormatError``, whether they are of one cell or of several.

    Source: the Go project's proposal 14313 and golang.org/x/perf/benchfmt (Unit lines).
    """
    units: dict[str, tuple[str, str]] = {}
    lines: list[str] = []
    for analysis in analyses:
        environment = analysis.environment
        cores, cpu = environment.get("cores") or 1, environment.get("cpu_model")
        lines += ["", f"cell: {analysis.name}", *([f"cpu: {cpu}"] if cpu else [])]
        for record in _measured(analysis):
            for case in record.cases:
                values = [(run_value(m.repeats), m) for m in case.metrics]
                if not values:
                    continue
                for metric in case.metrics:
                    own = metric.unit, metric.better
                    known = units.setdefault(_word(metric.name), own)
                    if own != known:
                        raise FormatError(
                            f"--format benchstat names no units, and {record.arm} reports "
                            f"{metric.name} in {own[0]} ({own[1]} is better), other runs in "
                            f"{known[0]} ({known[1]} is better)"
                        )
                # A name has no spaces, and slashes separate its parts. benchstat cuts a number at
                # its end (the cores): arm=chunk-256 needs one.
                of_case = _word(case.case).replace("/", "÷")
                name = f"BenchmarkLabkit/case={of_case}/arm={record.arm}-{cores}"
                numbers = " ".join(f"{value!r} {_word(metric.name)}" for value, metric in values)
                lines.append(f"{name} 1 {numbers}")
    if not units:
        raise FormatError("--format benchstat needs a metric, and no run of this study has one")
    head = [f"Unit {name} better={better}" for name, (_, better) in units.items()]
    return "\n".join([*head, *lines]) + "\n"


def _word(name: str) -> str:
    """Return a name as a single word: benchstat splits a line at spaces."""
    return re.sub(r"\s", "_", name)


def pyperf(analyses: Sequence[CellAnalysis]) -> str:
    """Return pyperf's JSON (format version 1.0): one run per process, with repeats as values.

    A benchmark is one metric of a case, since a case may have several times. Raises ``FormatError``
    if no metric is a time.
    """
    runs_by_name: dict[str, list[dict[str, Any]]] = {}
    for analysis in analyses:
        cell = f"{analysis.name}: " if len(analyses) > 1 else ""
        for record in _measured(analysis):
            for case in record.cases:
                of_case = f"{case.case}: " if case.case != "all" else ""
                for metric in (m for m in case.metrics if m.unit in SECONDS_PER_UNIT):
                    if min(metric.repeats) > 0:
                        name = f"{cell}{of_case}{metric.name} [{record.arm}]"
                        values = [x * SECONDS_PER_UNIT[metric.unit] for x in metric.repeats]
                        run = {"metadata": {"date": _date(record)}, "values": values}
                        runs_by_name.setdefault(name, []).append(run)
    if not runs_by_name:
        raise FormatError(
            "--format pyperf needs time metrics (us, ms or s), and this study has none"
        )
    benchmarks = [
        {"metadata": {"name": name, "unit": "second", "loops": 1}, "runs": runs}
        for name, runs in runs_by_name.items()
    ]
    return json.dumps({"version": "1.0", "metadata": {}, "benchmarks": benchmarks}) + "\n"


def _date(record: Record) -> str:
    """Return a run's start time as pyperf parses it: with microseconds, without a time zone."""
    seconds, _, rest = record.started.rstrip("Z").replace("T", " ").partition(".")
    return f"{seconds}.{(rest + '000000')[:6]}"


def vllm(analyses: Sequence[CellAnalysis]) -> str:
    """Return vLLM's serving results as JSON, one per run, with ``run_number`` and the arm.

    Names and definitions are vLLM's: TTFT is the time from sending to the first token, TPOT is
    ``(E2E - TTFT) / (tokens - 1)``, and ITL is per chunk, pooled over all requests. Goodput counts
    the requests that are within ``workload.limits`` by these times. Summary statistics are in ms,
    the lists per request in seconds. All times are without stalls: those of single requests are
    recorded in no other way. Where the report's times are with stalls, each run says so as
    ``times``. Texts are not recorded, so ``generated_texts`` is left out. Raises ``FormatError`` if
    there is no request workload, or its requests' times were not recorded.
    """
    runs = [run for analysis in analyses for run in _vllm_runs(analysis)]
    if not runs:
        raise FormatError(
            "--format vllm needs a request workload with recorded times, and this study has none"
        )
    return json.dumps(runs, indent=1) + "\n"


def _vllm_runs(analysis: CellAnalysis) -> Iterator[dict[str, Any]]:
    data = analysis.data
    note = {"times": WITHOUT_STALLS} if data.keeps_stalls else {}
    arms = {arm.name: arm for arm in data.arms}
    for number, record in enumerate(data.records):
        for case in record.cases:
            requests = case.known_notes.get("requests")
            if requests and record.outcome in MEASURED_OUTCOMES:
                traffic = case.known_notes.get("traffic") or {}
                sent = [_from_sending(request) for request in requests]
                yield {**_vllm_run(number, record, arms[record.arm], sent, traffic), **note}


def _from_sending(request: RequestNote) -> RequestNote:
    """Return a request without its wait for a place among ``concurrency``, as vLLM times it."""
    wait_ms = request.get("queued_ms", 0.0)
    ttft_ms, e2e_ms = request["ttft_ms"] - wait_ms, request["e2e_ms"] - wait_ms
    return {**request, "ttft_ms": ttft_ms, "e2e_ms": e2e_ms}


def _vllm_run(
    number: int, record: Record, arm: Arm, requests: Sequence[RequestNote], traffic: TrafficNote
) -> dict[str, Any]:
    workload, model = arm.config.get("workload", {}), arm.config.get("model", {})
    limits = workload.get("limits") or {}
    good = sum(_meets(request, limits) for request in requests)
    arrivals, name = workload.get("arrivals", {}), model.get("path") or model.get("name")
    inputs = [int(r["prompt_tokens"]) for r in requests]
    outputs = [int(r["output_tokens"]) for r in requests]
    starts = [r["submitted_ms"] / 1e3 for r in requests]
    ends = [start + r["e2e_ms"] / 1e3 for start, r in zip(starts, requests, strict=True)]
    unserved = traffic.get("refused", 0) + traffic.get("failed", 0)
    duration = max(ends) - min(starts)
    if unserved:  # they may have lasted longer
        times = (m.repeats[0] for c in record.cases for m in c.metrics if m.name == "wall_s")
        duration = next(times, duration)
    return {
        "run_number": number,
        "run": record.run,
        "date": record.started.replace("-", "").replace(":", "").replace("T", "-")[:15],
        "endpoint_type": "labkit",
        "backend": arm.config.get("engine", {}).get("name"),
        "label": record.arm,
        "model_id": name,
        "tokenizer_id": name,
        "num_prompts": traffic.get("requests", len(requests)),
        "request_rate": arrivals.get("rate") or "inf",
        "burstiness": arrivals.get("shape", 1.0),
        "max_concurrency": workload.get("concurrency"),
        "duration": duration,
        "completed": len(requests),
        "failed": unserved,
        "total_input_tokens": sum(inputs),
        "total_output_tokens": sum(outputs),
        "request_throughput": len(requests) / duration,
        "request_goodput": good / duration if any(limits.values()) else None,
        "output_throughput": sum(outputs) / duration,
        "total_token_throughput": (sum(inputs) + sum(outputs)) / duration,
        **_vllm_latencies(requests),
        "input_lens": inputs,
        "output_lens": outputs,
        "ttfts": [r["ttft_ms"] / 1e3 for r in requests],
        "itls": [[gap / 1e3 for gap in r["itl_ms"]] for r in requests],
        "start_times": starts,
        "errors": ["" for _ in requests],
    }


def _tpot_ms(request: RequestNote) -> float:
    """Return vLLM's TPOT, which is 0 for a single token."""
    return (request["e2e_ms"] - request["ttft_ms"]) / max(1, request["output_tokens"] - 1)


def _meets(request: RequestNote, limits: Mapping[str, float | None]) -> bool:
    """Return whether a request met ``workload.limits``, by the times that the export has of it."""
    ttft_ms, tpot_ms, e2e_ms = request["ttft_ms"], _tpot_ms(request), request["e2e_ms"]
    times = {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "e2e_ms": e2e_ms}
    return all(limit is None or times[name] <= limit for name, limit in limits.items())


def _vllm_latencies(requests: Sequence[RequestNote]) -> dict[str, float | None]:
    times = {
        "ttft": [r["ttft_ms"] for r in requests],
        "tpot": [_tpot_ms(r) for r in requests if r["output_tokens"] > 1],
        "itl": [gap for r in requests for gap in r["itl_ms"]],
        "e2el": [r["e2e_ms"] for r in requests],
    }
    statistics: dict[str, Callable[[Floats], Any]] = {
        "mean": np.mean,
        "median": np.median,
        "std": np.std,
        "p99": lambda values: np.percentile(values, 99),
    }
    return {
        f"{statistic}_{name}_ms": float(of(np.array(values, np.float64))) if values else None
        for name, values in times.items()
        for statistic, of in statistics.items()
    }


def github(analyses: Sequence[CellAnalysis]) -> str:
    """Return github-action-benchmark's JSON list: the primary metric of every case and arm.

    Use it as ``customSmallerIsBetter`` or ``customBiggerIsBetter``, whichever fits the metric.
    Raises ``FormatError`` if smaller is better in some primary metrics and bigger in others, or no
    run has a primary metric.
    """
    entries: list[dict[str, Any]] = []
    directions = set()
    for analysis in analyses:
        claim = analysis.data.arms[0].identity
        phrases = cell_phrases(analysis.cell, claim if claim in IDENTITY_CLAIMS else "none")
        cell = f"{analysis.cell.cell}: " if len(analyses) > 1 else ""
        for row in (row for row in analysis.cell.primary_rows if row.skipped is None):
            directions.add(row.better)
            for arm, values in ((arm, values) for arm, values in row.arms.items() if values.n):
                name = f"{cell}{analysis.cell.row_name(row)} [{arm}]"
                spread = significant_text((values.q3 or 0.0) - (values.q1 or 0.0), 3)
                entry: dict[str, Any] = {"name": name, "unit": row.unit, "value": values.median}
                entry["range"] = f"IQR {spread}"
                if (one := row.comparison(arm)) is not None:
                    entry["extra"] = verdict_sentence(phrases, row, one)
                entries.append(entry)
    if len(directions) > 1:
        raise FormatError(
            "--format github needs metrics of one direction, but in this study smaller is better "
            "for some and bigger for others; give the folder of one cell"
        )
    if not entries:
        raise FormatError(
            "--format github needs a primary metric, and no run of this study has one"
        )
    return json.dumps(entries, indent=1, ensure_ascii=False) + "\n"


def csv_text(cells: Sequence[Cell]) -> str:
    """Return one CSV line per comparison, and one with the baseline per row without comparisons.

    Unknown values are empty. If the workload scores texts, the lines also have the arms' quality.
    """
    has_quality = any(cell.quality is not None for cell in cells)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ("cell", *ROW_COLUMNS, "arm", "baseline", "baseline_median",
         *(f"arm_{name}" for name in SUMMARY_COLUMNS), *COMPARISON_COLUMNS,
         *(limit_fields(None) if has_quality else ()))
    )  # fmt: skip
    for cell in cells:
        for row in cell.rows:
            for comparison in row.comparisons or [None]:
                quality = cell.qualities.get(comparison.arm) if comparison else None
                fields = (cell.cell, *(getattr(row, name) for name in ROW_COLUMNS))
                numbers = limit_fields(quality).values() if has_quality else ()
                writer.writerow((*fields, *_compared(row, comparison, cell.baseline), *numbers))
    return out.getvalue()


def _compared(row: Row, comparison: Comparison | None, baseline: str) -> Iterator[Any]:
    arm = None if comparison is None else comparison.arm
    yield from (arm, baseline, row.median(baseline))
    yield from (getattr(row.arms.get(arm or ""), name, None) for name in SUMMARY_COLUMNS)
    yield from (getattr(comparison, name, None) for name in COMPARISON_COLUMNS)


LATEX_CHARACTERS = str.maketrans({
    **{character: rf"\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "−": "$-$",
    "×": r"$\times$",
    "±": r"$\pm$",
    "µ": r"$\mu$",
    "–": "--",
})  # fmt: skip


def latex_text(table: Table[Any], caption: str) -> str:
    """Return a table in LaTeX (``booktabs``), with its notes below it."""
    alignment = "".join("r" if column.numeric else "l" for column in table.columns)
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_escaped(caption)}}}",
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        " & ".join(_escaped(column.heading) for column in table.columns) + r" \\",
        r"\midrule",
        *(" & ".join(map(_escaped, table.cells(line))) + r" \\" for line in table.lines),
        r"\bottomrule",
        r"\end{tabular}",
        *(rf"\par\footnotesize {_escaped(note)}" for note in table.notes),
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.translate(LATEX_CHARACTERS)
