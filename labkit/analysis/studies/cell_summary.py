"""What a study's pages say of each cell, without its records.

A cell's records and analysis take up to 20 MB; this takes less than a thousandth. So a study of a
thousand cells is read cell by cell, and only this is kept of each.

``CELL.json`` beside a cell's own page stores it with a stamp: the names, sizes and times of the
cell's files, the content of ``cell.json`` and labkit's own code. If any of them has changed, such
as the times in a copy of the study, the files' content decides: it is read and compared by its
digest. If that has changed, too, the cell is analysed again from its records.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain, product
from pathlib import Path
from typing import Any

import labkit
from labkit.analysis.comparison.arm_comparison import PairedRow, paired_rows, paired_tests
from labkit.analysis.comparison.cell_analysis import CellAnalysis
from labkit.analysis.findings.cell_findings import Finding, Findings, plan_findings
from labkit.analysis.findings.full_answer import long_text
from labkit.analysis.findings.short_answer import short_answer
from labkit.analysis.model.dataclass_json import fields_to_json, from_json
from labkit.analysis.model.result_row import Row
from labkit.analysis.model.study_model import CellEntry
from labkit.analysis.robustness.caveats import machine_states
from labkit.analysis.robustness.cells_by_host import machine_name
from labkit.analysis.statistics.multiple_comparisons import RowPermutations
from labkit.analysis.studies.increasing_load import (
    ArmLoad,
    CapacityLoad,
    arm_loads,
    capacity_loads,
)
from labkit.config.arm_sweep import short_names
from labkit.records import (
    PROCESSES_SUFFIX,
    SCHEMA_VERSION,
    ArchivePath,
    RecordError,
    StudyPath,
    is_locked,
    read_json,
)
from labkit.records.atomic_write import atomic_write
from labkit.records.record_codec import to_bytes

FOLDERS = ("", "arms", "runs", "outputs")  # of a cell
PACKAGES = ("analysis", "config", "records")  # whose code a page depends on


@dataclass(frozen=True)
class TestedArm:
    """An arm's tests in the primary rows of a cell. ``names``: case and metric of each row."""

    arm: str
    runs: int  # of each arm per block
    names: tuple[tuple[str, str | None], ...]
    rows: tuple[PairedRow, ...]

    def tests(self) -> dict[int, RowPermutations]:
        """Return the rows' permutation tests, in the order of ``names``."""
        return paired_tests(self.rows, self.runs)


@dataclass(frozen=True)
class CellSummary:
    """What a study's pages say of one cell.

    ``machine_states``: as :func:`.caveats.machine_states`. ``loads`` and ``capacities``: what load
    curves and capacities are made of; empty in a cell that only confirms another. ``tested``: the
    arms that may be claimed about. ``unlisted``: the number of records without a digest.
    """

    entry: CellEntry
    title: str
    overrides: tuple[str, ...]
    primary: tuple[Row, ...]
    findings: Findings
    machine_states: Mapping[str, list[str]]
    loads: tuple[ArmLoad, ...] = ()
    capacities: tuple[CapacityLoad, ...] = ()
    tested: tuple[TestedArm, ...] = ()
    unlisted: int = 0

    @property
    def name(self) -> str:
        return self.entry.cell

    @cached_property
    def short_answer(self) -> str:
        return short_answer(self.findings)


def cell_summary(analysis: CellAnalysis) -> CellSummary:
    """Return what a study's pages say of a cell."""
    findings, cell = plan_findings(analysis), analysis.cell
    confirms = analysis.data.dir.name.endswith(PROCESSES_SUFFIX)  # another cell has its loads
    return CellSummary(
        entry=_entry(analysis, findings),
        title=cell.title,
        overrides=tuple(analysis.data.manifest.get("overrides") or [analysis.name]),
        primary=tuple(cell.primary_rows),
        findings=findings,
        machine_states=machine_states(analysis),
        loads=() if confirms else tuple(arm_loads(analysis)),
        capacities=() if confirms else tuple(capacity_loads(analysis)),
        tested=tuple(_tested(analysis)),
        unlisted=analysis.data.unlisted,
    )


