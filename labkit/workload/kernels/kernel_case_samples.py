"""A kernel case in one state of the caches: its arms' times, checks of outputs, and record."""

from __future__ import annotations

import ctypes
import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from labkit.config import State, count_text
from labkit.records import CaseRecord
from labkit.records.metric_registry import measured
from labkit.workload.kernels import kernel_cases
from labkit.workload.kernels.launch_timing import KernelBatch, TimedLaunch
from labkit.workload.turn_order import Part
from labkit.workload.workload_protocols import InvalidOutput

if TYPE_CHECKING:
    from labkit.engine.attention.launch_evidence import LaunchReport

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


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
        return Part(self.label, self.rounds, tuple(arm.prepared.arm for arm in self.arms))

    def samples(self, arm: int) -> ArmSamples:
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
    # Of all launches, some of which an arm's own work may slow.
    means = [round(us, 3) for us in _microseconds(arm.mean_s)]
    all_launches = {"as_measured": {"dispatch_us": means}}
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
            **(all_launches if case.timed_launches(arm) > 1 else {}),
            **(_queue_notes(arm, case) if batch.queued else {}),
        },
    )


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


def check_outputs(prepared: PreparedArm, launch: TimedLaunch, launch_name: str) -> None:
    """Check that the outputs of a launch equal those of the arm's first launch bit for bit.

    The outputs of a chain are compared with the digests of the first chain. Raises
    ``InvalidOutput`` if an output differs or holds NaN.
    """
    out, expected = launch.outputs[0], prepared.expected.out
    where = f"{prepared.batch.size.case.name}: {launch_name}"
    if not equal_bits(out, expected):
        refuse_nan(out, where)
        bits = f"u{out.itemsize}"
        rows = np.flatnonzero((out.view(bits) != expected.view(bits)).any(axis=(1, 2)))
        raise InvalidOutput(
            f"{where}: the output differs from the first launch's in "
            f"{count_text(len(rows), 'row')}, first at token {rows[0]}"
        )
    for number, out in enumerate(launch.outputs[1:], 1):
        if sha256_of(out) != prepared.chain_digests[number]:
            refuse_nan(out, where)
            raise InvalidOutput(
                f"{where}: the output of launch {number + 1} differs from that in the first chain"
            )


def equal_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Return whether two outputs have the same bits. ``memcmp`` is 1.5 times as fast as NumPy."""
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return a.nbytes == b.nbytes and _memcmp(a.ctypes.data, b.ctypes.data, a.nbytes) == 0


def sha256_of(out: NDArray[Any]) -> bytes:
    """Return the SHA-256 of an output's bytes."""
    return hashlib.sha256(out.data).digest()


def refuse_nan(out: NDArray[Any], where: str) -> None:
    """Raise ``InvalidOutput`` if an output holds NaN, computed or left over from poisoning."""
    values = kernel_cases.as_float32(out)
    if np.isnan(values.min()):
        token, head, _ = np.argwhere(np.isnan(values))[0]
        raise InvalidOutput(f"{where}: the output has NaN, first at token {token}, head {head}")
