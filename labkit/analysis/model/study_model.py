"""A study: the cells of one command, as ``study.json`` lists them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from labkit.analysis.model.dataclass_json import fields_to_json, from_json


@dataclass(frozen=True)
class CellEntry:
    """A cell in ``study.json``; ``verdicts``: of primary rows. Older files lack some fields."""

    cell: str = ""
    dir: str = ""
    machine: str | None = None
    question: str | None = None
    answer: str | None = None
    status: int = 0
    complete: bool = False
    blocks: int = 0
    runs: int = 0
    failures: int = 0
    gates: Mapping[str, str] = field(default_factory=dict)
    verdicts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FamilyMember:
    """One arm in one primary row, with its p-value adjusted over all cells of the study."""

    cell: str
    case: str
    metric: str | None
    arm: str
    p_adjusted: float


@dataclass(frozen=True)
class Study:
    """A study: its name, exit code and machines, its cells, and the family of their tests."""

    schema_version: int
    study: str
    exit_code: int
    machines: tuple[str, ...] = ()
    cells: tuple[CellEntry, ...] = ()
    family: tuple[FamilyMember, ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Study:
        """Read a ``study.json``, also one of an older version of labkit."""
        return from_json(cls, {"schema_version": 0, "study": "", "exit_code": 0, **data})

    def to_json(self) -> dict[str, Any]:
        return fields_to_json(self)
