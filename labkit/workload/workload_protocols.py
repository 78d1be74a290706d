"""What kinds of workload and their loaded arms must do, and what they return or raise.

Turns are so short that a change of the machine's speed affects all arms alike. So the difference
of two arms in one round is far less noisy than the difference of two processes. An arm that is
alone in its process runs the same code.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from labkit.config import Experiment
from labkit.records import CaseRecord
from labkit.workload.turn_order import RandomTurnOrder, TurnOrder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")
START_SECONDS = 1.5  # of a worker: imports, both probes, the record (estimate)


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


# Starts a turn of the arm with an index: applies its CPU budget and attributes failures to it,
# until the context ends.
EnterTurn = Callable[[int], AbstractContextManager[None]]


class MachineKernels(Protocol):
    """Kernels that run between turns, the same for every arm."""

    def pulse(self) -> None:
        """Do a fixed piece of work of about 0.5 ms, which the caller times."""

    def flush(self) -> None:
        """Evict the CPU caches by reading more memory than they hold."""


@dataclass(frozen=True)
class TurnContext:
    """What a process needs to run turns of its arms.

    ``seed``: the cell's seed, the same in every run, so that all arms get the same input.
    ``order``: this process's own random stream, for the order of loading and of turns. ``turn``:
    context manager for an arm's turn. ``machine``: the kernels that run between turns. ``granted``:
    the source of turns if arms in other processes take turns with those of this process.
    ``baseline``: index of the baseline among the arms of this process (None: it is in another).
    """

    seed: int
    order: random.Random
    turn: EnterTurn
    machine: MachineKernels
    granted: TurnOrder | None = None
    baseline: int | None = None

    @property
    def turn_order(self) -> TurnOrder:
        return self.granted or RandomTurnOrder(self.order)


class NoMachineKernels:
    """Replacement for ``MachineKernels`` that does nothing, for one arm outside a study."""

    def pulse(self) -> None:
        """Do nothing."""

    flush = pulse


def single_arm_context(seed: int) -> TurnContext:
    """Return the context of one arm that is measured outside a study."""
    return TurnContext(
        seed, random.Random(seed), lambda arm: nullcontext(), NoMachineKernels(), baseline=0
    )


def load_arms(
    count: int, context: TurnContext, load: Callable[[int], T], close: Callable[[T], None]
) -> list[T]:
    """Load arms in random order, each in its turn, and return them in the order of their indices.

    If an arm cannot be loaded, ``close`` is called with those that were loaded before.
    """
    arms: dict[int, T] = {}
    order = list(range(count))
    context.order.shuffle(order)
    try:
        for index in order:
            with context.turn(index):
                arms[index] = load(index)
    except BaseException:
        for arm in arms.values():
            close(arm)
        raise
    return [arms[index] for index in range(count)]


class InterleavedArms(Protocol):
    """One workload for each of several arms, loaded in this process."""

    def prepare(self) -> None:
        """Compile everything that ``measure`` will call; needed once per machine and code."""

    def warm_up(self) -> None:
        """Run work that is not measured. Every arm warms up by the same rule, fixed beforehand."""

    def measure(self, heartbeat: Callable[[str], None]) -> Sequence[Measurement]:
        """Measure all arms in turn; call ``heartbeat`` with the progress as text.

        Returns one measurement per arm, in the order of the arms. Repeats of a metric are aligned:
        repeat ``i`` of every arm was taken in the same round. Raises ``InvalidOutput`` or
        ``StaleOutput`` if an output cannot be trusted.
        """

    def close(self) -> None:
        """Release engines and memory."""


@runtime_checkable
class PilotedArms(Protocol):
    """Arms whose rounds follow from ``design.time``: a pilot finds what the rounds cost."""

    def pilot(self, seconds: float) -> Sequence[CasePilot]:
        """Warm up and measure some rounds of each case, in about ``seconds`` seconds."""


class WorkloadKind(Protocol):
    """One kind of workload. Only ``load`` imports an engine."""

    def check(self, experiment: Experiment) -> None:
        """Check the user's settings and files before anything is written.

        Raises ``ConfigError`` if a setting is wrong. The message is a single line that names the
        file, the key and the allowed values.
        """

    def prepare(self, experiment: Experiment) -> None:
        """Check that the engine can serve the workload, and cache inputs such as prompts.

        Raises ``ConfigError`` if the engine cannot serve the workload. The message is a single line
        with the reason and the setting to change.
        """

    def apart(self, experiments: Sequence[Experiment]) -> str | None:
        """Return the reason, in one line, that these arms cannot share a process, or None."""

    def load(self, experiments: Sequence[Experiment], context: TurnContext) -> InterleavedArms:
        """Load the workload of one or several arms in this process."""

    def estimate(self, experiment: Experiment) -> Estimate:
        """Estimate the time and memory of one run without loading anything."""


@runtime_checkable
class LiveKind(Protocol):
    """A kind whose arms can take turns in processes of their own.

    ``InterleavedArms.measure`` requests every turn from ``TurnContext.turn_order``.
    """

    def not_live(self, experiments: Sequence[Experiment]) -> str | None:
        """Return the reason, in one line, that these arms cannot take turns, or None."""


@runtime_checkable
class CountedKind(Protocol):
    """A kind whose runs may have fewer units of work: requests or windows, the first of all."""

    def units(self, experiment: Experiment) -> int:
        """Return the number of all units."""
