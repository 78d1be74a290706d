"""pyperf, pytest-benchmark, Google Benchmark and asv: functions are timed, each is a case.

A process of pyperf is a run. The repeats of the other three lie in one process, so their file is
one run.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from labkit.importers.imported_run import (
    Fields,
    ImportedRun,
    ResultFormat,
    first_item,
    has_fields,
    metric,
    seconds,
)
from labkit.records import CaseRecord, Metric

PYPERF_UNITS = {"second": ("time_us", "us", 1e6), "byte": ("memory_bytes", "bytes", 1.0)}
GOOGLE_UNITS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
GOOGLE_FIELDS = {
    "name", "family_index", "per_family_instance_index", "run_name", "run_type", "repetitions",
    "repetition_index", "threads", "iterations", "real_time", "cpu_time", "time_unit", "label",
    "aggregate_name", "aggregate_unit", "error_occurred", "error_message", "skipped",
    "skip_message", "cpu_coefficient", "real_coefficient", "big_o", "rms",
}  # fmt: skip
RATES = {"items_per_second": "items/s", "bytes_per_second": "bytes/s"}
PYPERF_SUITE = {"benchmarks", "metadata", "version"}
PYPERF_RUN = {"metadata", "values", "warmups"}
PYTEST_REPORT = {"machine_info", "commit_info", "benchmarks", "datetime", "version"}
PYTEST_BENCHMARK = {
    "group", "name", "fullname", "params", "param", "extra_info", "options", "stats", "cprofile",
}  # fmt: skip
PYTEST_STATS = {
    "min", "max", "mean", "stddev", "rounds", "median", "iqr", "q1", "q3", "iqr_outliers",
    "stddev_outliers", "outliers", "ld15iqr", "hd15iqr", "ops", "total", "data", "iterations",
}  # fmt: skip
ASV_FIELDS = {
    "commit_hash", "env_name", "date", "params", "python", "requirements", "env_vars",
    "result_columns", "results", "durations", "version",
}  # fmt: skip
ASV_COLUMNS = {"result", "params", "version", "started_at", "duration", "samples", "profile"}
ASV_KINDS = {
    "time": ("time_us", "us", 1e6), "timeraw": ("time_us", "us", 1e6),
    "mem": ("memory_bytes", "bytes", 1.0), "peakmem": ("memory_bytes", "bytes", 1.0),
}  # fmt: skip


def _read_pyperf(document: Any, file: Path) -> Iterator[ImportedRun]:
    """Yield a run for every process with values; the benchmarks' n-th processes are one run."""
    suite = Fields.of(document, f"{file}: ")
    suite.only(PYPERF_SUITE)
    if suite.text("version") != "1.0":
        raise suite.error_at("version", f"is {suite.text('version')}; labkit reads 1.0")
    common = suite.data.get("metadata") or {}
    processes: list[list[tuple[CaseRecord, float | None]]] = []
    for benchmark in suite.each("benchmarks"):
        benchmark.only(("metadata", "runs"))
        facts = {**common, **(benchmark.data.get("metadata") or {})}
        unit = facts.get("unit", "second")
        if unit not in PYPERF_UNITS:
            raise benchmark.error_at("metadata.unit", f"is {unit!r}, not second or byte")
        name, own_unit, scale = PYPERF_UNITS[unit]
        measured = [run for run in benchmark.each("runs") if not _calibrates(run)]
        if not measured:
            raise benchmark.error_at("runs", "has no values")
        processes += [[] for _ in range(len(measured) - len(processes))]
        for run, process in zip(measured, processes, strict=False):
            values = [scale * value for value in run.numbers("values")]
            case = CaseRecord(str(facts.get("name")), metrics=(metric(name, values, own_unit),))
            own = run.at("metadata") if "metadata" in run else None
            process.append((case, seconds(own, "date") if own and "date" in own else None))
    for process in processes:
        starts = [start for _, start in process if start is not None]
        yield ImportedRun(
            "pyperf",
            file,
            tuple(case for case, _ in process),
            started=min(starts, default=None),
            environment=_machine(common, "hostname", "cpu_model_name", "cpu_count", "platform"),
        )


def _calibrates(run: Fields) -> bool:
    """Whether a process only looked for the number of loops or warm-ups, and has no values."""
    run.only(PYPERF_RUN)
    facts = run.data.get("metadata") or {}
    return "values" not in run and any("calibrate_" in key for key in facts)


def _machine(facts: Any, host: str, cpu: str, cores: str, system: str) -> dict[str, Any]:
    """Return the machine in labkit's words."""
    words = {"host": host, "cpu_model": cpu, "cores": cores, "os": system}
    return {ours: facts[theirs] for ours, theirs in words.items() if facts.get(theirs)}


def _read_pytest_benchmark(document: Any, file: Path) -> Iterator[ImportedRun]:
    report = Fields.of(document, f"{file}: ")
    report.only(PYTEST_REPORT)
    cases = []
    for benchmark in report.each("benchmarks"):
        stats = benchmark.at("stats")
        benchmark.only(PYTEST_BENCHMARK)
        stats.only(PYTEST_STATS)
        values: tuple[float, ...] = (stats.number("median"),)
        if stats.data.get("data"):
            values = stats.numbers("data")
            stats.agrees("mean", statistics.fmean(values))
        times = metric("time_us", [1e6 * value for value in values], "us")
        cases.append(CaseRecord(benchmark.text("fullname"), metrics=(times,)))
    machine = report.at("machine_info").data
    cpu = machine.get("cpu") or {}
    facts = {**machine, "cpu_model": cpu.get("brand_raw"), "cores": cpu.get("count")}
    yield ImportedRun(
        "pytest-benchmark",
        file,
        tuple(cases),
        started=seconds(report, "datetime"),
        environment=_machine(facts, "node", "cpu_model", "cores", "system"),
    )


