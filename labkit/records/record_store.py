"""The store of records: reads and writes the files in a cell's folder.

Records are immutable JSON files, ``runs/b00-p02-ARM.json``, written by rename and never
overwritten. Workers, their parent process and the analysis all use this module.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from labkit.records import record_codec
from labkit.records.atomic_write import write_synced
from labkit.records.record_codec import read_json, to_bytes, write_json
from labkit.records.record_digests import check_digest, list_digests, read_digests
from labkit.records.run_record import ROLES, SCHEMA_VERSION, Arm, Record, RecordError, require
from labkit.records.study_archive import StudyPath

DESIGN_FILE = "design.json"


def read_record(path: StudyPath, digest: str | None = None) -> Record:
    """Read and check one run's record.

    ``digest``: the SHA-256 that the file must have; None if it is unknown. Raises ``RecordError``
    if the file is missing, truncated, edited or not a record of this schema version, or its name is
    not the name of its run.
    """
    data = read_json(path, digest)
    try:
        record = record_codec.record_from_json(data)
        require(
            data.get("run") == record.run,
            f"run is {data.get('run')!r}, but block, position and arm make it {record.run}",
        )
        require(path.stem == record.run, f"the file holds run {record.run}")
    except (ValueError, TypeError) as error:
        raise RecordError(f"{path} is not a valid record: {error}") from None
    return record


def read_runs(cell_dir: StudyPath) -> list[Record]:
    """Read every record of a cell, ordered by block and position.

    Raises ``RecordError`` as in :func:`read_record`, for the first file that is not a valid record.
    """
    digests = read_digests(cell_dir)
    with _without_garbage_collection():
        records = (read_record(p, digests.get(f"runs/{p.name}")) for p in record_paths(cell_dir))
        return sorted(records, key=lambda r: (r.block, r.position, r.arm))


def record_paths(cell_dir: StudyPath) -> list[StudyPath]:
    """Return the paths of a cell's records, in no particular order."""
    return [p for p in (cell_dir / "runs").glob("*.json") if not p.name.startswith(".")]


def unlisted_records(cell_dir: StudyPath) -> int:
    """Return how many records of a cell have no listed digest. Edits of these go unnoticed."""
    digests = read_digests(cell_dir)
    return sum(f"runs/{path.name}" not in digests for path in record_paths(cell_dir))


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection in the block: it would take a fifth of the time to read records.

    Records have no reference cycles, so nothing is leaked.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def check_digests(cell_dir: StudyPath) -> None:
    """Check a cell's records, arms and design against their digests, without parsing the files.

    Raises ``RecordError`` if a file was edited after it was written, or cannot be read.
    """
    digests = read_digests(cell_dir)
    for path in (*record_paths(cell_dir), *(cell_dir / "arms").glob("*.json")):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise RecordError(f"{path}: {error.strerror or error}") from None
        check_digest(path, content, digests.get(f"{path.parent.name}/{path.name}"))
    if (cell_dir / "cell.json").is_file():
        read_cell(cell_dir)


def read_arm(path: StudyPath, digest: str | None = None) -> Arm:
    """Read and check one ``arms/ARM.json``, as :func:`read_record` does with a record."""
    data = read_json(path, digest)
    try:
        arm = record_codec.arm_from_json(data)
        require(path.stem == arm.name, f"it describes arm {arm.name}")
    except (ValueError, TypeError) as error:
        raise RecordError(f"{path} is not a valid arm: {error}") from None
    return arm


def read_arms(cell_dir: StudyPath) -> list[Arm]:
    """Read a cell's arms: the baseline first, the control last, others by :func:`name_order`."""
    paths = (p for p in (cell_dir / "arms").glob("*.json") if not p.name.startswith("."))
    order = {role: rank for rank, role in enumerate(ROLES)}
    digests = read_digests(cell_dir)
    arms = (read_arm(p, digests.get(f"arms/{p.name}")) for p in paths)
    return sorted(arms, key=lambda arm: (order[arm.role], name_order(arm.name)))


def name_order(name: str) -> list[tuple[int, float, str]]:
    """Return a sort key for names: words in alphabetical order, numbers by size.

    >>> sorted(["b1", "b16", "b2"], key=name_order)
    ['b1', 'b2', 'b16']
    """
    parts = re.split(r"(\d+(?:\.\d+)?)", name)
    return [(0, float(part), "") if i % 2 else (1, 0.0, part) for i, part in enumerate(parts)]