def _entry(analysis: CellAnalysis, findings: Findings) -> CellEntry:
    cell, data = analysis.cell, analysis.data
    arms = set(cell.treatment_arms)
    comparisons = (one for row in cell.primary_rows for one in row.comparisons)
    return CellEntry(
        cell=cell.cell,
        dir=data.dir.name,
        machine=machine_name(analysis),
        question=cell.question,
        answer=long_text(findings),
        status=analysis.status,
        complete=data.complete,
        blocks=len(data.blocks_done),
        runs=len(data.records),
        failures=len(cell.failures),
        gates={name: gate.status for name, gate in cell.gates.items()},
        verdicts=dict(Counter(one.verdict for one in comparisons if one.arm in arms)),
    )


def _tested(analysis: CellAnalysis) -> Iterator[TestedArm]:
    """Yield the arms of a cell that have tests; none while nothing may be claimed."""
    data, runs = analysis.data, analysis.data.criteria.runs
    for arm in data.treatment_arms if data.withheld_reason is None else ():
        estimates = data.design.estimates  # nothing is claimed of them
        without = [i for i, row in enumerate(analysis.rows) if row.case in estimates]
        pairs = [row.pair(data.baseline, arm) for row in analysis.rows]  # as for the verdict
        rows = paired_rows(pairs, arm, data.baseline, runs, True, without)
        if rows:
            of_rows = [analysis.rows[row.index] for row in rows]
            names = tuple((row.case, row.metric) for row in of_rows)
            yield TestedArm(arm, runs, names, tuple(rows))


def cell_labels(cells: Sequence[CellSummary], ignore: Collection[str] = ()) -> list[str]:
    """Return a label for each cell, such as ``rate=2``, without the options in ``ignore``.

    If there is only one cell, its label has all its overrides. A cell of an earlier version of
    labkit, which did not list the overrides, is labelled by its name.
    """
    listed = [
        [override for override in cell.overrides if override.partition("=")[0] not in ignore]
        for cell in cells
    ]
    if len(cells) == 1:
        return [", ".join(listed[0]) or cells[0].name]
    common = set.intersection(*map(set, listed))
    varying = [[o for o in overrides if o not in common] for overrides in listed]
    keys = dict.fromkeys(o.partition("=")[0] for overrides in varying for o in overrides)
    short = short_names(list(keys))
    return [
        _label(overrides, short, cell.entry.dir)
        for overrides, cell in zip(varying, cells, strict=True)
    ]


def cell_headings(cells: Sequence[CellSummary]) -> list[str]:
    """Return each cell's title, with its label if other cells have the same title."""
    count = Counter(cell.title for cell in cells)
    return [
        cell.title if count[cell.title] == 1 else f"{cell.title} ({label})"
        for cell, label in zip(cells, cell_labels(cells), strict=True)
    ]


def _label(overrides: Sequence[str], short: dict[str, str], folder: str) -> str:
    pairs = (override.partition("=") for override in overrides)
    words = [f"{short[key]}{equals}{value}" for key, equals, value in pairs]
    if folder.endswith(PROCESSES_SUFFIX):
        words.append("in separate processes")
    return ", ".join(words) or "as configured"


def read_stored(page: Path, cell_dir: StudyPath) -> CellSummary | None:
    """Return what is stored beside ``page`` (without its suffix), or None if it is out of date."""
    if not all(page.with_name(f"{page.name}{end}").is_file() for end in (".json", ".html", ".md")):
        return None
    path = page.with_name(f"{page.name}.json")
    try:
        stored, now = read_json(path), _stamp(cell_dir)
        stamped = _with_facts(now, cell_dir)
        if stored["stamp"] == stamped:
            return _from_json(stored["cell"])
        if stored["content"] == _with_facts(_content(cell_dir), cell_dir):
            cell = _from_json(stored["cell"])
            _write(path, {**stored, "stamp": stamped})
            return cell
    except (RecordError, KeyError, TypeError, ValueError, AttributeError, IndexError):
        pass  # it is damaged, so it is written again
    return None


def files_state(cell_dir: StudyPath) -> dict[str, str]:
    """Return the stamp and the content of a cell before it is read, so that no run is missed."""
    return {"stamp": _stamp(cell_dir), "content": _content(cell_dir)}


def store(page: Path, cell_dir: StudyPath, before: Mapping[str, str], cell: CellSummary) -> None:
    """Store a cell that is complete and not being worked on."""
    path = page.with_name(f"{page.name}.json")
    if not cell.entry.complete or (isinstance(cell_dir, Path) and is_locked(cell_dir)):
        path.unlink(missing_ok=True)
        return
    body = {name: _with_facts(state, cell_dir) for name, state in before.items()}
    _write(path, {"schema_version": SCHEMA_VERSION, **body, "cell": _to_json(cell)})


