"""Launches in turn: every arm's kernel on the same memory, a launch at a time.

A *row* is a case in one state of the caches. Each row has its rounds, spread over the whole
process at random. A round begins with a pulse of the arm-blind probe, which is timed and
wakes the threads; then every arm has a turn, in random order:

1. hot: a wash-out launch of the arm, so that the caches hold what *this* arm leaves, not
   the arm before; cold: a flush, so that they hold nothing of either;
2. the output is poisoned, the launch is timed, the output is checked.

Without the wash-out the first launch after a switch is slower than the second by 2 % on
small cases, and an arm with more to load is punished for it.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from labkit.config import Case, State, Workload
from labkit.workload import cases
from labkit.workload.cases import Arrays, Geometry, Memory
from labkit.workload.digest import array_outputs
from labkit.workload.measurement import (
    CaseResult,
    InvalidOutput,
    Measurement,
    Metric,
    StaleOutput,
)
from labkit.workload.turns import Setting

if TYPE_CHECKING:
    from labkit.engine.attention.base import Attention, AttentionBackend
    from labkit.engine.attention.plan import Plan
    from labkit.engine.attention.report import LaunchReport

Clock = Callable[[], float]

SETTLED = 0.98  # a round this much of the fastest before is no longer falling
MOST_ROUNDS = 20  # of warming up


@dataclass(frozen=True)
class KernelArm:
    """One arm: the attention operation, and what is asked of it.

    ``engine``: whose operation it is; counted, because every arm claims its engine.
    ``make_backend``: returns a backend, which takes over the pools of one batch.
    ``block_size``: tokens in a KV block.
    """

    engine: str
    make_backend: Callable[[], AttentionBackend]
    workload: Workload
    block_size: int


@dataclass(frozen=True)
class Batch:
    """A batch of given geometry, planned on a backend of its own over the shared memory."""

    attention: Attention
    workload: Workload
    size: Geometry
    plan: Plan
    arrays: Arrays

    def launch(self, clock: Clock, which: str) -> tuple[float, LaunchReport]:
        """Launch once; return the seconds and the report of a launch that is not stale."""
        arrays = self.arrays
        start = clock()
        result = self.attention.forward(0, arrays.q, None, None, self.plan, arrays.out)
        seconds = clock() - start
        (report,) = self.attention.report(self.plan)
        where = f"{self.size.case.name}: {which}"
        if report.stale:
            raise StaleOutput(
                f"{where}: the kernel's stamp is {report.stamp}, expected {report.expected_stamp}"
            )
        if not np.shares_memory(result, arrays.out):
            raise InvalidOutput(f"{where}: the output was not written where it was asked for")
        return seconds, report

    def poison(self) -> None:
        """Fill the output with NaN."""
        self.arrays.out.fill(np.nan)


@dataclass
class Seat:
    """An arm at a row: its batches, the output that it must give, and what was measured.

    ``expected``: float32 [tokens, heads, head_dim]; arms that agree share the array.
    """

    arm: int
    whole: Batch
    wash: Batch
    expected: NDArray[np.float32]
    outputs: dict[str, object]
    seconds: list[float] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    report: LaunchReport | None = None


@dataclass
class Row:
    """A case in one state of the caches, with the arms that have it.

    ``pulses``: seconds of the arm-blind pulse before each round. ``warm_up``: rounds.
    """

    name: str
    state: State
    rounds: int
    seats: list[Seat]
    warm_up: int
    pulses: list[float] = field(default_factory=list)


class KernelTurns:
    """Kernel cases on the attention operations of several arms; see ``Turns``.

    Parameters
    ----------
    arms
        At least one. They share queries, output and KV memory.
    setting
        See ``Setting``.
    clock
        Seconds; a parameter so that tests can know the answers.
    """

    def __init__(
        self, arms: Sequence[KernelArm], setting: Setting, clock: Clock = time.perf_counter
    ) -> None:
        self._arms = tuple(arms)
        self._setting = setting
        self._clock = clock
        self._counters = [Counter[str]() for _ in arms]
        self._launching = [0.0] * len(arms)  # seconds
        sizes = [
            (arm, cases.geometry(case, arm.workload, arm.block_size))
            for arm in arms
            for case in arm.workload.cases
        ]
        run = [(arm, size) for arm, size in sizes if not cases.skip_reason(size, arm.workload)]
        self._memory: Memory | None = cases.allocate(
            max(size.pool_bytes for _, size in run),
            max(cases.query_numbers(size, arm.workload) for arm, size in run),
            setting.seed,
        )
        self._rows: list[Row] = []
        for arm, size in run:  # refuses bad maps now, and compiles what builds them
            self._batch(arm, size.case)

    # ------------------------------------------------------------------ warming up

    def warm_up(self) -> None:
        """Launch every case of every arm once for its output, then until it has settled.

        A round is a wash-out launch of every arm. Rounds go on until one is not faster
        than the fastest before by more than 2 %; at least ``workload.warmup`` rounds after
        the first, at most 20 in all.
        """
        names = dict.fromkeys(case.name for arm in self._arms for case in arm.workload.cases)
        for name in names:
            shared: dict[str, NDArray[np.float32]] = {}
            seats = [
                self._seat(index, case, shared)
                for index, arm in self._in_random_order()
                if (case := _case(arm, name)) is not None
            ]
            if not seats:
                continue
            if not all([self._washes(seat) for seat in seats]):  # all of them launch once
                seats = [replace(seat, wash=seat.whole) for seat in seats]
            rounds = self._settle(seats)
            workload = self._arms[seats[0].arm].workload
            case = seats[0].whole.size.case
            for state in states(workload.state):
                label = f"{name} ({state.value})" if workload.state is State.both else name
                row = Row(label, state, workload.repeats * case.factor, [], rounds)
                row.seats += [replace(s, seconds=[], places=[]) for s in seats]
                self._rows.append(row)

    def _seat(self, index: int, case: Case, shared: dict[str, NDArray[np.float32]]) -> Seat:
        """Plan an arm's batch and its wash-out, and launch the batch once for its output."""
        assert self._memory is not None, "the turns are closed"
        arm = self._arms[index]
        with self._setting.turn(index):
            whole = self._batch(arm, case)
            share = cases.wash_share(whole.size, arm.workload)
            wash = whole if share == 1 else self._batch(arm, cases.part(case, share))
            whole.poison()
            seconds, report = whole.launch(self._clock, "the first launch")
            self._launching[index] += seconds
            out = whole.arrays.out
            _refuse_nan(out, f"{case.name}: the first launch")
            outputs = array_outputs(out)
            digest = str(outputs["digest"])
            expected = shared.setdefault(digest, out if digest in shared else out.copy())
            return Seat(index, whole, wash, expected, outputs, report=report)

    def _batch(self, arm: KernelArm, case: Case) -> Batch:
        assert self._memory is not None
        size = cases.geometry(case, arm.workload, arm.block_size)
        arrays = self._memory.view(size, arm.workload, arm.block_size)
        backend = arm.make_backend()
        backend.adopt([arrays.k_pool], [arrays.v_pool])
        plan = _plan(backend, arm, size, self._setting.seed)
        scale, heads = 1 / math.sqrt(arm.workload.head_dim), arm.workload.num_heads
        backend.bind(0, scale=scale, heads=heads, window=arm.workload.window)
        return Batch(_on_numpy(backend), arm.workload, size, plan, arrays)

    def _washes(self, seat: Seat) -> bool:
        """Tell whether the wash-out takes the kernel that the whole batch takes."""
        if seat.wash is seat.whole:
            return True
        with self._setting.turn(seat.arm):
            seconds, report = seat.wash.launch(self._clock, "a wash-out")
        self._launching[seat.arm] += seconds
        return _path(report) == _path(seat.report)

    def _settle(self, seats: Sequence[Seat]) -> int:
        """Warm up by rounds of wash-out launches; return how many there were."""
        least = 1 + max(self._arms[seat.arm].workload.warmup for seat in seats)
        fastest = math.inf
        for number in range(1, max(least, MOST_ROUNDS) + 1):
            total = 0.0
            for seat in seats:
                with self._setting.turn(seat.arm):
                    seconds, _ = seat.wash.launch(self._clock, f"warm-up {number}")
                self._launching[seat.arm] += seconds
                total += seconds
            if number >= least and total >= SETTLED * fastest:
                return number
            fastest = min(fastest, total)
        return max(least, MOST_ROUNDS)

    def _in_random_order(self) -> list[tuple[int, KernelArm]]:
        arms = list(enumerate(self._arms))
        self._setting.order.shuffle(arms)
        return arms

    # ------------------------------------------------------------------ measuring

    def measure(self, beat: Callable[[str], None]) -> list[Measurement]:
        """Take all rounds of all rows; see ``Turns``."""
        order = self._setting.order
        rounds = spread([row.rounds for row in self._rows], order)
        with _no_garbage_collection():
            for number, index in enumerate(rounds):
                row = self._rows[index]
                seats = list(row.seats)
                order.shuffle(seats)
                row.pulses.append(self._pulse())
                for place, seat in enumerate(seats):
                    self._take(seat, row, place)
                beat(f"round {number + 1} of {len(rounds)}")
        return [self._measurement(index) for index in range(len(self._arms))]

    def _pulse(self) -> float:
        """Time the arm-blind pulse (seconds)."""
        start = self._clock()
        self._setting.machine.pulse()
        return self._clock() - start

    def _take(self, seat: Seat, row: Row, place: int) -> None:
        """One turn of one arm; see the module."""
        which = f"round {len(seat.seconds)}"
        if row.state is State.cold:
            self._setting.machine.flush()
        with self._setting.turn(seat.arm):
            if row.state is State.hot:
                washed, _ = seat.wash.launch(self._clock, f"{which}, wash-out")
                self._launching[seat.arm] += washed
            seat.whole.poison()
            seconds, seat.report = seat.whole.launch(self._clock, which)
            _check(seat, which)
        seat.seconds.append(seconds)
        seat.places.append(place)
        self._launching[seat.arm] += seconds
        self._counters[seat.arm].update(seat.report.counters())
        self._counters[seat.arm][f"engine.{self._arms[seat.arm].engine}"] += 1

    def _measurement(self, index: int) -> Measurement:
        arm, results = self._arms[index], []
        for case in arm.workload.cases:
            size = cases.geometry(case, arm.workload, arm.block_size)
            reason = cases.skip_reason(size, arm.workload)
            if reason is not None:
                results.append(CaseResult(case=case.name, skipped=reason))
                continue
            for row in self._rows:
                for seat in row.seats:
                    if seat.arm == index and seat.whole.size.case.name == case.name:
                        results.append(_result(seat, row))
        counters = {name: float(n) for name, n in sorted(self._counters[index].items())}
        return Measurement(
            cases=tuple(results),
            counters=counters,
            notes={"launch_s": round(self._launching[index], 6)},
        )

    def close(self) -> None:
        """Let go of the memory."""
        self._memory = None
        self._rows.clear()