def read_cell(cell_dir: StudyPath) -> dict[str, Any]:
    """Read ``cell.json``, and check its design against the one that the cell began with.

    Raises ``RecordError`` if a file is not valid or was edited. The message names the file and the
    part of the design.
    """
    path = cell_dir / "cell.json"
    data = read_json(path)
    try:
        cell = record_codec.with_current_verdicts(data)
    except (ValueError, TypeError) as error:
        raise RecordError(f"{path} is not a valid cell: {error}") from None
    _check_design(cell_dir, cell["design"])
    return cell


def publish_design(cell_dir: Path, design: Mapping[str, Any]) -> None:
    """Write ``design.json`` and list its digest: what must not change while a cell grows.

    ``design``: keys and values of the design in ``cell.json``. Of its looks all but the last are
    kept, because the last moves if blocks are added. The caller must hold the cell's lock, and
    writes ``cell.json`` afterwards.
    """
    path = cell_dir / DESIGN_FILE
    looks = list(design["looks"][:-1])
    content = to_bytes({"schema_version": SCHEMA_VERSION, "design": {**design, "looks": looks}})
    _publish(cell_dir, {path: content})


def _check_design(cell_dir: StudyPath, design: Mapping[str, Any]) -> None:
    """Compare the design in ``cell.json`` with ``design.json``, which older studies lack."""
    path, digests = cell_dir / DESIGN_FILE, read_digests(cell_dir)
    if not path.is_file():
        if DESIGN_FILE in digests:
            raise RecordError(f"{path} is missing; restore it from a copy")
        return
    for key, began in read_json(path, digests.get(DESIGN_FILE))["design"].items():
        now = design.get(key)
        if key == "looks":
            now = list(now or [])[: len(began)]
        if now != began:
            raise RecordError(
                f"{cell_dir / 'cell.json'} was edited: {key} of its design is {now}, and the cell "
                f"began with {began}; restore it from a copy"
            )


def output_values_path(cell_dir: Path, digest: str) -> Path:
    """Return the path of the output with this digest; it is stored only if arms' outputs differ."""
    return cell_dir / "outputs" / f"{digest}.npy"


def read_output_values(cell_dir: StudyPath, digest: str) -> bytes | None:
    """Return the bytes of the output's ``.npy`` file, or None if it was not stored."""
    try:
        return (cell_dir / "outputs" / f"{digest}.npy").read_bytes()
    except OSError:
        return None


def write_record(path: Path, record: Record) -> None:
    """Write a run's record by rename. An existing record is never overwritten.

    Raises ``RecordError`` if ``path`` exists or is not named after the run. Raises ``ValueError``
    if a value is NaN, infinite or not JSON.
    """
    _refuse_to_overwrite(path, record)
    write_json(path, record.to_json(), indent=None)


def publish_records(cell_dir: Path, *records: Record) -> None:
    """Write runs' records to ``runs`` as :func:`write_record` does, and list their digests.

    The digests are listed before the records are written. If the process is killed between the two,
    the list names files that do not exist, which is harmless. The caller must hold the cell's lock.
    """
    paths = [cell_dir / "runs" / f"{record.run}.json" for record in records]
    for path, record in zip(paths, records, strict=True):
        _refuse_to_overwrite(path, record)
    contents = [to_bytes(record.to_json(), indent=None) for record in records]
    _publish(cell_dir, dict(zip(paths, contents, strict=True)))


def publish_arm(cell_dir: Path, arm: Arm) -> None:
    """Write an arm to ``arms`` and list its digest, as :func:`publish_records` does."""
    path, content = cell_dir / "arms" / f"{arm.name}.json", to_bytes(arm.to_json())
    _publish(cell_dir, {path: content})


def _publish(cell_dir: Path, contents: Mapping[Path, bytes]) -> None:
    list_digests(cell_dir, contents)
    for path, content in contents.items():
        write_synced(path, content)


def _refuse_to_overwrite(path: Path, record: Record) -> None:
    if path.stem != record.run:
        raise RecordError(f"{path}: the file of run {record.run} must be {record.run}.json")
    if path.exists():
        raise RecordError(f"{path} exists, and records are never overwritten")
