"""Mutation testing: break labkit by one small change at a time, and check that a test fails.

    python tests/mutants/run.py [--sample N] [--seed S] [FILE or FOLDER ...]

Works in a copy of the tree (``build/mutants``). First every fast test runs once and says
which functions it calls; then ``N`` mutants of each package are drawn (all of the files that
are named, without ``--sample``) and each meets the tests that call its function, the
quickest first. One that no test tells from the original must be in ``survivors.toml`` with
the reason; otherwise it is printed and the exit status is 1. What is known stays in
``build/mutants``, so a run that was ended goes on where it was.
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
PACKAGES = {  # and the folders whose tests are asked
    "labkit/analysis": ("tests/analysis", "tests"),
    "labkit/records": ("tests/records", "tests/experiment", "tests/analysis"),
    "labkit/workload": ("tests/workload", "tests/workload/video", "tests/experiment"),
    "labkit/experiment": ("tests/experiment", "tests/workload", "tests"),
    "labkit/machine": ("tests/machine", "tests/experiment"),
    "labkit/cpu": ("tests/cpu", "tests/engine/attention", "tests/engine/numpy_port"),
}
SAMPLE = 100
TESTS_S = 30.0  # of tests that a mutant meets, by what they take unbroken
LIMIT_S = 180.0  # a mutant that takes longer hangs: it shows
KILLED, HANGS, SURVIVES, UNREACHED = "killed", "hangs", "survives", "no test calls it"
Function = tuple[str, str]  # the file and the qualified name


class Tree:
    """A copy of the repository in which one file at a time is broken."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.source, self.path = source, folder / "tree"
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=source,
            capture_output=True,
            check=True,
            text=True,
        )
        wanted = {name for name in listed.stdout.split("\0") if (source / name).is_file()}
        for old in self.path.rglob("*"):
            if old.is_file() and str(old.relative_to(self.path)) not in wanted:
                old.unlink()
        for name in wanted:
            self.restore(name)

    def restore(self, name: str) -> None:
        """Copy a file, times included, so that what was compiled from it holds."""
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(self.source / name, self.path / name)

    def write(self, mutant: Mutant) -> None:
        """Break a file; bytecode is told by time and size, so every mutant has its own time."""
        file = self.path / mutant.path
        file.write_text(mutant.text)
        time = int(_digest(mutant.name)[:7], 16)
        os.utime(file, (time, time))

    def run(self, arguments: Sequence[str], calls: Path | None = None) -> int | None:
        """Run pytest; return its exit status, None where it took too long."""
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
                return process.wait(None if calls else LIMIT_S)
            except subprocess.TimeoutExpired:
                return None
            finally:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started."""
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        return
    process.wait()


@dataclass
class Tests:
    """Every test that passes: its seconds, and who calls what."""

    seconds: dict[str, float] = field(default_factory=dict)
    callers: dict[Function, set[str]] = field(default_factory=lambda: defaultdict(set))
    failed: list[str] = field(default_factory=list)

    def read(self, file: str, calls: Path, report: Path) -> None:
        """Add a file of tests. What a fixture calls counts for all tests of the file."""
        mine = []
        for case in ElementTree.parse(report).iter("testcase"):
            test = f"{file}::{case.get('name')}"
            if case.find("skipped") is not None:
                continue
            if case.find("failure") is not None or case.find("error") is not None:
                self.failed.append(test)
                continue
            mine.append(test)
            self.seconds[test] = float(case.get("time", "0"))
        for line in calls.read_text().splitlines() if calls.exists() else []:
            name, function, said = line.split("\t")
            test, _, phase = said.rpartition(" ")
            here = [test] if phase == "(call)" else mine
            self.callers[f"labkit/{name}", function] |= set(here) & self.seconds.keys()

    def of(self, mutant: Mutant) -> list[str]:
        """Return the tests that call what is broken, the quickest first, so many seconds."""
        found: set[str] = set()
        for (path, function), tests in self.callers.items():
            inside = function == mutant.function or function.startswith(mutant.function + ".<")
            if path == mutant.path and (inside or mutant.function == MODULE):
                found |= tests
        chosen, spent = [], 0.0
        for test in sorted(found, key=lambda test: (self.seconds[test], test)):
            spent += self.seconds[test]
            if chosen and spent > TESTS_S:
                break
            chosen.append(test)
        return chosen


def look(tree: Tree, folders: Iterable[str]) -> Tests:
    """Run the fast tests of these folders, file by file, where they changed since."""
    found = Tests()
    for file in sorted(f for folder in folders for f in tree.path.glob(f"{folder}/test_*.py")):
        name = str(file.relative_to(tree.path))
        stem = tree.path.parent / "calls" / f"{file.parent.name}-{file.stem}"
        stem = stem.with_name(f"{stem.name}-{_digest(file.read_text())}")
        stem.parent.mkdir(exist_ok=True)
        calls, report = stem.with_suffix(".tsv"), stem.with_suffix(".xml")
        if not report.exists():
            calls.unlink(missing_ok=True)
            print(f"who calls what: {name}", flush=True)
            options = ["-m", "not slow and not metal", f"--junitxml={report}"]
            tree.run([name, *options], calls)
        found.read(name, calls, report)
    return found


def draw(candidates: Iterable[Mutant], number: int | None, seed: int) -> list[Mutant]:
    """Return ``number`` of them; a change elsewhere in the code leaves the draw as it is."""
    drawn = sorted(candidates, key=lambda mutant: _digest(f"{seed} {mutant.name}"))
    return drawn[:number]


def meet(tree: Tree, mutant: Mutant, tests: Sequence[str]) -> str:
    """Run tests on a mutant and return what became of it."""
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


def listed() -> dict[str, str]:
    """Return the survivors that are known, with the reason of each."""
    groups = tomllib.loads((HERE / "survivors.toml").read_text())["survivors"]
    return {name: group["reason"] for group in groups for name in group["mutants"]}


class Known:
    """What became of mutants, kept in a file, as long as their file and tests are the same."""

    def __init__(self, tree: Tree) -> None:
        self._tree, self._file = tree, tree.path.parent / "results.jsonl"
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        self._found = dict(json.loads(line) for line in lines)

    def meet(self, mutant: Mutant, tests: Sequence[str]) -> str:
        """Return what became of a mutant, now or before."""
        files = sorted({test.split("::")[0] for test in tests})
        texts = [(self._tree.path / file).read_text() for file in files]
        key = _digest("\0".join([mutant.name, mutant.text, *tests, *texts]))
        if key not in self._found:
            self._found[key] = meet(self._tree, mutant, tests)
            with self._file.open("a") as file:
                file.write(json.dumps([key, self._found[key]]) + "\n")
        return self._found[key]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("places", nargs="*", help="files or folders (default: the packages)")
    parser.add_argument("--sample", type=int, help=f"mutants of each (default {SAMPLE})")
    parser.add_argument("--seed", type=int, default=0, help="another draws others")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended; the same command goes on"))
    number = asked.sample or (None if asked.places else SAMPLE)
    folder = ROOT / "build" / "mutants"
    tree, reasons = Tree(ROOT, folder), listed()
    known, news = Known(tree), list[str]()
    for place in asked.places or PACKAGES:
        folders = next(tests for package, tests in PACKAGES.items() if place.startswith(package))
        tests, counts = look(tree, folders), Counter[str]()
        for mutant in draw(all_mutants(ROOT, [place]), number, asked.seed):
            fate = known.meet(mutant, tests.of(mutant))
            counts[fate] += 1
            if fate in (SURVIVES, UNREACHED):
                reason = reasons.get(mutant.name)
                print(f"{fate}: {mutant.name}" + (f"\n    {reason}" if reason else ""), flush=True)
                news += [] if reason else [mutant.name]
        print(f"{place}: " + ", ".join(f"{n} {fate}" for fate, n in sorted(counts.items())))
        for test in tests.failed:
            print(f"    fails unbroken and was not asked: {test}")
    print(f"{len(news)} that no test tells from the original and survivors.toml does not list")
    return 1 if news else 0


if __name__ == "__main__":
    sys.exit(main())
