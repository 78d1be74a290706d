"""Records in the forms of other tools: benchstat, pyperf, vLLM, github-action-benchmark.

Each run stays one sample, so that those tools cannot mistake repeats for evidence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from labkit.analysis.cell_analysis import CellAnalysis
from labkit.analysis.formatting import plain, slug
from labkit.analysis.identity import CLAIMS
from labkit.analysis.rows import MEASURED, run_value
from labkit.analysis.sentences import row_name, sentence
from labkit.analysis.vllm import vllm_runs
from labkit.records import Metric, Record

SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


class FormatError(ValueError):
    """A study has not what a form needs; one line."""


def _measured(analysis: CellAnalysis) -> list[Record]:
    """Give the runs that measured something, the baseline's first: tools compare with it."""
    place = {arm.name: i for i, arm in enumerate(analysis.data.arms)}
    found = [r for r in analysis.data.records if r.outcome in MEASURED]
    return sorted(found, key=lambda r: place[r.arm])


def benchstat(analyses: Sequence[CellAnalysis]) -> str:
    """Write Go's benchmark format, one line per run and case: ``benchstat -col /arm``.

    Source: the Go project's proposal 14313 and golang.org/x/perf/benchfmt (Unit lines).
    """
    units: dict[str, str] = {}
    lines: list[str] = []
    for analysis in analyses:
        environment = analysis.environment
        cores = environment.get("cores") or 1
        lines += ["", f"cell: {analysis.name}"]
        if environment.get("cpu_model"):
            lines.append(f"cpu: {environment['cpu_model']}")
        for record in _measured(analysis):
            for case in record.cases:
                values = [(run_value(m.repeats), m) for m in case.metrics]
                if not values:
                    continue
                units.update((m.name, m.better) for m in case.metrics)
                # Without the cores at the end, a name such as arm=chunk-256 would be cut.
                name = f"BenchmarkLabkit/case={slug(case.case)}/arm={record.arm}-{cores}"
                numbers = " ".join(f"{value!r} {metric.name}" for value, metric in values)
                lines.append(f"{name} 1 {numbers}")
    if not units:
        raise FormatError("no run has a metric; benchstat has nothing to read")
    head = [f"Unit {name} better={better}" for name, better in units.items()]
    return "\n".join([*head, *lines]) + "\n"


def pyperf(analyses: Sequence[CellAnalysis]) -> str:
    """Write pyperf's JSON (format version 1.0): a run per process, its repeats as values.

    Raises
    ------
    FormatError
        No metric is a time.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for analysis in analyses:
        cell = f"{analysis.name}: " if len(analyses) > 1 else ""
        for record in _measured(analysis):
            for case in record.cases:
                for metric in _times(case.metrics):
                    what = case.case if case.case != "all" else metric.name
                    runs = found.setdefault(f"{cell}{what} [{record.arm}]", [])
                    scale = SECONDS[metric.unit]
                    values = [x * scale for x in metric.repeats]
                    runs.append({"metadata": {"date": _date(record)}, "values": values})
    if not found:
        raise FormatError("pyperf needs time metrics (us, ms or s), and this study has none")
    benchmarks = [
        {"metadata": {"name": name, "unit": "second", "loops": 1}, "runs": runs}
        for name, runs in found.items()
    ]
    return json.dumps({"version": "1.0", "metadata": {}, "benchmarks": benchmarks}) + "\n"


def _times(metrics: Sequence[Metric]) -> Iterator[Metric]:
    return (m for m in metrics if m.unit in SECONDS and min(m.repeats) > 0)


def _date(record: Record) -> str:
    """Give the start in the form that pyperf parses: no zone, microseconds."""
    seconds, _, rest = record.started.rstrip("Z").replace("T", " ").partition(".")
    return f"{seconds}.{(rest + '000000')[:6]}"


def vllm(analyses: Sequence[CellAnalysis]) -> str:
    """Write a list of vLLM's serving results, one per run, with ``run_number`` and the arm.

    Raises
    ------
    FormatError
        There is no request workload, or its requests' times were not recorded.
    """
    runs = [run for analysis in analyses for run in vllm_runs(analysis.data)]
    if not runs:
        raise FormatError("vllm needs a request workload with its requests' times recorded")
    return json.dumps(runs, indent=1) + "\n"


def github(analyses: Sequence[CellAnalysis]) -> str:
    """Write github-action-benchmark's list, the primary metric of every case and arm.

    Use it as ``customSmallerIsBetter`` or ``customBiggerIsBetter``, as the metric is.

    Raises
    ------
    FormatError
        The cells' primary metrics do not agree on which direction is better.
    """
    entries: list[dict[str, Any]] = []
    directions = set()
    for analysis in analyses:
        cell = analysis.json
        for row in cell["rows"]:
            if not row["primary"] or row["skipped"] is not None:
                continue
            directions.add(row["better"])
            for arm, values in row["arms"].items():
                if values["n"]:
                    entries.append(_github_entry(analysis, cell, row, arm, len(analyses) > 1))
    if len(directions) > 1:
        raise FormatError(
            "github needs one direction, and this study has metrics where smaller and where "
            "bigger is better; give one cell's folder"
        )
    if not entries:
        raise FormatError("no run has a primary metric; github has nothing to read")
    return json.dumps(entries, indent=1, ensure_ascii=False) + "\n"


def _github_entry(
    analysis: CellAnalysis, cell: Mapping[str, Any], row: Mapping[str, Any], arm: str, many: bool
) -> dict[str, Any]:
    values = row["arms"][arm]
    prefix = f"{cell['cell']}: " if many else ""
    entry: dict[str, Any] = {
        "name": f"{prefix}{row_name(row)} [{arm}]",
        "unit": row["unit"],
        "value": values["median"],
        "range": f"IQR {plain(values['q3'] - values['q1'])}",
    }
    found = next((c for c in row["comparisons"] if c["arm"] == arm), None)
    if found is not None:
        claim = analysis.data.arms[0].identity
        entry["extra"] = sentence(cell, row, found, claim if claim in CLAIMS else "none")
    return entry
