"""What a workload gives back: metrics, outputs, counters, and the two ways to be invalid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Better = Literal["higher", "lower"]


class InvalidOutput(Exception):
    """An output that cannot be right: NaN left in it, tokens missing, repeats that differ."""


class StaleOutput(Exception):
    """An output that another launch wrote: the kernel's stamp is not the expected one."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of a case. ``repeats`` are kept raw; the run's number is their median."""

    name: str
    unit: str
    better: Better
    primary: bool
    repeats: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What one case gave, or why it was skipped.

    ``outputs`` is ``{"kind": "array", ...}`` or ``{"kind": "tokens", ...}`` as
    ``labkit.workload.digest`` and ``labkit.workload.serving`` build them. ``values`` is
    the array whose digest they hold; the record has no room for it.
    """

    case: str
    skipped: str | None = None
    metrics: tuple[Metric, ...] = ()
    outputs: dict[str, Any] | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    values: NDArray[np.float32] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Measurement:
    """All cases of one run, and what the engine counted while they were measured."""

    cases: tuple[CaseResult, ...]
    counters: Mapping[str, float]
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one run will roughly cost: wall ``seconds`` and ``bytes`` of memory."""

    seconds: float
    bytes: int
