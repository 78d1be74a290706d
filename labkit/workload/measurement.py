"""What a workload gives back: metrics, outputs, counters, and the two ways to be invalid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from labkit.records import CaseRecord

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class InvalidOutput(Exception):
    """An output that cannot be right: NaN left in it, tokens missing, repeats that differ."""

    outcome = "invalid_output"  # of the run that raises it: labkit.experiment.run_failures


class StaleOutput(Exception):
    """An output that another launch wrote: the kernel's stamp is not the expected one."""

    outcome = "stale"  # of the run that raises it: labkit.experiment.run_failures


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one run gave: its cases as the record holds them, and what the engine counted.

    ``outputs`` of a case are ``{"kind": "array", ...}`` or ``{"kind": "tokens", ...}`` as
    ``labkit.workload.output_digest`` and ``labkit.workload.serving_session`` build
    them. ``values``: arrays
    by the digest that stands for them in ``outputs``, where arms may differ; the record has
    no room for them.
    """

    cases: tuple[CaseRecord, ...]
    counters: Mapping[str, float]
    notes: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one run will roughly cost: wall ``seconds`` and ``bytes`` of memory.

    ``foreseen``: what else can be seen of it beforehand, in sentences.
    """

    seconds: float
    bytes: int
    foreseen: tuple[str, ...] = ()
