"""Records on disk: how a cell's files are written and read.

Records are immutable JSON files, ``runs/b00-p02-ARM.json``, written whole by rename and
never overwritten. Reading is strict: a truncated file, a foreign one or one of another
schema version is refused by name. Keys that this version does not know are kept.
Standard library only: workers, the parent and the analysis all read it.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from labkit.records.codec import (
    SCHEMA_VERSION,
    RecordError,
    read_json,
    require,
    rest,
    take,
    write_json,
)
from labkit.records.schema import (
    BETTER,
    OUTCOMES,
    ROLES,
    Arm,
    CaseRecord,
    Metric,
    Record,
    parse_run_name,
    run_name,
)

PROCESSES = "~processes"  # behind the folder of a cell: that of the cell which confirms it

__all__ = [
    "BETTER",
    "OUTCOMES",
    "PROCESSES",
    "ROLES",
    "SCHEMA_VERSION",
    "Arm",
    "CaseRecord",
    "Metric",
    "Record",
    "RecordError",
    "parse_run_name",
    "read",
    "read_arm",
    "read_arms",
    "read_cell",
    "read_json",
    "read_runs",
    "run_name",
    "values_path",
    "write",
    "write_json",
]


def read(path: Path) -> Record:
    """Read and check one run's record.

    Raises
    ------
    RecordError
        The file is missing, truncated, foreign, of another schema version, or its name
        is not that of the run it describes.
    """
    data = read_json(path)
    try:
        record = _record(data)
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
        As in :func:`read`, for the first file that is not a valid record.
    """
    paths = (p for p in (cell_dir / "runs").glob("*.json") if not p.name.startswith("."))
    with _uncollected():
        return sorted((read(p) for p in paths), key=lambda r: (r.block, r.position, r.arm))


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
        claims = take(data, "claims", dict)
        arm = Arm(
            name=take(data, "arm", str),
            role=take(data, "role", str),
            overrides=take(data, "overrides", dict),
            config=take(data, "config", dict),
            identity=take(claims, "identity", str),
            engaged=tuple(take(claims, "engaged", list)),
            extra=rest(data, ["schema_version", "arm", "role", "overrides", "config", "claims"]),
        )
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
        take(data, "design", dict)
        take(data, "arms", list)
    except ValueError as error:
        raise RecordError(f"{path}: not a valid cell: {error}") from None
    return data


def values_path(cell_dir: Path, digest: str) -> Path:
    """Give the file of an output's values; there is one only where outputs differ."""
    return cell_dir / "outputs" / f"{digest}.npy"


# --------------------------------------------------------------------------- writing


def write(path: Path, record: Record) -> None:
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


# --------------------------------------------------------------------------- checking


def _record(data: Mapping[str, Any]) -> Record:
    known = [f.name for f in dataclasses.fields(Record) if f.name != "extra"]
    return Record(
        arm=take(data, "arm", str),
        role=take(data, "role", str),
        block=take(data, "block", int),
        position=take(data, "position", int),
        seed=take(data, "seed", int),
        outcome=take(data, "outcome", str),
        started=take(data, "started", str),
        detail=take(data, "detail", str, None),
        seconds=take(data, "seconds", dict),
        environment=take(data, "environment", dict),
        environment_end=take(data, "environment_end", dict),
        probe=take(data, "probe", dict),
        counters=take(data, "counters", dict),
        cases=tuple(_case(item) for item in take(data, "cases", list)),
        notes=take(data, "notes", dict),
        extra=rest(data, ["schema_version", "run", *known]),
    )


def _case(data: Any) -> CaseRecord:
    require(isinstance(data, dict), "a case is not an object")
    return CaseRecord(
        case=take(data, "case", str),
        skipped=take(data, "skipped", str, None),
        metrics=tuple(_metric(item) for item in take(data, "metrics", list)),
        outputs=take(data, "outputs", dict, None),
        notes=take(data, "notes", dict),
    )


def _metric(data: Any) -> Metric:
    require(isinstance(data, dict), "a metric is not an object")
    name = take(data, "name", str)
    repeats = take(data, "repeats", list)
    require(
        set(map(type, repeats)) <= {int, float},
        f"metric {name}: repeats holds something that is not a number",
    )
    return Metric(
        name=name,
        unit=take(data, "unit", str),
        better=take(data, "better", str),
        primary=take(data, "primary", bool),
        repeats=tuple(map(float, repeats)),
    )
