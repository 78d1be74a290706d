"""The record: what one run leaves, its schema, and how it is written and read.

Records are immutable JSON files, ``runs/b00-p02-ARM.json``, written whole by rename and
never overwritten. Reading is strict: a truncated file, a foreign one or one of another
schema version is refused by name. Keys that this version does not know are kept.
Standard library only: workers, the parent and the analysis all read it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit.experiment.strict_json import (
    SCHEMA_VERSION as SCHEMA_VERSION,
)
from labkit.experiment.strict_json import (
    RecordError as RecordError,
)
from labkit.experiment.strict_json import (
    read_json as read_json,
)
from labkit.experiment.strict_json import (
    require,
    rest,
    take,
)
from labkit.experiment.strict_json import (
    write_json as write_json,
)

OUTCOMES = (
    "ok",
    "refused",
    "oom",
    "timeout",
    "crashed",
    "stale",
    "invalid_output",
    "vacuous",
)
ROLES = ("baseline", "arm", "control")
BETTER = ("higher", "lower")
RUN_NAME = re.compile(r"b(?P<block>\d{2,})-p(?P<position>\d{2,})-(?P<arm>[\w.-]+)")


def run_name(block: int, position: int, arm: str) -> str:
    """Give the name of a run, which is the stem of its files: ``b00-p02-ARM``."""
    return f"b{block:02d}-p{position:02d}-{arm}"


def parse_run_name(name: str) -> tuple[int, int, str]:
    """Give block, position and arm of a run's name.

    Raises
    ------
    RecordError
        ``name`` is not ``b<block>-p<position>-<arm>``.
    """
    match = RUN_NAME.fullmatch(name)
    if match is None:
        raise RecordError(f"{name}: not a run's name (b00-p00-ARM)")
    return int(match["block"]), int(match["position"]), match["arm"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of one case: its repeats within the run, all finite."""

    name: str
    unit: str
    better: str
    primary: bool
    repeats: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check that the values are numbers."""
        require(self.better in BETTER, f"metric {self.name}: better={self.better!r}")
        require(bool(self.repeats), f"metric {self.name}: no value")
        bad = next((x for x in self.repeats if not math.isfinite(x)), None)
        require(bad is None, f"metric {self.name}: {bad} is not a finite number")


@dataclass(frozen=True, slots=True)
class CaseRecord:
    """What one case of the workload gave: metrics and outputs, or why it was skipped."""

    case: str
    skipped: str | None = None
    metrics: tuple[Metric, ...] = ()
    outputs: Mapping[str, Any] | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Record:
    """One arm, once, in one fresh process.

    ``seconds`` are wall seconds per stage, ``probe`` maps before and after to the
    arm-blind kernels' times (us), ``extra`` holds keys of later versions.
    """

    arm: str
    role: str
    block: int
    position: int
    seed: int
    outcome: str
    started: str
    detail: str | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    environment_end: Mapping[str, Any] = field(default_factory=dict)
    probe: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)
    cases: tuple[CaseRecord, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the words and the numbers' ranges."""
        require(self.role in ROLES, f"role {self.role!r}: known are {', '.join(ROLES)}")
        require(
            self.outcome in OUTCOMES, f"outcome {self.outcome!r}: known are {', '.join(OUTCOMES)}"
        )
        require(min(self.block, self.position) >= 0, "block or position is negative")
        require(self.outcome == "ok" or bool(self.detail), f"outcome {self.outcome}: no detail")
        names = [case.case for case in self.cases]
        require(len(set(names)) == len(names), "two cases have the same name")

    @property
    def run(self) -> str:
        """The run's name, which is also its file's stem."""
        return run_name(self.block, self.position, self.arm)

    @property
    def ok(self) -> bool:
        """Whether the run gave what was asked."""
        return self.outcome == "ok"

    def to_json(self) -> dict[str, Any]:
        """Give the record as JSON types, in the schema's order."""
        body = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        extra = body.pop("extra")
        body["cases"] = [dataclasses.asdict(case) for case in self.cases]
        return {"schema_version": SCHEMA_VERSION, "run": self.run, **body, **extra}


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm as it was resolved: what ``arms/ARM.json`` holds.

    ``config``: the plain forms of ``engine``, ``model``, ``workload`` and ``seed``.
    ``engaged``: counters that must end above 0. ``claimed``: whether the ablation claims
    anything beyond the engine's own counter, which every arm claims.
    """

    name: str
    role: str
    overrides: Mapping[str, Any]
    config: Mapping[str, Any]
    identity: str = "none"
    engaged: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the words."""
        require(self.role in ROLES, f"role {self.role!r}: known are {', '.join(ROLES)}")
        parse_run_name(run_name(0, 0, self.name))

    def to_json(self) -> dict[str, Any]:
        """Give the arm as JSON types."""
        return {
            "schema_version": SCHEMA_VERSION,
            "arm": self.name,
            "role": self.role,
            "overrides": dict(self.overrides),
            "config": dict(self.config),
            "claims": {"identity": self.identity, "engaged": list(self.engaged)},
            **self.extra,
        }


# --------------------------------------------------------------------------- reading


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
    return sorted((read(p) for p in paths), key=lambda r: (r.block, r.position, r.arm))


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
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in repeats)
    require(numbers, f"metric {name}: repeats holds something that is not a number")
    return Metric(
        name=name,
        unit=take(data, "unit", str),
        better=take(data, "better", str),
        primary=take(data, "primary", bool),
        repeats=tuple(float(x) for x in repeats),
    )
