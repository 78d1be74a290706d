"""The measurement and the estimate of one run, and the exceptions for wrong outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from labkit.records import CaseRecord

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class InvalidOutput(Exception):
    """An output cannot be right: it has NaN, lacks tokens, or differs between repeats."""

    outcome = "invalid_output"  # of the run that raises it: labkit.experiment.worker.run_failures


class StaleOutput(Exception):
    """An output was written by another launch: the kernel's stamp is not the expected stamp."""

    outcome = "stale"  # of the run that raises it: labkit.experiment.worker.run_failures


@dataclass(frozen=True, slots=True)
class Measurement:
    """The cases of one run as the record holds them, and the engine's counters.

    A case's ``outputs`` are ``{"kind": "array", ...}`` or ``{"kind": "tokens", ...}``, built by
    ``labkit.workload.output_digest`` and ``labkit.workload.requests.serving_session``. ``values``:
    the arrays themselves, by their digest in ``outputs``, if arms differ. They are too large for
    the record and are stored in files. ``step_trace``: the traced steps of a request workload
    (``workload.step_trace``), also for a file (``labkit.records.step_trace_file``).
    """

    cases: tuple[CaseRecord, ...]
    counters: Mapping[str, float]
    notes: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    step_trace: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class CasePilot:
    """What a pilot knows of a kernel case.

    ``round_s``: seconds of a round of all arms. ``warm_up_s``: seconds that the case costs each
    process before its first round. ``sd``: standard deviation of a round's log ratio of two arms,
    estimated from ``rounds`` rounds.
    """

    case: str
    round_s: float
    warm_up_s: float
    sd: float
    rounds: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated cost of one run: wall ``seconds`` and ``bytes`` of memory.

    ``warnings``: sentences about the run, which the plan shows. ``server_s``: the part of
    ``seconds`` in which a server starts.
    """

    seconds: float
    bytes: int
    warnings: tuple[str, ...] = ()
    server_s: float = 0.0