def states(asked: State) -> tuple[State, ...]:
    """Return the states of the caches that are asked for."""
    return (State.hot, State.cold) if asked is State.both else (asked,)


def spread(rounds: Sequence[int], order: random.Random) -> list[int]:
    """Return the rows' indices, each as often as it has rounds, spread over the whole time.

    The ``i``-th of a row's ``n`` rounds falls at random into the ``i``-th ``n``-th of it.
    """
    when = [((i + order.random()) / n, index) for index, n in enumerate(rounds) for i in range(n)]
    return [index for _, index in sorted(when)]


def _case(arm: KernelArm, name: str) -> Case | None:
    """Return the arm's case of that name where it is run."""
    for case in arm.workload.cases:
        if case.name == name:
            size = cases.geometry(case, arm.workload, arm.block_size)
            return None if cases.skip_reason(size, arm.workload) else case
    return None


def _path(report: LaunchReport | None) -> tuple[object, ...]:
    return () if report is None else (report.kernel, report.partitions)


def _on_numpy(backend: AttentionBackend) -> Attention:
    """Return what takes NumPy's arrays; MLX is not imported where nobody needs it."""
    if backend.arrays == "numpy":
        return backend
    from labkit.engine.attention.bridge import Bridge

    return Bridge(backend)


def _plan(backend: AttentionBackend, arm: KernelArm, size: Geometry, seed: int) -> Plan:
    starts = np.zeros(len(size.query_lens) + 1, np.int32)
    np.cumsum(size.query_lens, out=starts[1:])
    return backend.plan(
        block_tables=cases.block_tables(size, arm.block_size, seed),
        seq_lens=size.seq_lens,
        cu_seqlens_q=starts,
    )


