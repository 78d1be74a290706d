"""A cell's files: where they lie, how they are read and written.

Records are immutable JSON files, ``runs/b00-p02-ARM.json``, written whole by rename and
never overwritten. Workers, the parent and the analysis all read them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from labkit.records import record_codec
from labkit.records.record_codec import read_json, write_json
from labkit.records.record_schema import ROLES, Arm, Record, RecordError, require


def read_record(path: Path) -> Record:
    """Read and check one run's record.

    Raises
    ------
    RecordError
        The file is missing, truncated, foreign, of another schema version, or its name
        is not that of the run it describes.
    """
    data = read_json(path)
    try:
        record = record_codec.record_from(data)
        require(
            data.get("run") == record.run, f"run is {data.get('run')!r}, fields say {record.run}"
        )
        require(path.stem == record.run, f"the file holds run {record.run}")
    except (ValueError, TypeError) as error:
        raise RecordError(f"{path}: not a valid record: {error}") from None
    return record


def read_runs(cell_dir: Path) -> list[Record]:
    """Read every record of a cell, ordered by block and position.

    Raises
    ------
    RecordError
        As in :func:`read_record`, for the first file that is not a valid record.
    """
    paths = (p for p in (cell_dir / "runs").glob("*.json") if not p.name.startswith("."))
    with _uncollected():
        return sorted((read_record(p) for p in paths), key=lambda r: (r.block, r.position, r.arm))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Do without garbage collection: records hold no cycles, looking for some takes a fifth."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def read_arm(path: Path) -> Arm:
    """Read and check one ``arms/ARM.json``; raises :class:`RecordError`."""
    data = read_json(path)
    try:
        arm = record_codec.arm_from(data)
        require(path.stem == arm.name, f"the file holds arm {arm.name}")
    except (ValueError, TypeError) as error:
        raise RecordError(f"{path}: not a valid arm: {error}") from None
    return arm


def read_arms(cell_dir: Path) -> list[Arm]:
    """Read a cell's arms: the baseline first, the control last, names sorted between."""
    paths = (p for p in (cell_dir / "arms").glob("*.json") if not p.name.startswith("."))
    order = {role: rank for rank, role in enumerate(ROLES)}
    return sorted((read_arm(p) for p in paths), key=lambda arm: (order[arm.role], arm.name))


def read_cell(cell_dir: Path) -> dict[str, Any]:
    """Read ``cell.json`` (keys: design.md section 8); raises :class:`RecordError`."""
    path = cell_dir / "cell.json"
    data = read_json(path)
    try:
        return record_codec.cell_from(data)
    except ValueError as error:
        raise RecordError(f"{path}: not a valid cell: {error}") from None


def output_values_path(cell_dir: Path, digest: str) -> Path:
    """Return the file of an output's values; there is one only where outputs differ."""
    return cell_dir / "outputs" / f"{digest}.npy"


def write_record(path: Path, record: Record) -> None:
    """Write a run's record by rename; an existing record is never overwritten.

    Raises
    ------
    RecordError
        ``path`` exists or is not named after the run.
    ValueError
        A value is NaN, infinite or not JSON.
    """
    if path.stem != record.run:
        raise RecordError(f"{path}: the run is {record.run}")
    if path.exists():
        raise RecordError(f"{path}: exists; records are never overwritten")
    write_json(path, record.to_json(), indent=None)
