"""Mutation testing: break labkit by one small change at a time, and check that a test fails.

    python tests/mutants/run.py [--sample N] [--seed S] [--jobs J] [FILE or FOLDER ...]

Works in ``J`` copies of the tree (``build/mutants``), on as many mutants at a time. ``N`` mutants
are drawn from the whole of labkit, stratified by package (from named files without ``--sample``,
all of them). On a mutant run the test files nearest to its module (:mod:`selection`), one after
another, until a test fails or hangs that passes on the original: the mutant is killed. Otherwise it
survives. If no test can detect it, ``survivors.toml`` lists it with the reason.

Prints a line for each mutant, the unlisted survivors as diffs, and a table: of each package and of
all, the mutants drawn, killed, listed and survived, the rate (survived by drawn) and the budget,
which is the highest rate allowed by ``survivors.toml``. The budget of a package applies if at least
20 of its mutants were drawn; that of all applies in any case where 20 were drawn in total.

The exit status is 0 within all budgets that apply, 1 above one of them or if stopped, and 2 if the
arguments are wrong. The report is also in ``build/mutants/report.txt``. Results stay in
``build/mutants``, so an interrupted run continues where it stopped.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from mutation import Mutant, mutants  # noqa: E402
from selection import PACKAGE, NearestTests, digest, draw, package_of  # noqa: E402

ROOT = HERE.parents[1]
SURVIVORS = HERE / "survivors.toml"
SAMPLE_SIZE = 300
MIN_DRAWN = 20  # one of two mutants says nothing about a rate
TIMEOUT_S = 600.0  # of one file of tests, kernels compiled anew: a mutant that takes longer hangs
FAST_TESTS = "not slow and not metal"
NO_TESTS = 5  # pytest's exit status if every test of a file is left out
KILLED, SURVIVES = "killed", "survives"
TOTAL = "all"


class Stopped(Exception):
    """The tests of a working copy were stopped."""


class WorkingCopy:
    """A copy of the repository in which one file at a time is broken."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.source, self.path = source, folder / "tree"
        self._stopped = False
        self._process: subprocess.Popen[bytes] | None = None
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

    def failures(self, arguments: Sequence[str]) -> set[str] | None:
        """Run pytest and return what fails, or None if it takes too long.

        That is tests, or files that cannot be imported. It is ``{""}`` if pytest itself fails.
        Raises ``Stopped`` after ``stop``.
        """
        cache = self.path.parent / "pytest_cache"
        shutil.rmtree(cache, ignore_errors=True)  # it would list earlier failures too
        options = ["-n", "0", "-m", FAST_TESTS, "-o", f"cache_dir={cache}"]
        with (self.path.parent / "log").open("w") as log:
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *arguments],
                cwd=self.path,
                env={**os.environ, "PYTHONPATH": str(self.path)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                if self._stopped:
                    raise Stopped
                status = process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                return None
            finally:
                _end(process)
        if self._stopped:
            raise Stopped
        failed = cache / "v" / "cache" / "lastfailed"
        names = set(json.loads(failed.read_text())) if failed.exists() else set()
        return names if names or status in (0, NO_TESTS) else {""}

    def stop(self) -> None:
        """End the running tests. May be called by another thread."""
        self._stopped = True
        if self._process is not None:
            _end(self._process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children."""
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        return
    process.wait()


class MutantTests:
    """Test files that run on mutants. Tests that fail on the original are left out."""

    def __init__(self, tree: WorkingCopy) -> None:
        self._tree, self._tried = tree, set[str]()
        self.broken = set[str]()

    def kill(self, mutant: Mutant, files: Sequence[str]) -> bool:
        """Return whether a test in ``files`` detects a mutant."""
        return any(self._kills(file, mutant) for file in files)

    def _kills(self, file: str, mutant: Mutant) -> bool:
        while file not in self.broken:
            left_out = [f"--deselect={test}" for test in sorted(self.broken)]
            self._tree.write(mutant)
            try:
                failed = self._tree.failures(["-x", file, *left_out])
            finally:
                self._tree.restore(mutant.path)
            if failed == set():
                return False
            if any(self._passes(test or file) for test in failed or {file}):
                return True
        return False

    def _passes(self, test: str) -> bool:
        """Return whether a test passes on the original, or a file ends; note what fails in it."""
        if test not in self._tried:
            self._tried.add(test)
            failed = self._tree.failures([test])
            failed = {test} if failed is None else {name or test for name in failed}
            for name in sorted(failed - self.broken):
                print(f"fails on the original code, so it does not run on mutants: {name}")
            self.broken |= failed
        return test not in self.broken


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
    return {name: group["reason"] for group in groups for name in group.get("mutants", ())}


def listed_kinds() -> dict[str, str]:
    """Return the patterns of names of mutants that no test can detect, with their reasons."""
    groups = tomllib.loads(SURVIVORS.read_text())["survivors"]
    return {group["kind"]: group["reason"] for group in groups if "kind" in group}


def listed_of(names: Iterable[str]) -> set[str]:
    """Return those of these mutants that are listed, by name or by kind."""
    listed, kinds = listed_survivors(), [re.compile(kind) for kind in listed_kinds()]
    return {name for name in names if name in listed or any(kind.search(name) for kind in kinds)}


def survivor_budgets() -> dict[str, float]:
    """Return the highest allowed rate of survivors (%), by package and of all mutants."""
    budgets: dict[str, float] = tomllib.loads(SURVIVORS.read_text())["budgets"]
    return budgets


@dataclass(frozen=True)
class PackageResult:
    """The results of the mutants drawn from one package, or from all.

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
    def rate_pct(self) -> float:
        """Unlisted survivors in 100 drawn mutants."""
        return 100 * len(self.survivors) / self.drawn

    @property
    def has_budget(self) -> bool:
        """Whether enough mutants were drawn for the budget to apply."""
        return self.drawn >= MIN_DRAWN

    @property
    def exceeded(self) -> bool:
        """Whether more mutants survived than the budget allows."""
        return self.has_budget and self.rate_pct > self.budget_pct


def package_results(
    results: Iterable[tuple[Mutant, str]], listed: Iterable[str], budgets: Mapping[str, float]
) -> list[PackageResult]:
    """Count the results of mutants by package, and at last of all."""
    groups: dict[str, list[tuple[Mutant, str]]] = defaultdict(list)
    for mutant, result in results:
        groups[package_of(mutant.path)].append((mutant, result))
    groups = dict(sorted(groups.items()))
    groups[TOTAL] = [one for group in groups.values() for one in group]
    names, counts = set(listed), []
    for package, group in groups.items():
        alive = [mutant for mutant, result in group if result == SURVIVES]
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
    lines = [f"{'package':{width}}  drawn  killed  listed  survived   rate  budget"]
    for one in results:
        budget = f"{one.budget_pct:3g} %" if one.has_budget else "-"
        lines.append(
            f"{one.package:{width}}  {one.drawn:5}  {one.killed:6}  {one.listed:6}  "
            f"{len(one.survivors):8}  {one.rate_pct:3.0f} %  {budget:>6}"
            + ("  exceeded" if one.exceeded else "")
        )
    return "\n".join(lines)


def report(results: Sequence[PackageResult], title: str) -> str:
    """Return the report: its title, the survivors as diffs, the table, and the verdict."""
    diffs = [mutant.diff for mutant in results[-1].survivors]
    over = [one.package for one in results if one.exceeded]
    verdict = f"Survivors exceed the budget: {', '.join(over)}." if over else "Within the budgets."
    if any(not one.has_budget for one in results):
        verdict += f" No budget applies to fewer than {MIN_DRAWN} drawn mutants (-)."
    return "\n".join([title, "", *diffs, table(results), "", verdict, ""])


class ResultCache:
    """Results of mutants, stored in a file, valid while a mutant's file and tests are unchanged."""

    def __init__(self, file: Path) -> None:
        self._file = file
        lines = file.read_text().splitlines() if file.exists() else []
        self._results: dict[str, str] = dict(json.loads(line) for line in lines)

    def get(self, key: str) -> str | None:
        """Return the result stored under ``key``, or None."""
        return self._results.get(key)

    def store(self, key: str, result: str) -> None:
        """Store a result. May be called by several threads."""
        self._results[key] = result
        with self._file.open("a") as file:
            file.write(json.dumps([key, result]) + "\n")


def run_sample(
    copies: Sequence[WorkingCopy], drawn: Sequence[Mutant], file: Path
) -> list[tuple[Mutant, str]]:
    """Test the mutants, one in each copy at a time; print a line on each, and return the results.

    ``file``: where the results are stored.
    """
    cache, nearest = ResultCache(file), NearestTests(copies[0].path)
    idle: SimpleQueue[MutantTests] = SimpleQueue()
    for copy in copies:
        idle.put(MutantTests(copy))

    def outcome(mutant: Mutant) -> str:
        files = nearest.nearest(mutant.path)
        texts = [(copies[0].source / file).read_text() for file in files]
        key = digest("\0".join([mutant.name, mutant.text, *files, *texts]))
        if (result := cache.get(key)) is None:
            tests = idle.get()
            try:
                result = KILLED if tests.kill(mutant, files) else SURVIVES
            finally:
                idle.put(tests)
            cache.store(key, result)
        return result

    results = []
    pool = ThreadPoolExecutor(len(copies))
    try:
        for mutant, result in zip(drawn, pool.map(outcome, drawn), strict=True):
            results.append((mutant, result))
            print(f"[{len(results)}/{len(drawn)}] {result}: {mutant.name}", flush=True)
    finally:
        for copy in copies:
            copy.stop()
        pool.shutdown(cancel_futures=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("places", nargs="*", help=f"files or folders (default: {PACKAGE})")
    parser.add_argument("--sample", type=int, help=f"number of mutants (default {SAMPLE_SIZE})")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    cores = os.cpu_count() or 1
    parser.add_argument(
        "--jobs", type=int, default=cores, help="mutants at a time (default: cores)"
    )
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit("stopped; type the same command to resume"))
    size = options.sample or (None if options.places else SAMPLE_SIZE)
    places = options.places or [PACKAGE]
    try:
        drawn = draw(all_mutants(ROOT, places), size, options.seed)
    except ValueError as error:
        parser.error(str(error))
    folder = ROOT / "build" / "mutants"
    copies = [WorkingCopy(ROOT, folder / str(job)) for job in range(max(1, options.jobs))]
    outcomes = run_sample(copies, drawn, folder / "results.jsonl")
    listed = listed_of(mutant.name for mutant in drawn)
    results = package_results(outcomes, listed, survivor_budgets())
    title = f"{len(drawn)} mutants of {' '.join(places)}, seed {options.seed}"
    text = report(results, title)
    (folder / "report.txt").write_text(text)
    print(f"\n{text}", end="")
    return int(any(one.exceeded for one in results))


if __name__ == "__main__":
    sys.exit(main())
