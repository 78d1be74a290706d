"""hyperfine and ``perf stat``: a command is timed, and every process is a run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from labkit.importers.imported_run import Fields, ImportedRun, ResultFormat, has_fields, metric
from labkit.records import CaseRecord

HYPERFINE = {
    "command", "mean", "stddev", "median", "user", "system", "min", "max", "times", "exit_codes",
    "parameters", "memory_usage_byte",
}  # fmt: skip
PERF = {
    "counter-value", "unit", "event", "variance", "event-runtime", "pcnt-running", "metric-value",
    "metric-unit", "metric-threshold",
}  # fmt: skip
NOT_COUNTED = ("<not counted>", "<not supported>")
PERF_UNITS = {"msec": ("ms", 1.0), "ns": ("us", 1e-3), "": ("events", 1.0)}
ELAPSED = "duration_time"
PERF_PRIMARY = (ELAPSED, "task-clock", "cpu-clock", "cycles")  # the first that was counted


def _read_hyperfine(document: Any, file: Path) -> Iterator[ImportedRun]:
    """Yield a run for every process of every command. The command is the name of the arm."""
    for result in Fields.of(document, f"{file}: ").each("results"):
        result.only(HYPERFINE)
        times = result.numbers("times")
        result.agrees("mean", statistics.fmean(times))
        codes = result.data.get("exit_codes") or [0] * len(times)
        memory: Sequence[float] = ()
        if result.data.get("memory_usage_byte"):
            memory = result.numbers("memory_usage_byte")
        if any(len(each) not in (0, len(times)) for each in (codes, memory)):
            raise result.error_at("times", "differs in length from the other lists; was it edited?")
        for index, (seconds, code) in enumerate(zip(times, codes, strict=True)):
            metrics = [metric("elapsed_s", [seconds], "s")]
            if memory:
                used = [memory[index]]
                metrics.append(metric("memory_bytes", used, "bytes", primary=False))
            yield ImportedRun(
                "hyperfine",
                file,
                (CaseRecord("all", metrics=tuple(metrics)),),
                settings={"command": result.text("command")},
                failure=f"exit code {code}" if code else None,
                arm=result.text("command"),
            )


def _read_perf(document: Any, file: Path) -> Iterator[ImportedRun]:
    """Yield one run. Every event is a cost, so less of it is better."""
    counts: dict[str, tuple[float, str]] = {}
    unjudged = []
    for index, line in enumerate(document if isinstance(document, list) else [document]):
        event = Fields.of(line, f"{file}: event {index + 1}: ")
        event.only(PERF)
        name, value, unit = event.text("event"), event.text("counter-value"), event.text("unit")
        if value in NOT_COUNTED:
            unjudged.append(f"{name} ({value})")
            continue
        if unit not in PERF_UNITS:
            raise event.error_at("unit", f"is {unit!r}, not one of: msec, ns, or nothing")
        if name in counts:
            raise event.error_at("event", f"{name} comes twice; was the file edited?")
        own_unit, scale = PERF_UNITS[unit]
        try:
            counts[name] = scale * float(value), own_unit
        except ValueError:
            raise event.error_at("counter-value", f"is {value!r}, not a number") from None
    # Without a modifier, as in cycles:u; of several, the first.
    words = {name.partition(":")[0]: name for name in reversed(counts)}
    main = next((words[word] for word in PERF_PRIMARY if word in words), next(iter(counts), None))
    caveats = () if main is None or main == words.get(ELAPSED) else (_not_elapsed(main),)
    metrics = tuple(
        metric(name, [value], unit, primary=name == main) for name, (value, unit) in counts.items()
    )
    yield ImportedRun(
        "perf stat",
        file,
        (CaseRecord("all", metrics=metrics),),
        unjudged=tuple(unjudged),
        caveats=caveats,
    )


def _not_elapsed(event: str) -> str:
    return (
        f"the verdict is on {event}, added up over all threads, and not on the elapsed time, so "
        "that more threads may look worse where they take less time; to judge the elapsed time, "
        f"count it: perf stat -e {ELAPSED},{event}"
    )


FORMATS = (
    ResultFormat(
        "hyperfine",
        lambda document: isinstance(document, dict) and set(document) == {"results"},
        _read_hyperfine,
    ),
    ResultFormat("perf stat -j", has_fields("event", listed=True), _read_perf),
)
