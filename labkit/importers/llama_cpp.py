"""llama.cpp: ``llama-bench`` and ``llama-batched-bench``. A call of the program is a run."""

from __future__ import annotations

import statistics
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
from labkit.records import CaseRecord

RESULTS = {
    "test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts", "samples_ns", "samples_ts",
    "n_prompt", "n_gen", "n_depth",
}  # fmt: skip
RESULT_PREFIXES = ("avg_", "stddev_", "samples_")
BATCHED = {"n_kv", "t_pp", "speed_pp", "t_tg", "speed_tg", "t", "speed", "pp", "tg", "pl"}


def _read_llama_bench(document: Any, file: Path) -> Iterator[ImportedRun]:
    """Yield one run. A case is a test, such as ``pp512``, with the settings that vary."""
    tests = Fields.listed(document, file, "test")  # one object: a file of JSONL with one line
    settings = [_settings(test) for test in tests]
    varied = [key for key in settings[0] if any(s.get(key) != settings[0][key] for s in settings)]
    cases = []
    for test, own in zip(tests, settings, strict=True):
        rates = test.numbers("samples_ts")
        test.agrees("avg_ts", statistics.fmean(rates))
        name = " ".join([_test_name(test), *(f"{key}={own.get(key)}" for key in varied)])
        metrics = (metric("tok_s", rates, "tok/s", "higher"),)
        cases.append(CaseRecord(name, metrics=metrics))
    yield ImportedRun(
        "llama-bench",
        file,
        tuple(cases),
        started=seconds(tests[0], "test_time"),
        settings={key: value for key, value in settings[0].items() if key not in varied},
        environment={"cpu_model": tests[0].data.get("cpu_info")},
    )


def _settings(test: Fields) -> Mapping[str, Any]:
    """Return how a test was run: every field that is no result."""
    for key in test.data:
        if key.startswith(RESULT_PREFIXES) and key not in RESULTS:
            raise test.error_at(key, "labkit does not know this result; was the file edited?")
    return {key: value for key, value in test.data.items() if key not in RESULTS}


def _test_name(test: Fields) -> str:
    counts = {"pp": int(test.number("n_prompt")), "tg": int(test.number("n_gen"))}
    name = "+".join(f"{short}{count}" for short, count in counts.items() if count)
    depth = test.data.get("n_depth")
    return f"{name} @ d{depth}" if depth else name


def _read_batched_bench(document: Any, file: Path) -> Iterator[ImportedRun]:
    """Yield one run. Prefill and decode of a batch are two metrics of one case."""
    tests = Fields.listed(document, file, "test")
    cases = []
    for test in tests:
        name = " ".join(f"{key}{int(test.number(key))}" for key in ("pp", "tg", "pl"))
        metrics = tuple(
            metric(f"{part}_tok_s", [test.number(key)], "tok/s", "higher")
            for part, key in (("prefill", "speed_pp"), ("decode", "speed_tg"))
        )
        cases.append(CaseRecord(name, metrics=metrics))
    settings = {key: value for key, value in tests[0].data.items() if key not in BATCHED}
    yield ImportedRun("llama-batched-bench", file, tuple(cases), settings=settings)


FORMATS = (
    ResultFormat("llama-bench", has_fields("n_prompt", "n_gen", listed=True), _read_llama_bench),
    ResultFormat(
        "llama-batched-bench",
        has_fields("speed_pp", "speed_tg", listed=True),
        _read_batched_bench,
    ),
)
