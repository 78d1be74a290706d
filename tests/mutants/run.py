"""Mutation testing: break labkit by one small change at a time, and check that a test fails.

    python tests/mutants/run.py [--sample N] [--seed S] [FILE or FOLDER ...]

Works in a copy of the tree (``build/mutants``). ``N`` mutants are drawn from the whole of labkit,
stratified by package (from named files without ``--sample``, all of them). A mutant is tested by
those tests nearest to its module (:mod:`selection`) that call its function, the fastest first. The
test files first run once on the original, to record their times and calls.

A mutant that no test detects survives. If none can, ``survivors.toml`` lists it with the reason.
Each package has a budget in the same file: the exit status is 1 if more unlisted mutants of any
package survive. The seed, the survivors as diffs and the table of packages are written to
``build/mutants/report.txt``. Results stay in ``build/mutants``, so an interrupted run continues
where it stopped.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from mutation import MODULE, Mutant, mutants  # noqa: E402
from selection import PACKAGE, NearestTests, digest, draw, package_of  # noqa: E402

ROOT = HERE.parents[1]
SURVIVORS = HERE / "survivors.toml"
SAMPLE_SIZE = 300
MAX_TESTS_S = 30.0  # of tests that run on a mutant, by their time on the original
TIMEOUT_S = 600.0  # a mutant whose tests take longer, kernels compiled anew, hangs: detected
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
        time = int(digest(mutant.name)[:7], 16)
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

    def calling(self, mutant: Mutant, files: Sequence[str]) -> list[str]:
        """Return the tests in ``files`` that may call a mutant's function, the fastest first.

        Those are the tests that were seen to call it. If none was, and the function is decorated
        and so may be compiled, it is every test. It is also every test of a file that was not seen
        to call the module, since its tests may call it in a process of another environment. Their
        time on the original code is limited to 30 s, but the fastest always runs.
        """
        callers, seen = set[str](), set[str]()
        for (path, function), tests in self.callers.items():
            if path == mutant.path:
                seen |= {test.split("::")[0] for test in tests}
                inside = function == mutant.function or function.startswith(mutant.function + ".<")
                callers |= tests if inside or mutant.function == MODULE else set()
        unseen = {file for file in files if file not in seen}
        if mutant.decorated and not callers:
            unseen = set(files)
        callers |= {test for test in self.seconds if test.split("::")[0] in unseen}
        chosen, spent = [], 0.0
        for test in sorted(callers, key=lambda test: (self.seconds[test], test)):
            if test.split("::")[0] not in files:
                continue
            spent += self.seconds[test]
            if chosen and spent > MAX_TESTS_S:
                break
            chosen.append(test)
        return chosen


def map_calls(tree: WorkingCopy, files: Iterable[str]) -> TestCalls:
    """Run the fast tests of these files once, and record their calls; skip unchanged files."""
    tests = TestCalls()
    for name in sorted(set(files)):
        text = (tree.path / name).read_text()
        stem = "-".join([*Path(name).with_suffix("").parts[1:], digest(text)])
        calls, report = (tree.path.parent / "calls" / f"{stem}{end}" for end in (".tsv", ".xml"))
        calls.parent.mkdir(exist_ok=True)
        if not report.exists():
            calls.unlink(missing_ok=True)
            print(f"recording calls: {name}", flush=True)
            options = ["-n", "0", "-m", "not slow and not metal", f"--junitxml={report}"]
            tree.run([name, *options], calls)
        tests.read(name, calls, report)
    return tests


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


def listed_survivors() -> dict[str, str]:
    """Return the mutants that no test can detect, with their reasons."""
    groups = tomllib.loads(SURVIVORS.read_text())["survivors"]
    return {name: group["reason"] for group in groups for name in group["mutants"]}


def survivor_budgets() -> dict[str, float]:
    """Return the survivors allowed among 100 drawn mutants, by package."""
    budgets: dict[str, float] = tomllib.loads(SURVIVORS.read_text())["budgets"]
    return budgets


@dataclass(frozen=True)
class PackageResult:
    """The results of the mutants drawn from one package.

    ``listed`` counts the survivors that no test can detect; ``survivors`` holds the others.
    """

    package: str
    killed: int
    listed: int
    survivors: tuple[Mutant, ...]
    budget_pct: float

    @property
    def drawn(self) -> int:
        """Number of mutants drawn."""
        return self.killed + self.listed + len(self.survivors)

    @property
    def budget(self) -> int:
        """Number of survivors allowed, rounded up."""
        return math.ceil(self.budget_pct * self.drawn / 100)

    @property
    def exceeded(self) -> bool:
        """Whether more mutants survived than the budget allows."""
        return len(self.survivors) > self.budget


def package_results(
    results: Iterable[tuple[Mutant, str]], listed: Iterable[str], budgets: Mapping[str, float]
) -> list[PackageResult]:
    """Count the results of mutants by package."""
    groups: dict[str, list[tuple[Mutant, str]]] = defaultdict(list)
    for mutant, result in results:
        groups[package_of(mutant.path)].append((mutant, result))
    names, counts = set(listed), []
    for package, group in sorted(groups.items()):
        alive = [mutant for mutant, result in group if result in (SURVIVES, UNREACHED)]
        survivors = tuple(mutant for mutant in alive if mutant.name not in names)
        counts.append(
            PackageResult(
                package,
                killed=len(group) - len(alive),
                listed=len(alive) - len(survivors),
                survivors=survivors,
                budget_pct=budgets[package],
            )
        )
    return counts


def table(results: Sequence[PackageResult]) -> str:
    """Return the table of packages; those over their budget are marked."""
    width = max(len(one.package) for one in results)
    lines = [f"{'package':{width}}  drawn  killed  listed  survived  budget"]
    for one in results:
        lines.append(
            f"{one.package:{width}}  {one.drawn:5}  {one.killed:6}  {one.listed:6}  "
            f"{len(one.survivors):8}  {one.budget:6}" + ("  exceeded" if one.exceeded else "")
        )
    return "\n".join(lines)


def report(results: Sequence[PackageResult], title: str) -> str:
    """Return the report: its title, the survivors as diffs, and the table of packages."""
    diffs = [mutant.diff for one in results for mutant in one.survivors]
    return "\n".join([title, "", *diffs, table(results), ""])


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
        key = digest("\0".join([mutant.name, mutant.text, *tests, *texts]))
        if key not in self._results:
            self._results[key] = test_mutant(self._tree, mutant, tests)
            with self._file.open("a") as file:
                file.write(json.dumps([key, self._results[key]]) + "\n")
        return self._results[key]


def run_sample(tree: WorkingCopy, drawn: Sequence[Mutant]) -> list[tuple[Mutant, str]]:
    """Test each mutant, print a line on it, and return the results."""
    cache, test_files = ResultCache(tree), NearestTests(tree.path)
    files = {path: test_files.nearest(path) for path in {mutant.path for mutant in drawn}}
    tests = map_calls(tree, [file for nearest in files.values() for file in nearest])
    for test in tests.failed:
        print(f"fails on the original code, so it does not run on mutants: {test}")
    results = []
    for number, mutant in enumerate(drawn, 1):
        result = cache.test_mutant(mutant, tests.calling(mutant, files[mutant.path]))
        print(f"[{number}/{len(drawn)}] {result}: {mutant.name}", flush=True)
        results.append((mutant, result))
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("places", nargs="*", help=f"files or folders (default: {PACKAGE})")
    parser.add_argument("--sample", type=int, help=f"number of mutants (default {SAMPLE_SIZE})")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; type the same command to resume"))
    number = options.sample or (None if options.places else SAMPLE_SIZE)
    places = options.places or [PACKAGE]
    try:
        drawn = draw(all_mutants(ROOT, places), number, options.seed)
    except ValueError as error:
        parser.error(str(error))
    folder = ROOT / "build" / "mutants"
    outcomes = run_sample(WorkingCopy(ROOT, folder), drawn)
    results = package_results(outcomes, listed_survivors(), survivor_budgets())
    title = f"{len(drawn)} mutants of {' '.join(places)}, seed {options.seed}"
    text = report(results, title)
    (folder / "report.txt").write_text(text)
    print(f"\n{text}", end="")
    return int(any(one.exceeded for one in results))


if __name__ == "__main__":
    sys.exit(main())