def _read_google_benchmark(document: Any, file: Path) -> Iterator[ImportedRun]:
    """Yield one run. Of a benchmark that only has aggregates, the median is taken."""
    report = Fields.of(document, f"{file}: ")
    report.only(("context", "benchmarks"))
    lines: dict[str, list[Fields]] = {}
    medians: dict[str, list[Fields]] = {}
    failures, skipped = [], dict[str, None]()
    for line in report.each("benchmarks"):
        name = str(line.data.get("run_name") or line.text("name"))
        if line.data.get("error_occurred"):
            failures.append(f"{name}: {line.data.get('error_message')}")
        elif line.data.get("skipped"):  # its times mean nothing
            skipped[f"{name} (skipped)"] = None
        elif line.data.get("run_type", "iteration") == "iteration":
            lines.setdefault(name, []).append(line)
        elif line.data.get("aggregate_name") == "median":
            medians.setdefault(name, []).append(line)
    lines = {**medians, **lines}
    if not lines and not failures:
        reason = "all were skipped" if skipped else "has neither repetitions nor medians"
        raise report.error_at("benchmarks", reason)
    counters = {key for own in lines.values() for line in own for key in line.data}
    context = report.at("context")
    facts = {**context.data, "os": None, "cpu_model": None}
    yield ImportedRun(
        "Google Benchmark",
        file,
        tuple(CaseRecord(name, metrics=_google_metrics(own)) for name, own in lines.items()),
        started=seconds(context, "date"),
        environment=_machine(facts, "host_name", "cpu_model", "num_cpus", "os"),
        failure="; ".join(failures) or None,
        unjudged=(*skipped, *sorted(counters.difference(GOOGLE_FIELDS, RATES))),
    )


def _google_metrics(lines: list[Fields]) -> tuple[Metric, ...]:
    for line in lines:
        if line.text("time_unit") not in GOOGLE_UNITS:
            raise line.error_at("time_unit", f"is {line.text('time_unit')!r}, not ns, us, ms or s")
    real, cpu = (
        [GOOGLE_UNITS[line.text("time_unit")] * line.number(key) for line in lines]
        for key in ("real_time", "cpu_time")
    )
    rates = [
        metric(key, [line.number(key) for line in lines], unit, "higher", primary=False)
        for key, unit in RATES.items()
        if all(key in line for line in lines)
    ]
    return (
        metric("real_time_us", real, "us"),
        metric("cpu_time_us", cpu, "us", primary=False),
        *rates,
    )


def _read_asv(document: Any, file: Path) -> Iterator[ImportedRun]:
    """Yield one run: one commit, as asv keeps it. What ``track_`` returns has no direction."""
    report = Fields.of(document, f"{file}: ")
    report.only(ASV_FIELDS)
    columns = list(report.data.get("result_columns") or ())
    place = f"{file}: result_columns."
    Fields(dict.fromkeys(columns), place).only(ASV_COLUMNS, r"stats_\w+")
    if "result" not in columns or "params" not in columns:
        raise report.error_at("result_columns", "lacks result or params; labkit reads version 2")
    results = report.at("results")
    cases, unjudged, starts = [], [], []
    for name, row in results.data.items():
        kind = name.rpartition(".")[2].partition("_")[0]
        if not isinstance(row, list):
            raise results.error_at(name, "is not a list")
        column = dict(zip(columns, row, strict=False))
        if kind not in ASV_KINDS:
            unjudged.append(name)
            continue
        if column.get("started_at"):
            starts.append(column["started_at"] / 1e3)
        if column.get("result") is None:  # all its parameters failed, or took too long
            unjudged.append(f"{name} (failed)")
            continue
        params, values = list(product(*column["params"])), column["result"]
        samples = column.get("samples") or [None] * len(values)
        if not len(params) == len(values) == len(samples):
            raise results.error_at(name, "has not one result per parameter; was it edited?")
        for words, value, repeats in zip(params, values, samples, strict=True):
            if value is not None and value == value:  # asv: not run, or not applicable
                case = f"{name}({', '.join(words)})" if words else name
                own = Fields({"samples": repeats or [value]}, f"{file}: {case}: ")
                metric_name, unit, scale = ASV_KINDS[kind]
                scaled = [scale * each for each in own.numbers("samples")]
                cases.append(CaseRecord(case, metrics=(metric(metric_name, scaled, unit),)))
    if not cases:
        raise report.error_at("results", "has no time and no memory")
    yield ImportedRun(
        "asv",
        file,
        tuple(cases),
        started=min(starts, default=None),
        settings={"commit": report.text("commit_hash")},
        environment=_machine(report.data.get("params") or {}, "machine", "cpu", "num_cpu", "os"),
        unjudged=tuple(unjudged),
    )


FORMATS = (
    ResultFormat(
        "pyperf", lambda document: "runs" in first_item(document, "benchmarks"), _read_pyperf
    ),
    ResultFormat(
        "pytest-benchmark", has_fields("machine_info", "benchmarks"), _read_pytest_benchmark
    ),
    ResultFormat("Google Benchmark", has_fields("context", "benchmarks"), _read_google_benchmark),
    ResultFormat("asv", has_fields("commit_hash", "results"), _read_asv),
)
