"""A row of kernel turns: a case in one state of the caches, what each arm gave and took."""

from __future__ import annotations

import ctypes
import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from labkit.config import State
from labkit.records import CaseRecord, Metric
from labkit.workload import kernel_cases
from labkit.workload.launch_timing import Batch, Launch
from labkit.workload.measurement import InvalidOutput

if TYPE_CHECKING:
    from labkit.engine.attention.launch_report import LaunchReport


@dataclass(frozen=True)
class Expected:
    """An output, and its fingerprint (``array_outputs``): hashed once for all who agree.

    ``out``: [tokens, heads, head_dim].
    """

    out: NDArray[Any]
    fingerprint: dict[str, object]


@dataclass
class Seat:
    """An arm at a row: its batches, the output that it must give, and what was measured.

    ``expected``: one object of all arms that agree.
    ``chain``: digests of the outputs of a chain. ``plan_s``, ``map_us``: what planning the
    batch takes, and building the resolver's maps as part of it. ``alone``: seconds of
    launches by themselves, where chains are timed. ``host``: seconds that the host took to
    describe a launch. ``report``: of a launch by itself.
    """

    arm: int
    whole: Batch
    wash: Batch
    expected: Expected
    chain: tuple[bytes, ...]
    plan_s: float
    map_us: float
    seconds: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    report: LaunchReport | None = None


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


@dataclass
class Row:
    """A case in one state of the caches, with the arms that have it.

    ``pulses``: seconds of the arm-blind pulse before each round. ``warm_up``: rounds.
    ``empty``: seconds of an empty launch in a chain, and by itself, of each round.
    ``orders``: of the next rounds.
    """

    name: str
    state: State
    rounds: int
    seats: list[Seat]
    warm_up: int
    pulses: list[float] = field(default_factory=list)
    empty: list[tuple[float, float]] = field(default_factory=list)
    orders: list[list[Seat]] = field(default_factory=list)

    def next_order(self, random: Random) -> list[Seat]:
        """Draw a round's order: at random, but in so many rounds as arms each has every place.

        Whose turn is first finds the caches of another row's round.
        """
        if not self.orders:
            seats = random.sample(self.seats, len(self.seats))
            self.orders = [seats[k:] + seats[:k] for k in range(len(seats))]
            random.shuffle(self.orders)
        return self.orders.pop()

    def links(self, seat: Seat) -> int:
        """Return how many launches are timed together."""
        return seat.whole.links if self.state is State.hot else 1

    def timed(self, seat: Seat) -> int:
        """Return how many launches of a turn are timed, of which the fastest counts."""
        return seat.whole.timed if self.state is State.hot else 1


def check(seat: Seat, launch: Launch, which: str) -> None:
    """Refuse outputs that are not, bit for bit, those of the arm's first launches."""
    out, expected = launch.outputs[0], seat.expected.out
    where = f"{seat.whole.size.case.name}: {which}"
    if not same(out, expected):
        refuse_nan(out, where)
        word = f"u{out.itemsize}"
        rows = np.flatnonzero((out.view(word) != expected.view(word)).any(axis=(1, 2)))
        raise InvalidOutput(
            f"{where} differs from the first launch in {len(rows)} rows, the first of them "
            f"token {rows[0]}"
        )
    for number, out in enumerate(launch.outputs[1:], 1):
        if digest(out) != seat.chain[number]:
            refuse_nan(out, where)
            raise InvalidOutput(f"{where}: launch {number + 1} differs from the first chain's")


def same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Tell whether two outputs are the same bits: two thirds of the time that NumPy takes."""
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return a.nbytes == b.nbytes and _memcmp(a.ctypes.data, b.ctypes.data, a.nbytes) == 0


def digest(out: NDArray[Any]) -> bytes:
    """Return what tells an output from another."""
    return hashlib.sha256(out.data).digest()


def refuse_nan(out: NDArray[Any], where: str) -> None:
    """Refuse an output in which NaN was left, or was written."""
    numbers = kernel_cases.in_float32(out)
    if np.isnan(numbers.min()):
        token, head, _ = np.argwhere(np.isnan(numbers))[0]
        raise InvalidOutput(f"{where}: NaN left in the output, first at token {token}, head {head}")


def record(seat: Seat, row: Row) -> CaseRecord:
    """Return what an arm gave and took in a row."""
    report, size = seat.report, seat.whole.size
    assert report is not None, "the row was measured"
    work = kernel_cases.work(size, seat.whole.workload)
    metrics = [Metric("dispatch_us", "us", "lower", True, _microseconds(seat.seconds))]
    if seat.alone:
        metrics.append(Metric("single_us", "us", "lower", False, _microseconds(seat.alone)))
    return CaseRecord(
        case=row.name,
        metrics=tuple(metrics),
        outputs=dict(seat.expected.fingerprint),
        notes={
            "kernel": report.kernel,
            "reason": report.reason,
            "grid": list(report.grid),
            "map_us": seat.map_us,
            "plan_us": round(seat.plan_s * 1e6, 2),
            "num_seqs": len(size.seq_lens),
            "total_q": size.total_q,
            "pool_bytes": size.pool_bytes,
            "flops": work.flops,
            "least_bytes": work.bytes,
            "counters": report.counters(),
            "state": row.state.value,
            "warm_up_rounds": row.warm_up,
            "fastest_of": row.timed(seat),
            "pulse_us": [round(us, 2) for us in _microseconds(row.pulses)],
            "turns": list(seat.places),
            **(_queue_notes(seat, row) if seat.whole.queued else {}),
        },
    )


def values(seat: Seat, row: Row) -> dict[str, NDArray[np.float32]]:
    """Return an arm's output by its digest, unless all arms of the row agree."""
    agree = all(other.expected is seat.expected for other in row.seats) and len(row.seats) > 1
    own = seat.expected
    return {} if agree else {str(own.fingerprint["digest"]): kernel_cases.in_float32(own.out)}


def _queue_notes(seat: Seat, row: Row) -> dict[str, object]:
    """Say what stands beside a time from a queue: what a launch costs that does nothing."""
    together, alone = zip(*row.empty, strict=True)
    return {
        "launches": row.links(seat),
        "host_us": round(statistics.median(seat.host) * 1e6, 2),
        "empty_us": [round(us, 2) for us in _microseconds(together)],
        "empty_single_us": [round(us, 2) for us in _microseconds(alone)],
    }


def _microseconds(seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(s * 1e6 for s in seconds)