def _write(path: Path, body: Mapping[str, Any]) -> None:
    with atomic_write(path) as temporary:
        temporary.write_bytes(to_bytes(body, indent=None))


def _to_json(cell: CellSummary) -> dict[str, Any]:
    """Return a cell without the values of single runs, which no page of a whole study shows.

    Each finding refers to its primary row instead of repeating it.
    """
    of, rows = cell.findings, [id(row) for row in cell.primary]

    def places(findings: Sequence[Finding]) -> list[list[Any]]:
        return [[rows.index(id(f.row)), f.arm, f.place, f.is_computed] for f in findings]

    brief = tuple(
        replace(row, arms={name: replace(values, runs=()) for name, values in row.arms.items()})
        for row in cell.primary
    )
    plain = replace(of, findings=(), noise=(), alone=None)
    return {
        **fields_to_json(replace(cell, primary=brief, findings=plain)),
        "places": [places(of.findings), places(of.noise)],
        "alone": None if of.alone is None else rows.index(id(of.alone)),
    }


def _from_json(data: Mapping[str, Any]) -> CellSummary:
    cell = from_json(CellSummary, data)

    def findings(places: Sequence[Sequence[Any]]) -> tuple[Finding, ...]:
        found = ((cell.primary[index], *rest) for index, *rest in places)
        own = ((row, {one.arm: one for one in row.comparisons}, *rest) for row, *rest in found)
        return tuple(Finding(row, by_arm[arm], *rest) for row, by_arm, arm, *rest in own)

    own, noise = map(findings, data["places"])
    alone = None if data["alone"] is None else cell.primary[data["alone"]]
    return replace(cell, findings=replace(cell.findings, findings=own, noise=noise, alone=alone))


def _stamp(cell_dir: StudyPath) -> str:
    """Return a digest of the names, sizes and times of a cell's files, and of labkit's code.

    The files of the cell that confirms it in separate processes are included, ``cell.json`` not.
    """
    if isinstance(cell_dir, ArchivePath):
        return f"{_code()} {cell_dir.archive.digest}"
    return _digest(f"{entry.path} {_state(entry)}" for entry in _files(cell_dir))


def _content(cell_dir: StudyPath) -> str:
    """Return a digest of the same files' names and content, and of the study's name."""
    if isinstance(cell_dir, ArchivePath):
        return _stamp(cell_dir)
    files = map(Path, _files(cell_dir))
    lines = (f"{path.relative_to(cell_dir.parent)} {_sha256(path)}" for path in files)
    return _digest(chain([cell_dir.parent.resolve().name], lines))


def _with_facts(stamp: str, cell_dir: StudyPath) -> str:
    """Add the content of ``cell.json``, which a report writes anew, to a folder's stamp."""
    if isinstance(cell_dir, ArchivePath):
        return stamp
    path = cell_dir / "cell.json"
    return f"{stamp} {_sha256(path) if path.is_file() else None}"


def _files(cell_dir: Path) -> Iterator[os.DirEntry[str]]:
    name = cell_dir.name.removesuffix(PROCESSES_SUFFIX)
    for one, sub in product((name, name + PROCESSES_SUFFIX), FOLDERS):
        folder = cell_dir.with_name(one) / sub
        entries = sorted(os.scandir(folder), key=lambda e: e.name) if folder.is_dir() else ()
        for entry in entries:
            if entry.is_file() and entry.name != "cell.json" and not entry.name.startswith("."):
                yield entry


def _state(entry: os.DirEntry[str]) -> tuple[int, ...]:
    """Return what every change of a file's content changes."""
    facts = entry.stat()
    return facts.st_size, facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest(lines: Iterator[str]) -> str:
    return hashlib.sha256("\n".join((_code(), *lines)).encode()).hexdigest()


@cache
def _code() -> str:
    root = Path(labkit.__file__).parent
    paths = sorted(path for name in PACKAGES for path in (root / name).rglob("*.*"))
    files = (path for path in paths if path.suffix != ".pyc" and path.is_file())
    lines = (f"{path.relative_to(root)} {_sha256(path)}" for path in files)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
