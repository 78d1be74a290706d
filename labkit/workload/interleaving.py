"""Turns: several arms made ready in one process, measured a little at a time, in turn.

What the machine does in a second happens to all arms alike, so the difference of two arms
in the same round is far less noisy than that of two processes. An arm alone in its process
is the same thing with one arm.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from labkit.config import Experiment
from labkit.workload.measurement import Estimate, Measurement

START_SECONDS = 1.5  # of a worker: imports, both probes, the record (estimate)


class EnterTurn(Protocol):
    """Enters an arm's turn."""

    def __call__(self, arm: int) -> AbstractContextManager[None]:
        """Make ``arm`` (its index) the one whose CPU budget holds and who is to blame."""


class MachineKernels(Protocol):
    """The arm-blind kernels: what is done between turns that is no arm's."""

    def pulse(self) -> None:
        """Do the same short work, about half a millisecond, to be timed by the caller."""

    def flush(self) -> None:
        """Read more memory than the caches hold."""


@dataclass(frozen=True)
class TurnContext:
    """What every kind of workload is given besides its arms.

    ``seed``: the cell's, the same in every run, because arms must be given the same input.
    ``order``: this process's own random stream, for the order of loading and of turns.
    """

    seed: int
    order: random.Random
    turn: EnterTurn
    machine: MachineKernels


class NoMachineKernels:
    """No arm-blind work: for who measures one arm and compares it with nothing."""

    def pulse(self) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing."""


def single_arm_context(seed: int) -> TurnContext:
    """Return the setting of an arm that is measured outside any study."""
    return TurnContext(seed, random.Random(seed), lambda arm: nullcontext(), NoMachineKernels())


class InterleavedArms(Protocol):
    """One workload for each of several arms, ready in this process."""

    def prepare(self) -> None:
        """Do what is done once per machine and code: compile all that ``measure`` will call."""

    def warm_up(self) -> None:
        """Do unmeasured work by a rule that is fixed beforehand, the same for every arm."""

    def measure(self, beat: Callable[[str], None]) -> Sequence[Measurement]:
        """Measure all arms in turn; ``beat`` is told how far it is.

        Returns
        -------
        sequence of Measurement
            One per arm, in the order of the arms. Repeats of a metric are aligned: repeat
            ``i`` of every arm was taken in the same round.

        Raises
        ------
        InvalidOutput, StaleOutput
            An output that must not be believed.
        """

    def close(self) -> None:
        """Release what is held."""


class WorkloadKind(Protocol):
    """One kind of workload. Only ``load`` imports an engine."""

    def check(self, experiment: Experiment) -> None:
        """Check what the user wrote, files included, before anything is written.

        Raises
        ------
        ConfigError
            One line with the file, the key and what is allowed.
        """

    def prepare(self, experiment: Experiment) -> None:
        """Check that the workload can be asked of this engine, and cache what workers need.

        Raises
        ------
        ConfigError
            It can't; one line says why and what to set.
        """

    def apart(self, experiments: Sequence[Experiment]) -> str | None:
        """Say in one line why these arms cannot share a process; None: they can."""

    def load(self, experiments: Sequence[Experiment], context: TurnContext) -> InterleavedArms:
        """Make the workload ready in this process, for one arm or several."""

    def estimate(self, experiment: Experiment) -> Estimate:
        """Guess what one run costs, by arithmetic alone."""
