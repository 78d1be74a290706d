"""The index of a folder of studies: each cell's question, answer, dates and machine.

Answers are read from ``study.json``, so a hundred studies are listed in seconds. A study without
that file is analysed. The digests of all records are checked first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.model.study_model import CellEntry, Study
from labkit.analysis.studies.study_analysis import cell_dirs, is_cell
from labkit.analysis.studies.study_cell import study_cell
from labkit.records import (
    ARCHIVE_SUFFIX,
    OLDER_VERDICTS,
    ArchivePath,
    RecordError,
    StudyPath,
    check_digests,
    open_study,
    parse_run_name,
    read_json,
    record_paths,
)

MAX_DEPTH = 3  # folders between the index and a study, such as outputs/2026-11-24/12-00-00
UNKNOWN = "unknown"


@dataclass(frozen=True)
class IndexEntry:
    """One cell of the index."""

    study: Path  # the study's folder or archive
    cell: str = ""  # the cell's name
    # question, answer, machine: as in the study's report.
    question: str = ""
    answer: str = ""
    machine: str = ""
    # began, ended: when the first and the last run started, UTC, as in records.
    began: str = ""
    ended: str = ""
    runs: int = 0  # number of records
    gates: dict[str, str] | None = None  # the status of each gate
    # Why the study cannot be read; None if it can. Then all other facts are empty.
    error: str | None = None


def index_entries(root: Path) -> list[IndexEntry]:
    """Return an entry for each cell of each study in a folder, the newest study first.

    Raises ``RecordError`` if the folder does not exist, or holds no study.
    """
    studies = sorted(study_dirs(root))
    if not studies:
        raise RecordError(
            f"{root} has no study (a folder with cells, at most {MAX_DEPTH} levels down)"
        )
    by_study = [list(_entries(study)) for study in studies]
    by_study.sort(key=lambda entries: max(entry.ended for entry in entries), reverse=True)
    return [entry for entries in by_study for entry in entries]


def holds_studies(folder: Path) -> bool:
    """Return whether a folder is neither a study nor a cell, but holds studies."""
    if not folder.is_dir() or is_cell(folder):
        return False
    return folder not in (studies := list(study_dirs(folder))) and bool(studies)


def study_dirs(root: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """Yield the folders and archives of studies below ``root``, at most ``depth`` levels down.

    If ``root`` is itself a study, it is the only result.

    Raises :class:`RecordError` if ``root`` is not a folder.
    """
    if not root.is_dir():
        raise RecordError(f"{root}: no such directory")
    folders = [path for path in root.iterdir() if path.is_dir() and not path.is_symlink()]
    if any(is_cell(path) for path in folders):
        yield root
        return
    yield from (path for path in root.iterdir() if path.suffix == ARCHIVE_SUFFIX)
    for path in folders if depth else ():
        yield from study_dirs(path, depth - 1)


def _entries(study: Path) -> Iterator[IndexEntry]:
    try:
        opened = open_study(study)
        cells = {path.name: path for path in cell_dirs(opened)}
        if not isinstance(opened, ArchivePath):  # an archive's digest is checked when it is opened
            for path in cells.values():
                check_digests(path)
        facts = [fact for fact in _facts(opened, cells) if fact.dir in cells]
        entries = [_entry(study, cells[fact.dir], fact) for fact in facts]
    except (RecordError, OSError) as error:
        yield IndexEntry(study, error=str(error))
        return
    yield from entries


def _facts(study: StudyPath, cells: dict[str, StudyPath]) -> Sequence[CellEntry]:
    """Return the cells' entries in ``study.json``.

    Analyse the study if the file lacks a cell, or has the words of an older version of labkit.
    """
    if (study / "study.json").is_file():
        listed = Study.from_json(read_json(study / "study.json")).cells
        older = any(word in OLDER_VERDICTS for entry in listed for word in entry.verdicts)
        if {entry.dir for entry in listed} >= set(cells) and not older:
            return listed
    return [study_cell(analyse(path)).entry for path in cells.values()]


def _entry(study: Path, cell: StudyPath, fact: CellEntry) -> IndexEntry:
    return IndexEntry(
        study,
        fact.cell or cell.name,
        fact.question or "",
        fact.answer or "",
        fact.machine or UNKNOWN,
        *_started(cell),
        runs=len(record_paths(cell)),
        gates=dict(fact.gates),
    )


def _started(cell: StudyPath) -> tuple[str, str]:
    """Return when the first and the last run of a cell started; empty without runs."""
    paths = sorted(record_paths(cell), key=lambda path: parse_run_name(path.stem))
    ends = [paths[0], paths[-1]] if paths else []
    times = [str(read_json(path).get("started", "")) for path in ends]
    return (times[0], times[-1]) if times else ("", "")
