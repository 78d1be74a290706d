"""Mutation testing: break labkit by one small change at a time, and check that a test fails.

    python tests/mutants/run.py [--sample N] [--seed S] [FILE or FOLDER ...]

Works in a copy of the tree (``build/mutants``). First every fast test runs once, to record which
functions it calls. Then ``N`` mutants of each package are sampled (or, for named files without
``--sample``, all of them), and the tests that call a mutant's function run on it, the fastest
first. A mutant that no test detects must be in ``survivors.toml`` with the reason; otherwise it is
printed and the exit status is 1. Results stay in ``build/mutants``, so an interrupted run continues
where it stopped.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from mutation import MODULE, Mutant, mutants  # noqa: E402

ROOT = HERE.parents[1]
PACKAGES = {  # with the folders of their tests
    "labkit/analysis": ("tests/analysis", "tests"),
    "labkit/records": ("tests/records", "tests/experiment", "tests/analysis"),
    "labkit/workload": ("tests/workload", "tests/workload/video", "tests/experiment"),
    "labkit/experiment": ("tests/experiment", "tests/workload", "tests"),
    "labkit/machine": ("tests/machine", "tests/experiment"),
    "labkit/cpu": ("tests/cpu", "tests/engine/attention", "tests/engine/numpy_port"),
}
SAMPLE_SIZE = 100
MAX_TESTS_S = 30.0  # of tests that run on a mutant, by their time on the original
TIMEOUT_S = 180.0  # a mutant whose tests take longer hangs, which is detected
KILLED, HANGS, SURVIVES, UNREACHED = "killed", "hangs", "survives", "no test calls it"
Function = tuple[str, str]  # the file and the qualified name


class WorkingCopy:
    """A copy of the repository in which one file at a time is broken."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.source, self.path = source, folder / "tree"
        tracked = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=source,
            capture_output=True,
            check=True,
            text=True,
        )
        wanted = {name for name in tracked.stdout.split("\0") if (source / name).is_file()}
        for old in self.path.rglob("*"):
            if old.is_file() and str(old.relative_to(self.path)) not in wanted:
                old.unlink()
        for name in wanted:
            self.restore(name)

    def restore(self, name: str) -> None:
        """Copy a file with its times, so that its bytecode stays valid."""
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(self.source / name, self.path / name)

    def write(self, mutant: Mutant) -> None:
        """Write a mutant, with its own time: bytecode is identified by time and size."""
        file = self.path / mutant.path
        file.write_text(mutant.text)
        time = int(_digest(mutant.name)[:7], 16)
        os.utime(file, (time, time))

    def run(self, arguments: Sequence[str], calls: Path | None = None) -> int | None:
        """Run pytest and return its exit status, or None if it timed out."""
        environ = {**os.environ, "PYTHONPATH": str(self.path)}
        if calls is not None:
            environ |= {"PYTHONPATH": f"{self.path / 'tests/mutants/calls'}:{self.path}"}
            environ |= {"CALLS": str(calls)}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        with (self.path.parent / "log").open("w") as log:
            process = subprocess.Popen(
                command,
                cwd=self.path,
                env=environ,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                return process.wait(None if calls else TIMEOUT_S)
            except subprocess.TimeoutExpired:
                return None
            finally:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children."""
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        return
    process.wait()


@dataclass
class TestCalls:
    """The tests that pass: their seconds, and the functions that they call."""

    seconds: dict[str, float] = field(default_factory=dict)
    callers: dict[Function, set[str]] = field(default_factory=lambda: defaultdict(set))
    failed: list[str] = field(default_factory=list)

    def read(self, file: str, calls: Path, report: Path) -> None:
        """Add a file of tests. A function that a fixture calls counts for all tests of the file."""
        passed = []
        for case in ElementTree.parse(report).iter("testcase"):
            test = f"{file}::{case.get('name')}"
            if case.find("skipped") is not None:
                continue
            if case.find("failure") is not None or case.find("error") is not None:
                self.failed.append(test)
                continue
            passed.append(test)
            self.seconds[test] = float(case.get("time", "0"))
        for line in calls.read_text().splitlines() if calls.exists() else []:
            name, function, context = line.split("\t")
            test, _, phase = context.rpartition(" ")
            callers = [test] if phase == "(call)" else passed
            self.callers[f"labkit/{name}", function] |= set(callers) & self.seconds.keys()

    def calling(self, mutant: Mutant) -> list[str]:
        """Return the tests that call a mutant's function, the fastest first, up to a time limit."""
        callers: set[str] = set()
        for (path, function), tests in self.callers.items():
            inside = function == mutant.function or function.startswith(mutant.function + ".<")
            if path == mutant.path and (inside or mutant.function == MODULE):
                callers |= tests
        chosen, spent = [], 0.0
        for test in sorted(callers, key=lambda test: (self.seconds[test], test)):
            spent += self.seconds[test]
            if chosen and spent > MAX_TESTS_S:
                break
            chosen.append(test)
        return chosen


def map_calls(tree: WorkingCopy, folders: Iterable[str]) -> TestCalls:
    """Run the fast tests of these folders, and record their calls; skip unchanged files."""
    tests = TestCalls()
    for file in sorted(f for folder in folders for f in tree.path.glob(f"{folder}/test_*.py")):
        name = str(file.relative_to(tree.path))
        stem = tree.path.parent / "calls" / f"{file.parent.name}-{file.stem}"
        stem = stem.with_name(f"{stem.name}-{_digest(file.read_text())}")
        stem.parent.mkdir(exist_ok=True)
        calls, report = stem.with_suffix(".tsv"), stem.with_suffix(".xml")
        if not report.exists():
            calls.unlink(missing_ok=True)
            print(f"recording calls: {name}", flush=True)
            options = ["-m", "not slow and not metal", f"--junitxml={report}"]
            tree.run([name, *options], calls)
        tests.read(name, calls, report)
    return tests


def sample(candidates: Iterable[Mutant], number: int | None, seed: int) -> list[Mutant]:
    """Return ``number`` mutants, independent of changes elsewhere in the code."""
    drawn = sorted(candidates, key=lambda mutant: _digest(f"{seed} {mutant.name}"))
    return drawn[:number]


def test_mutant(tree: WorkingCopy, mutant: Mutant, tests: Sequence[str]) -> str:
    """Run tests on a mutant and return its result."""
    if not tests:
        return UNREACHED
    tree.write(mutant)
    try:
        status = tree.run(["-x", "-n", "0", *tests])
    finally:
        tree.restore(mutant.path)
    return HANGS if status is None else SURVIVES if status == 0 else KILLED


def all_mutants(root: Path, places: Iterable[str]) -> list[Mutant]:
    """Return every mutant of these files and folders."""
    files = [
        file
        for place in places
        for file in ([root / place] if place.endswith(".py") else (root / place).rglob("*.py"))
    ]
    return [
        mutant
        for file in sorted(files)
        for mutant in mutants(str(file.relative_to(root)), file.read_text())
    ]


def known_survivors() -> dict[str, str]:
    """Return the listed survivors with their reasons."""
    groups = tomllib.loads((HERE / "survivors.toml").read_text())["survivors"]
    return {name: group["reason"] for group in groups for name in group["mutants"]}


class ResultCache:
    """Results of mutants, stored in a file, valid while its file and tests are unchanged."""

    def __init__(self, tree: WorkingCopy) -> None:
        self._tree, self._file = tree, tree.path.parent / "results.jsonl"
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        self._results = dict(json.loads(line) for line in lines)

    def test_mutant(self, mutant: Mutant, tests: Sequence[str]) -> str:
        """Return a mutant's result, from the file or by running its tests."""
        files = sorted({test.split("::")[0] for test in tests})
        texts = [(self._tree.path / file).read_text() for file in files]
        key = _digest("\0".join([mutant.name, mutant.text, *tests, *texts]))
        if key not in self._results:
            self._results[key] = test_mutant(self._tree, mutant, tests)
            with self._file.open("a") as file:
                file.write(json.dumps([key, self._results[key]]) + "\n")
        return self._results[key]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("places", nargs="*", help="files or folders (default: the packages)")
    parser.add_argument("--sample", type=int, help=f"mutants of each (default {SAMPLE_SIZE})")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; the same command continues"))
    number = options.sample or (None if options.places else SAMPLE_SIZE)
    folder = ROOT / "build" / "mutants"
    tree, reasons = WorkingCopy(ROOT, folder), known_survivors()
    known, new_survivors = ResultCache(tree), list[str]()
    for place in options.places or PACKAGES:
        folders = next(tests for package, tests in PACKAGES.items() if place.startswith(package))
        tests, counts = map_calls(tree, folders), Counter[str]()
        for mutant in sample(all_mutants(ROOT, [place]), number, options.seed):
            result = known.test_mutant(mutant, tests.calling(mutant))
            counts[result] += 1
            if result in (SURVIVES, UNREACHED):
                reason = reasons.get(mutant.name)
                print(
                    f"{result}: {mutant.name}" + (f"\n    {reason}" if reason else ""), flush=True
                )
                new_survivors += [] if reason else [mutant.name]
        print(f"{place}: " + ", ".join(f"{n} {result}" for result, n in sorted(counts.items())))
        for test in tests.failed:
            print(f"    fails on the original code, so it was not run on mutants: {test}")
    print(f"{len(new_survivors)} mutants that no test detects and survivors.toml does not list")
    return 1 if new_survivors else 0


if __name__ == "__main__":
    sys.exit(main())
