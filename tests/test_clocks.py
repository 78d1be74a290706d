"""Waits and durations use the monotonic clock: the wall clock may be set back during a study."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WALL_CLOCK = {
    "time": {"time", "time_ns", "localtime", "gmtime", "ctime", "asctime", "strftime"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}
FILE_TIMES = ("st_mtime", "st_ctime", "st_atime", "st_birthtime", "getmtime", "getctime", "utime")
# A module without these words reads no clock, and is not parsed.
NAMES = "|".join(sorted(set.union(*WALL_CLOCK.values())))
MAY_READ = re.compile(rf"\.\s*({NAMES})\b|from\s+({'|'.join(WALL_CLOCK)})\s|{'|'.join(FILE_TIMES)}")
# The functions that read the wall clock, to stamp a date, and what they read.
DATES = {
    "labkit/cli/run_study.py:_fresh_folder": {"datetime.now"},  # a folder's name
    "labkit/experiment/schedule/timing_lock.py:timing_lock": {"time.time"},
    "labkit/experiment/schedule/timing_lock.py:describe": {"time.localtime", "time.strftime"},
    "labkit/experiment/launch/compile_once_marker.py:write_marker": {"time.time"},
    "labkit/mac/__main__.py:run_and_bundle": {"datetime.now"},  # a folder's name
    "labkit/engine/runner/shared_models.py:stored_logits": {
        "time.time"
    },  # beside a file's time of change
    "labkit/machine/cache_entries.py:_remove_abandoned": {"st_mtime", "time.time"},
    "labkit/machine/file_digest.py:sha256": {"time.time"},
    "labkit/machine/facts/machine_snapshot.py:utc_now": {"datetime.now"},
    "labkit/machine/facts/macos.py:state": {
        "time.time"
    },  # macOS moves the boot time with the clock
    "labkit/server/generation/api_generation.py:__init__": {"time.time"},
    "labkit/server/generation/service.py:__init__": {"time.time"},
}
# The functions that read files' times: to compare them with each other, or as a date.
FILES = {
    "labkit/analysis/studies/cell_summary.py:_state": {"st_ctime", "st_mtime"},
    "labkit/analysis/studies/study_analysis.py:_stamp": {"st_ctime", "st_mtime"},
    "labkit/experiment/schedule/doctor_noise_cache.py:_load": {"st_mtime"},
    "labkit/experiment/schedule/noise_history.py:_cells": {"st_mtime"},
    "labkit/importers/exchangeable_blocks.py:_times": {"st_mtime"},
    "labkit/importers/study_writer.py:_record": {"st_mtime"},  # a run's date, if its tool has none
    "labkit/machine/file_digest.py:file_state": {"st_ctime", "st_mtime"},
}


def clock_reads(tree):
    """Yield (function, what) for each use of the wall clock, or of a file's times, in a module."""

    def walk(node, function):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.ImportFrom) and node.module in WALL_CLOCK:
            for name in node.names:
                if name.name in WALL_CLOCK[node.module]:
                    yield function, f"{node.module}.{name.name}"
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).rpartition(".")[2]
            if node.attr in WALL_CLOCK.get(owner, ()):
                yield function, f"{owner}.{node.attr}"
            yield from ((function, name) for name in FILE_TIMES if node.attr.startswith(name))
        for child in ast.iter_child_nodes(node):
            yield from walk(child, function)

    yield from walk(tree, "<module>")


def test_the_wall_clock_only_stamps_dates():
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "labkit").rglob("*.py")):
        text = path.read_text()
        for function, what in clock_reads(ast.parse(text)) if MAY_READ.search(text) else ():
            found.setdefault(f"{path.relative_to(ROOT)}:{function}", set()).add(what)
    assert found == DATES | FILES, "use time.monotonic, or time.perf_counter to measure"


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("import time\ndef f(): return time.time() + 5", "time.time"),
        ("import time\ndef f(clock=time.time): pass", "time.time"),
        ("def f():\n    from time import time_ns", "time.time_ns"),
        ("import datetime\ndef f(): datetime.datetime.now(datetime.UTC)", "datetime.now"),
        ("from datetime import datetime\ndef f(): datetime.utcnow()", "datetime.utcnow"),
        ("def f(path): return path.stat().st_mtime_ns", "st_mtime"),
        ("import os\ndef f(path): return os.path.getmtime(path)", "getmtime"),
    ],
)
def test_every_reading_of_the_wall_clock_is_found(code, what):
    assert list(clock_reads(ast.parse(code))) == [("f", what)]


def test_the_monotonic_clocks_are_not_the_wall_clock():
    code = "import time\ntime.monotonic() + time.perf_counter() + time.process_time()\nprobe.time()"
    assert list(clock_reads(ast.parse(code))) == []
