"""Launches in turn: every arm's kernel on the same memory, a launch at a time.

A *row* is a case in one state of the caches. Each row has its rounds, spread over the whole
process at random. A round begins with a pulse of the arm-blind probe, which is timed and
wakes the threads; then every arm has a turn, in random order, as often first as last:

1. hot: a wash-out launch of the arm, so that the caches hold what *this* arm leaves, not
   the arm before; cold: a flush, so that they hold nothing of either;
2. the output is poisoned, the launch is timed, the output is checked. Of small batches on
   hot caches three launches are, and the fastest counts (``cases.TIMED``). On a device with a
   queue it is a chain of launches that is timed, and after it a launch by itself; on cold
   caches only the latter, because a chain's second launch would find them hot.

Without the wash-out the first launch after a switch is slower than the second by 2 % on
small cases, and an arm with more to load is punished for it.

Queries, keys and values lie on the device and every batch is planned before a clock is read;
what planning takes is measured apart. Where there is a queue, a round times empty launches,
too.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from labkit.config import Case, Precision, State, Workload
from labkit.machine import parent_death
from labkit.records import CaseRecord
from labkit.workload import kernel_cases, kernel_samples
from labkit.workload.interleaving import Setting
from labkit.workload.kernel_cases import Geometry, Memory
from labkit.workload.kernel_samples import Expected, Row, Seat, same
from labkit.workload.launch_timing import (
    Batch,
    Clock,
    HostBatch,
    Launch,
    Queue,
    QueueBatch,
    empty_chain,
)
from labkit.workload.measurement import Measurement
from labkit.workload.output_digest import array_outputs

if TYPE_CHECKING:
    from labkit.engine.attention.attention_protocol import Arrays
    from labkit.engine.attention.launch_report import LaunchReport
    from labkit.engine.attention.paged_backend import PagedBackend

SETTLED = 0.98  # a round this much of the fastest before is no longer falling
MOST_ROUNDS = 20  # of warming up


@dataclass(frozen=True)
class KernelArm:
    """One arm: the attention operation, and what is asked of it.

    ``engine``: whose operation it is; counted, because every arm claims its engine.
    ``make_backend``: returns a backend, which takes over the pools of one batch.
    ``block_size``: tokens in a KV block. ``queued``: whether the device has a queue.
    """

    engine: str
    make_backend: Callable[[], PagedBackend]
    workload: Workload
    block_size: int
    queued: bool = False


def _mlx_queue(dtype: Precision) -> Queue:
    from labkit.workload.mlx_launch_queue import MlxQueue

    return MlxQueue(dtype)


class KernelTurns:
    """Kernel cases on the attention operations of several arms; see ``Turns``.

    Parameters
    ----------
    arms
        At least one. They share queries and KV memory, all of one type.
    setting
        See ``Setting``.
    clock
        Seconds; a parameter so that tests can know the answers.
    make_queue
        Returns the queue of arms on lazy arrays of a type; called where there are any.
    """

    def __init__(
        self,
        arms: Sequence[KernelArm],
        setting: Setting,
        clock: Clock = time.perf_counter,
        make_queue: Callable[[Precision], Queue] = _mlx_queue,
    ) -> None:
        self._arms = tuple(arms)
        self._setting = setting
        self._clock = clock
        self._counters = [Counter[str]() for _ in arms]
        self._launching = [0.0] * len(arms)  # seconds
        self._rows: list[Row] = []
        sizes = [
            (arm, kernel_cases.geometry(case, arm.workload, arm.block_size))
            for arm in arms
            for case in arm.workload.cases
        ]
        run = [
            (arm, size) for arm, size in sizes if not kernel_cases.skip_reason(size, arm.workload)
        ]
        kinds = {_arrays(arm.make_backend()) for arm in arms}
        dtype = arms[0].workload.dtype
        self._queue = make_queue(dtype) if "mlx" in kinds else None
        self._memory = self._lay_out(
            kinds,
            kernel_cases.allocate(
                max(size.pool_bytes for _, size in run),
                max(kernel_cases.query_numbers(size, arm.workload) for arm, size in run),
                setting.seed,
                dtype,
            ),
        )
        for arm, size in run:  # refuses bad maps now, and compiles what builds them
            self._batch(arm, size.case)

    def _lay_out(self, kinds: set[Arrays], memory: Memory) -> dict[str, Memory]:
        """Return the memory by the kind of its arrays; nothing is kept that no arm reads."""
        found = {"numpy": memory.widened()} if "numpy" in kinds else {}
        return found if self._queue is None else found | {"mlx": memory.moved(self._queue.put)}

    # ------------------------------------------------------------------ warming up

    def prepare(self) -> None:
        """Warm up in two processes, from the first case on and from the last.

        What one has compiled the other finds in numba's cache, so that they meet. A queue's
        device is not for a forked process, and what it compiles is not numba's; nor are
        macOS's own libraries for one, so that the first does it all there.
        """
        if self._queue is not None or sys.platform == "darwin":
            self.warm_up()
            return
        parent, names = os.getpid(), self._names()[::-1]

        def backwards() -> None:
            parent_death.watch_parent(parent, None)
            self._warm_up(names)

        other = multiprocessing.get_context("fork").Process(target=backwards)
        other.start()
        try:
            self.warm_up()
        finally:  # all is compiled, or nothing will do
            other.kill()
            other.join()

    def warm_up(self) -> None:
        """Launch every case of every arm once for its output, then until it has settled.

        A round is a wash-out launch of every arm. Rounds go on until one is not faster
        than the fastest before by more than 2 %; at least ``workload.warmup`` rounds after
        the first, at most 20 in all.
        """
        self._warm_up(self._names())

    def _names(self) -> list[str]:
        """Return the cases' names, in the order of the arms'."""
        names = (case.name for arm in self._arms for case in arm.workload.cases)
        return list(dict.fromkeys(names))

    def _warm_up(self, names: Sequence[str]) -> None:
        for name in names:
            shared: list[Expected] = []
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
                row.seats += [replace(s, seconds=[], alone=[], host=[], places=[]) for s in seats]
                self._rows.append(row)

    def _seat(self, index: int, case: Case, shared: list[Expected]) -> Seat:
        """Plan an arm's batch and its wash-out, and launch the batch for its outputs.

        ``shared``: the outputs of the arms before, to which this one's is added if it differs.
        """
        arm = self._arms[index]
        with self._setting.turn(index):
            whole = self._batch(arm, case)
            share = kernel_cases.wash_share(whole.size, arm.workload)
            wash = whole if share == 1 else self._batch(arm, kernel_cases.part(case, share))
            plan_s, map_us = whole.planning(self._clock)
            whole.poison(first=True)
            first = self._launch(index, whole, "the first launch")
            (out,) = first.outputs
            kernel_samples.refuse_nan(out, f"{case.name}: the first launch")
            expected = next((one for one in shared if same(one.out, out)), None)
            if expected is None:
                expected = Expected(out.copy(), array_outputs(out, whole.dtype.value))
                shared.append(expected)
            seat = Seat(index, whole, wash, expected, (), plan_s, map_us)
            return replace(seat, chain=self._first_chain(seat), report=first.report)

    def _first_chain(self, seat: Seat) -> tuple[bytes, ...]:
        """Return the digests that the outputs of a chain must have; none where none is timed."""
        links, which = seat.whole.links, "the first chain"
        if links == 1:
            return ()
        seat.whole.poison(links, first=True)
        launch = self._launch(seat.arm, seat.whole, which, links)
        for out in launch.outputs:
            kernel_samples.refuse_nan(out, f"{seat.whole.size.case.name}: {which}")
        return tuple(map(kernel_samples.digest, launch.outputs))

    def _batch(self, arm: KernelArm, case: Case) -> Batch:
        """Lay a batch out on a backend of its own, and plan it."""
        size = kernel_cases.geometry(case, arm.workload, arm.block_size)
        backend = arm.make_backend()
        kind = _arrays(backend)
        arrays = self._memory[kind].view(size, arm.workload, arm.block_size)
        if self._queue is not None and kind == "mlx":
            self._queue.wait([arrays.q, arrays.k_pool, arrays.v_pool])
        backend.adopt([arrays.k_pool], [arrays.v_pool])
        scale, heads = 1 / math.sqrt(arm.workload.head_dim), arm.workload.num_heads
        backend.bind(0, scale=scale, heads=heads, window=arm.workload.window)
        make_plan = partial(backend.plan, **_asked(size, arm.block_size, self._setting.seed))
        laid = (backend, arm.workload, size, arrays, make_plan(), make_plan)
        if self._queue is None or kind != "mlx":
            return HostBatch(*laid)
        links = kernel_cases.links(size, arm.workload) if arm.queued else 1
        return QueueBatch(*laid, links, arm.queued, queue=self._queue)

    def _launch(self, arm: int, batch: Batch, which: str, links: int = 1) -> Launch:
        """Launch in the arm's turn, which is entered; its time counts as the arm's."""
        launch = batch.launch(self._clock, which, links)
        self._launching[arm] += launch.seconds * links
        return launch

    def _washes(self, seat: Seat) -> bool:
        """Tell whether the wash-out takes the kernel that the whole batch takes."""
        if seat.wash is seat.whole:
            return True
        with self._setting.turn(seat.arm):
            washed = self._launch(seat.arm, seat.wash, "a wash-out")
        return _path(washed.report) == _path(seat.report)

    def _settle(self, seats: Sequence[Seat]) -> int:
        """Warm up by rounds of wash-out launches; return how many there were."""
        least = 1 + max(self._arms[seat.arm].workload.warmup for seat in seats)
        fastest = math.inf
        for number in range(1, max(least, MOST_ROUNDS) + 1):
            total = 0.0
            for seat in seats:
                with self._setting.turn(seat.arm):
                    total += self._launch(seat.arm, seat.wash, f"warm-up {number}").seconds
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
                seats = row.next_order(order)
                row.pulses.append(self._pulse())
                self._time_nothing(row)
                for place, seat in enumerate(seats):
                    self._take(seat, row, place)
                beat(f"round {number + 1} of {len(rounds)}")
        return [self._measurement(index) for index in range(len(self._arms))]

    def _pulse(self) -> float:
        """Time the arm-blind pulse (seconds)."""
        start = self._clock()
        self._setting.machine.pulse()
        return self._clock() - start

    def _time_nothing(self, row: Row) -> None:
        """Time empty launches where a row's arms have a queue."""
        if self._queue is None or not any(seat.whole.queued for seat in row.seats):
            return
        chains = (max(map(row.links, row.seats)), 1)
        together, alone = (empty_chain(self._queue, self._clock, links) for links in chains)
        row.empty.append((together, alone))

    def _take(self, seat: Seat, row: Row, place: int) -> None:
        """One turn of one arm; see the module."""
        which, links = f"round {len(seat.seconds)}", row.links(seat)
        if row.state is State.cold:
            self._setting.machine.flush()
        with self._setting.turn(seat.arm):
            if row.state is State.hot:
                self._launch(seat.arm, seat.wash, f"{which}, wash-out")
            launches = [self._timed(seat, which, links) for _ in range(row.timed(seat))]
            alone = self._timed(seat, f"{which}, by itself", 1) if links > 1 else None
        fastest = min(launches, key=lambda launch: launch.seconds)
        seat.seconds.append(fastest.seconds)
        seat.host.append(fastest.host_s)
        if alone is not None:
            seat.alone.append(alone.seconds)
        seat.places.append(place)
        seat.report = (alone or fastest).report

    def _timed(self, seat: Seat, which: str, links: int) -> Launch:
        """Time launches that count, and check what each of them wrote."""
        seat.whole.poison(links)
        launch = self._launch(seat.arm, seat.whole, which, links)
        kernel_samples.check(seat, launch, which)
        counters = self._counters[seat.arm]
        counters.update(launch.report.counters())
        counters[f"engine.{self._arms[seat.arm].engine}"] += links
        return launch

    def _measurement(self, index: int) -> Measurement:
        arm, found = self._arms[index], []
        values: dict[str, NDArray[np.float32]] = {}
        for case in arm.workload.cases:
            size = kernel_cases.geometry(case, arm.workload, arm.block_size)
            reason = kernel_cases.skip_reason(size, arm.workload)
            if reason is not None:
                found.append(CaseRecord(case=case.name, skipped=reason))
                continue
            for row in self._rows:
                for seat in row.seats:
                    if seat.arm == index and seat.whole.size.case.name == case.name:
                        found.append(kernel_samples.record(seat, row))
                        values |= kernel_samples.values(seat, row)
        counters = {name: float(n) for name, n in sorted(self._counters[index].items())}
        return Measurement(
            cases=tuple(found),
            counters=counters,
            notes={"launch_s": round(self._launching[index], 6)},
            values=values,
        )

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.clear()
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
            size = kernel_cases.geometry(case, arm.workload, arm.block_size)
            return None if kernel_cases.skip_reason(size, arm.workload) else case
    return None


def _arrays(backend: PagedBackend) -> Arrays:
    return "mlx" if backend.arrays == "mlx" else "numpy"


def _path(report: LaunchReport | None) -> tuple[object, ...]:
    return () if report is None else (report.kernel, report.partitions)


def _asked(size: Geometry, block_size: int, seed: int) -> dict[str, Any]:
    """Return a case's batch as ``PagedBackend.plan`` takes it."""
    starts = np.zeros(len(size.query_lens) + 1, np.int32)
    np.cumsum(size.query_lens, out=starts[1:])
    tables = kernel_cases.block_tables(size, block_size, seed)
    return {"block_tables": tables, "seq_lens": size.seq_lens, "cu_seqlens_q": starts}


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
