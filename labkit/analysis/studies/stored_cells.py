"""What is stored of a cell beside its page, so that an unchanged cell is not read again.

``CELL.json`` holds a :class:`.StudyCell` and a stamp: the names, sizes and times of the cell's
files and of labkit's own code, and the content of ``cell.json``. If any of them has changed, or the
study was copied, the cell is analysed again from its records.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import labkit
from labkit.analysis.findings.cell_findings import Finding
from labkit.analysis.model.json_form import fields_to_json, from_json
from labkit.analysis.model.row_model import Comparison, Row
from labkit.analysis.studies.study_cell import StudyCell
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


def read_stored(page: Path, cell_dir: StudyPath) -> StudyCell | None:
    """Return what is stored beside ``page`` (without its suffix), or None if it is out of date."""
    if not all(page.with_name(f"{page.name}{end}").is_file() for end in (".json", ".html", ".md")):
        return None
    try:
        stored = read_json(page.with_name(f"{page.name}.json"))
        if stored["stamp"] == _with_facts(stamp(cell_dir), cell_dir):
            return _from_json(stored["cell"])
    except (RecordError, KeyError, TypeError, ValueError, AttributeError, IndexError):
        pass  # it is damaged, so it is written again
    return None


def store(page: Path, cell_dir: StudyPath, before: str, cell: StudyCell) -> None:
    """Store a cell that is complete and not being worked on.

    ``before``: its stamp before it was read, so that a run that came later is not missed.
    """
    path = page.with_name(f"{page.name}.json")
    if not cell.entry.complete or (isinstance(cell_dir, Path) and is_locked(cell_dir)):
        path.unlink(missing_ok=True)
        return
    body = {"stamp": _with_facts(before, cell_dir), "cell": _to_json(cell)}
    with atomic_write(path) as temporary:
        temporary.write_bytes(to_bytes({"schema_version": SCHEMA_VERSION, **body}, indent=None))


def _to_json(cell: StudyCell) -> dict[str, Any]:
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


def _from_json(data: Mapping[str, Any]) -> StudyCell:
    cell = from_json(StudyCell, data)

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
    """Return a digest of the names, sizes and times of a cell's files and of labkit's code.

    The files of the cell that confirms it in separate processes are included, ``cell.json`` not.
    """
    if isinstance(cell_dir, ArchivePath):
        return f"{_code()} {cell_dir.archive.digest}"
    name = cell_dir.name.removesuffix(PROCESSES_SUFFIX)
    folders = (cell_dir.with_name(one) / sub for one in (name, name + PROCESSES_SUFFIX)
               for sub in FOLDERS)  # fmt: skip
    return _digest(line for folder in folders for line in _files(folder))


def _with_facts(stamp: str, cell_dir: StudyPath) -> str:
    """Add the content of ``cell.json``, which a report writes anew, to a folder's stamp."""
    if isinstance(cell_dir, ArchivePath):
        return stamp
    path = cell_dir / "cell.json"
    content = path.read_bytes() if path.is_file() else b""
    return f"{stamp} {hashlib.sha256(content).hexdigest()}"


def _files(folder: Path) -> Iterator[str]:
    """Yield a line per file of a folder: its path, and what every change of its content changes."""
    if folder.is_dir():
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if entry.is_file() and entry.name != "cell.json" and not entry.name.startswith("."):
                facts = entry.stat()
                state = facts.st_size, facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns
                yield f"{entry.path} {state}"


def _digest(lines: Iterator[str]) -> str:
    return hashlib.sha256("\n".join((_code(), *lines)).encode()).hexdigest()


@cache
def _code() -> str:
    root = Path(labkit.__file__).parent
    folders = (Path(at) for name in PACKAGES for at, _, _ in os.walk(root / name))
    lines = (line for folder in sorted(folders) if folder.name != "__pycache__"
             for line in _files(folder))  # fmt: skip
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
