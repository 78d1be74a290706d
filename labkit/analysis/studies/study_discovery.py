"""Find studies and cells on disk: which folders and archives are studies, and which are cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from labkit.records import (
    ARCHIVE_SUFFIX,
    ArchivePath,
    RecordError,
    StudyPath,
    name_order,
    open_study,
    record_paths,
)

MAX_DEPTH = 3  # folders between the index and a study, such as outputs/2026-11-24/12-00-00


def is_cell(folder: StudyPath) -> bool:
    """Return whether a folder is a cell.

    A cell has a ``cell.json``, or the arms and runs from which it can be rebuilt.
    """
    if isinstance(folder, ArchivePath) and len(folder.parts) == 1:
        return folder.name in folder.archive.cells  # without unpacking it
    if (folder / "cell.json").is_file():
        return True
    return any((folder / "arms").glob("*.json")) and any((folder / "runs").glob("b*.json"))


def cell_dirs(study_dir: StudyPath) -> list[StudyPath]:
    """Return a study's cell folders, sorted by name; numbers in names are sorted by size.

    If ``study_dir`` is itself a cell, the list holds only that folder. Raises ``RecordError`` if
    the folder does not exist, or contains no cell.
    """
    if not study_dir.is_dir():
        raise RecordError(f"{study_dir}: no such directory")
    if is_cell(study_dir):
        # A cell is known by its folder's name, which the working folder "." does not have.
        return [study_dir.resolve() if study_dir == Path() else study_dir]
    cells = [path for path in study_dir.iterdir() if is_cell(path)]
    if not cells:
        raise RecordError(f"{study_dir} has no cell (a folder with arms/ and runs/)")
    return sorted(cells, key=lambda path: name_order(path.name))


def holds_studies(folder: Path) -> bool:
    """Return whether a folder is neither a study nor a cell, but holds studies."""
    if not folder.is_dir() or is_cell(folder):
        return False
    return folder not in (studies := list(study_dirs(folder))) and bool(studies)


def study_dirs(root: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """Yield the folders and archives of studies below ``root``, at most ``depth`` levels down.

    If ``root`` is itself a study, it is the only result. Hidden names are left out: an archive is
    unpacked into a hidden folder, which a killed process leaves behind.

    Raises :class:`RecordError` if ``root`` is not a folder.
    """
    if not root.is_dir():
        raise RecordError(f"{root}: no such directory")
    paths = [path for path in root.iterdir() if not path.name.startswith(".")]
    folders = [path for path in paths if path.is_dir() and not path.is_symlink()]
    if any(is_cell(path) for path in folders):
        yield root
        return
    yield from (path for path in paths if path.suffix == ARCHIVE_SUFFIX)
    for path in folders if depth else ():
        yield from study_dirs(path, depth - 1)


def listed_studies(root: Path) -> list[Path]:
    """Return the studies of :func:`study_dirs`, sorted, without archives of a study beside them."""
    studies = sorted(study_dirs(root))
    return [path for path in studies if not _is_beside_its_folder(path, studies)]


def _is_beside_its_folder(study: Path, studies: Sequence[Path]) -> bool:
    """Return whether a study is the archive of one in the folder ``NAME`` beside ``NAME.zip``."""
    if not study.is_file() or (folder := study.with_suffix("")) not in studies:
        return False
    try:
        return shares_a_record(open_study(study), {cell.name: cell for cell in cell_dirs(folder)})
    except (RecordError, OSError):
        return False  # whoever reads it names the mistake


def shares_a_record(archive: StudyPath, cells: Mapping[str, StudyPath]) -> bool:
    """Return whether a study's archive holds a record of these cells, or none at all."""
    records = [(cell.name, path) for cell in cell_dirs(archive) for path in record_paths(cell)]
    for name, path in records:
        same = cells[name] / "runs" / path.name if name in cells else None
        if same is not None and same.is_file() and same.read_bytes() == path.read_bytes():
            return True
    return not records
