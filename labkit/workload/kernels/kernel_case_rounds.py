"""The rounds of a kernel case: every arm's prepared batch, its times, and its record."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from labkit.config import State
from labkit.records import CaseRecord
from labkit.records.metric_registry import measured
from labkit.workload.kernels import kernel_cases
from labkit.workload.kernels.launch_timing import KernelBatch
from labkit.workload.turn_order import Part

if TYPE_CHECKING:
    from labkit.engine.attention.launch_report import LaunchReport


@dataclass(frozen=True)
class ExpectedOutput:
    """An output and its fingerprint (``array_outputs``), shared by all arms that agree bit for bit.

    ``out``: [tokens, heads, head_dim].
    """

    out: NDArray[Any]
    fingerprint: dict[str, object]


@dataclass(frozen=True)
class PreparedArm:
    """One arm's batch of one case, planned and launched once."""

    arm: int  # index of the arm
    # batch, washout: the batch that is timed, and the batch that is launched before it on hot
    # caches. They are the same object if the batch is small.
    batch: KernelBatch
    washout: KernelBatch
    # The output that every launch must reproduce. Arms that agree share the object.
    expected: ExpectedOutput
    # Digests that the outputs of a chain must have. Empty if no chain is timed.
    chain_digests: tuple[bytes, ...]
    # plan_s, map_us: median time to plan the batch (seconds), and median time to build the
    # resolver's maps, which is part of planning (microseconds).
    plan_s: float
    map_us: float
    report: LaunchReport  # report of the first launch


@dataclass
class ArmSamples:
    """Times of one arm in the rounds of a case. The lists have one entry per round.

    ``seconds``: time of one launch, or of a chain divided by its length; the fastest of a turn.
    ``mean_s``: the mean of the launches of which the fastest counts. ``single_s``: time of a
    launch outside a chain; an empty list if no chains are timed. ``host_s``: time the host took to
    describe a launch. ``positions``: the arm's position in the round's order. ``report``: the
    report of the latest single launch.
    """

    prepared: PreparedArm
    report: LaunchReport
    seconds: list[float] = field(default_factory=list)
    mean_s: list[float] = field(default_factory=list)
    single_s: list[float] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)


@dataclass
class CaseRounds:
    """All rounds of a case in one state of the caches, with the arms that run the case.

    ``pulse_s``: seconds of the pulse before each round, which is the same work for every arm.
    ``empty_s``: for each round, seconds of an empty launch in a chain and outside a chain.
    """

    label: str
    state: State
    rounds: int
    arms: list[ArmSamples]
    warm_up_rounds: int
    pulse_s: list[float] = field(default_factory=list)
    empty_s: list[tuple[float, float]] = field(default_factory=list)

    @property
    def part(self) -> Part:
        """These rounds as the ``Part`` that the turn order needs."""
        return Part(self.label, self.rounds, tuple(arm.prepared.arm for arm in self.arms))

    def samples(self, arm: int) -> ArmSamples:
        """Return the samples of the arm with the index ``arm``."""
        return next(one for one in self.arms if one.prepared.arm == arm)

    def chain_length(self, arm: ArmSamples) -> int:
        """Return the number of launches that are timed together; 1 on cold caches."""
        return 1 if self.state is State.cold else arm.prepared.batch.chain_length

    def timed_launches(self, arm: ArmSamples) -> int:
        """Return the number of timed launches in a turn, of which the fastest counts."""
        return 1 if self.state is State.cold else arm.prepared.batch.timed_launches


def case_record(arm: ArmSamples, case: CaseRounds) -> CaseRecord:
    """Return the record of one case from one arm's samples."""
    prepared, report = arm.prepared, arm.report
    batch = prepared.batch
    work = kernel_cases.work(batch.size, batch.workload)
    metrics = [measured("dispatch_us", _microseconds(arm.seconds), primary=True)]
    if arm.single_s:
        metrics.append(measured("single_us", _microseconds(arm.single_s)))
    return CaseRecord(
        case=case.label,
        metrics=tuple(metrics),
        outputs=dict(prepared.expected.fingerprint),
        notes={
            "kernel": report.kernel,
            "reason": report.reason,
            "grid": list(report.grid),
            "map_us": prepared.map_us,
            "plan_us": round(prepared.plan_s * 1e6, 2),
            "num_seqs": len(batch.size.seq_lens),
            "total_q": batch.size.total_q,
            "pool_bytes": batch.size.pool_bytes,
            "flops": work.flops,
            "least_bytes": work.bytes,
            "counters": report.counters(),
            "state": case.state.value,
            "warm_up_rounds": case.warm_up_rounds,
            "fastest_of": case.timed_launches(arm),
            "pulse_us": [round(us, 2) for us in _microseconds(case.pulse_s)],
            "turns": list(arm.positions),
            "over_rounds": "middle_half",
            **(_all_launches(arm) if case.timed_launches(arm) > 1 else {}),
            **(_queue_notes(arm, case) if batch.queued else {}),
        },
    )


def _all_launches(arm: ArmSamples) -> dict[str, object]:
    """Return the note with all launches, some of which an arm's own work may slow."""
    return {"as_measured": {"dispatch_us": [round(us, 3) for us in _microseconds(arm.mean_s)]}}


def output_values(arm: ArmSamples, case: CaseRounds) -> dict[str, NDArray[np.float32]]:
    """Return ``{digest: output}`` for an arm, or an empty dict if all arms of the case agree."""
    expected = arm.prepared.expected
    if len(case.arms) > 1 and all(other.prepared.expected is expected for other in case.arms):
        return {}
    return {str(expected.fingerprint["digest"]): kernel_cases.as_float32(expected.out)}


def _queue_notes(arm: ArmSamples, case: CaseRounds) -> dict[str, object]:
    """Return the notes for a device with a queue: the host's time and the empty launches' times."""
    chained, single = zip(*case.empty_s, strict=True)
    return {
        "launches": case.chain_length(arm),
        "host_us": round(statistics.median(arm.host_s) * 1e6, 2),
        "empty_us": [round(us, 2) for us in _microseconds(chained)],
        "empty_single_us": [round(us, 2) for us in _microseconds(single)],
    }


def _microseconds(seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(s * 1e6 for s in seconds)