def _check(seat: Seat, which: str) -> None:
    """Refuse an output that is not, bit for bit, that of the arm's first launch."""
    out, expected = seat.whole.arrays.out, seat.expected
    if np.array_equal(_words(out), _words(expected)):
        return
    where = f"{seat.whole.size.case.name}: {which}"
    _refuse_nan(out, where)
    rows = np.flatnonzero((out.view(np.uint32) != expected.view(np.uint32)).any(axis=(1, 2)))
    raise InvalidOutput(
        f"{where} differs from the first launch in {len(rows)} rows, the first of them "
        f"token {rows[0]}"
    )


def _words(array: NDArray[np.float32]) -> NDArray[np.uint64]:
    return array.reshape(-1).view(np.uint64)


def _refuse_nan(out: NDArray[np.float32], where: str) -> None:
    if np.isnan(out.min()):
        token, head, _ = np.argwhere(np.isnan(out))[0]
        raise InvalidOutput(f"{where}: NaN left in the output, first at token {token}, head {head}")


def _result(seat: Seat, row: Row) -> CaseResult:
    report, size = seat.report, seat.whole.size
    assert report is not None, "the row was measured"
    work = cases.work(size, seat.whole.workload)
    times = tuple(seconds * 1e6 for seconds in seat.seconds)
    agree = all(other.expected is seat.expected for other in row.seats) and len(row.seats) > 1
    return CaseResult(
        case=row.name,
        metrics=(Metric("dispatch_us", "us", "lower", True, times),),
        outputs=dict(seat.outputs),
        values=None if agree else seat.expected,
        notes={
            "kernel": report.kernel,
            "reason": report.reason,
            "grid": list(report.grid),
            "map_us": seat.whole.plan.map_us,
            "num_seqs": len(size.seq_lens),
            "total_q": size.total_q,
            "pool_bytes": size.pool_bytes,
            "flops": work.flops,
            "least_bytes": work.bytes,
            "counters": report.counters(),
            "state": row.state.value,
            "warm_up_rounds": row.warm_up,
            "pulse_us": [round(seconds * 1e6, 2) for seconds in row.pulses],
            "turns": list(seat.places),
        },
    )


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()
