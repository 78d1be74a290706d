"""What is stored of a cell beside its page, so that an unchanged cell is not read again.

``CELL.json`` holds a :class:`.CellSummary` and a stamp: the names, sizes and times of the cell's
files, the content of ``cell.json`` and labkit's own code. If any of them has changed, such as the
times in a copy of the study, the files' content decides: it is read and compared by its digest. If
that has changed, too, the cell is analysed again from its records.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import Any

import labkit
from labkit.analysis.findings.answer_data import Finding
from labkit.analysis.model.json_form import fields_to_json, from_json
from labkit.analysis.model.result_row import Comparison, Row
from labkit.analysis.studies.cell_summary import CellSummary
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


def read_stored(page: Path, cell_dir: StudyPath) -> CellSummary | None:
    """Return what is stored beside ``page`` (without its suffix), or None if it is out of date."""
    if not all(page.with_name(f"{page.name}{end}").is_file() for end in (".json", ".html", ".md")):
        return None
    path = page.with_name(f"{page.name}.json")
    try:
        stored, now = read_json(path), stamp(cell_dir)
        stamped = _with_facts(now, cell_dir)
        if stored["stamp"] == stamped:
            return _from_json(stored["cell"])
        if stored["content"] == _with_facts(content(cell_dir), cell_dir):
            cell = _from_json(stored["cell"])
            _write(path, {**stored, "stamp": stamped})
            return cell
    except (RecordError, KeyError, TypeError, ValueError, AttributeError, IndexError):
        pass  # it is damaged, so it is written again
    return None


def files_state(cell_dir: StudyPath) -> dict[str, str]:
    """Return the stamp and the content of a cell before it is read, so that no run is missed."""
    return {"stamp": stamp(cell_dir), "content": content(cell_dir)}


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
        return tuple(Finding(row, _comparison(row, arm), *rest) for row, arm, *rest in found)

    own, noise = map(findings, data["places"])
    alone = None if data["alone"] is None else cell.primary[data["alone"]]
    return replace(cell, findings=replace(cell.findings, findings=own, noise=noise, alone=alone))


def _comparison(row: Row, arm: str) -> Comparison:
    (own,) = (one for one in row.comparisons if one.arm == arm)
    return own


def stamp(cell_dir: StudyPath) -> str:
    """Return a digest of the names, sizes and times of a cell's files, and of labkit's code.

    The files of the cell that confirms it in separate processes are included, ``cell.json`` not.
    """
    if isinstance(cell_dir, ArchivePath):
        return f"{_code()} {cell_dir.archive.digest}"
    return _digest(f"{entry.path} {_state(entry)}" for entry in _entries(cell_dir))


def content(cell_dir: StudyPath) -> str:
    """Return a digest of the same files' names and content, and of the study's name."""
    if isinstance(cell_dir, ArchivePath):
        return stamp(cell_dir)
    files = map(Path, _entries(cell_dir))
    lines = (f"{path.relative_to(cell_dir.parent)} {_sha256(path)}" for path in files)
    return _digest(chain([cell_dir.parent.resolve().name], lines))


def _with_facts(stamp: str, cell_dir: StudyPath) -> str:
    """Add the content of ``cell.json``, which a report writes anew, to a folder's stamp."""
    if isinstance(cell_dir, ArchivePath):
        return stamp
    path = cell_dir / "cell.json"
    return f"{stamp} {_sha256(path) if path.is_file() else None}"


def _entries(cell_dir: Path) -> Iterator[os.DirEntry[str]]:
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
