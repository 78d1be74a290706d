"""Kernel arms measured in alternation on the same memory, one launch at a time.

A case in one state of the caches (hot or cold) has a number of *rounds*, spread at random over
the whole process. A round begins with a pulse: a fixed piece of work, the same for all arms,
which is timed and wakes the threads. Then every arm has a *turn*, in random order; of every n
rounds of n arms, each arm has each position once:

1. For hot caches the arm first launches a wash-out, so that the caches hold what *this* arm
   leaves there and not what the previous arm left. For cold caches a flush evicts everything. For
   warm caches only the round begins with a wash-out, by the arm whose turn comes last, so that
   every turn follows a launch of another arm.
2. The output is poisoned, the launch is timed, the output is checked. Brief batches are launched
   three times, but on cold caches, and the fastest counts (``kernel_cases.TIMED_LAUNCHES``).
   On a device with a queue, a chain of launches is timed and then a single launch. On cold
   caches only the single launch is timed, because a chain's second launch would find hot caches.

Without the wash-out, the first launch after a switch of arms is 2 % slower than the second on
small cases, which would penalise an arm that has more to load. Arms that read the same memory load
the same, and warm caches save them all but one wash-out of a round.

Queries, keys and values lie on the device, and every batch is planned before a clock is read;
planning is timed separately. On a device with a queue each round also times empty launches.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.config import Precision, State
from labkit.machine.facts import hardware_counters
from labkit.machine.processes import parent_death
from labkit.records import CaseRecord
from labkit.workload.kernels import kernel_case_samples, kernel_cases
from labkit.workload.kernels.kernel_arms import KernelArm, KernelArms
from labkit.workload.kernels.kernel_case_samples import ArmSamples, CaseRounds
from labkit.workload.kernels.launch_timing import Clock, MlxLaunchQueue, TimedLaunch, empty_chain
from labkit.workload.turn_order import spread_rounds
from labkit.workload.workload_protocols import CasePilot, Measurement, TurnContext

MIN_PILOT_ROUNDS, MAX_PILOT_ROUNDS = 3, 200
NORMAL_SD = 1.4826  # standard deviation over median absolute deviation, for normal noise


class InterleavedKernels:
    """Kernel cases on the attention operations of several arms; see ``InterleavedArms``.

    ``arms``: at least one; all share queries and KV memory of one element type. ``context``: seed,
    order of turns, and the kernels that are the same for every arm (pulse and flush).
    ``make_queue``: see ``KernelArms``.
    """

    def __init__(
        self,
        arms: Sequence[KernelArm],
        context: TurnContext,
        clock: Clock = time.perf_counter,
        make_queue: Callable[[Precision], MlxLaunchQueue] = MlxLaunchQueue,
    ) -> None:
        self._context = context
        self._clock = clock
        self._counters = [Counter[str]() for _ in arms]
        self._cases: list[CaseRounds] = []
        self._arms = KernelArms(arms, context, clock, make_queue)

    def prepare(self) -> None:
        """Compile the kernels of all cases, in two processes if possible.

        One process begins with the first case, the other with the last case and goes backwards.
        Each finds in numba's cache what the other has compiled, so the compilation is complete
        when they meet. With a launch queue a single process compiles, because a forked process
        cannot use the device and the device's kernels are not in numba's cache. On macOS a single
        process compiles too, because system libraries do not survive a fork.
        """
        parent, names = os.getpid(), self._arms.case_names()
        if self._arms.queue is not None or sys.platform == "darwin":
            self._arms.compile(names)
            return

        def backwards() -> None:
            parent_death.watch_parent(parent, None)
            self._arms.compile(names[::-1])

        other = multiprocessing.get_context("fork").Process(target=backwards)
        other.start()
        try:
            self._arms.compile(names)
        finally:  # everything is compiled, or a launch failed
            other.kill()
            other.join()

    def warm_up(self) -> None:
        self._cases += self._arms.warm_up()

    def measure(self, heartbeat: Callable[[str], None]) -> list[Measurement]:
        parts = [case.part for case in self._cases]
        total = sum(part.rounds for part in parts)
        with _no_garbage_collection():
            for number, now in enumerate(self._context.turn_order.rounds(parts), 1):
                self._measure_round(self._cases[now.part], now.turns)
                heartbeat(f"{number} of {total} rounds")
        hardware = self._count_hardware()
        return [self._measurement(index, hardware[index]) for index in range(len(self._arms.arms))]

    def _count_hardware(self) -> list[dict[str, Any]]:
        """Launch each batch again with hardware counters; return each arm's note ``hardware``.

        The caches are in the same state as in a measured turn.
        """
        counted: list[dict[str, Any]] = [{} for _ in self._arms.arms]
        try:
            if self._arms.queue is not None:
                raise OSError("the kernels run on a device of their own")
            hardware_counters.count(lambda: None)  # raises before a launch if there are none
            for case in self._cases:
                self._begin_round(case, case.arms[-1].prepared.arm)
                for arm in case.arms:
                    batch, index = arm.prepared.batch, arm.prepared.arm
                    launch = partial(batch.launch, self._clock, "counted launch 0")
                    with self._turn(case, arm):
                        batch.poison()
                        counts = hardware_counters.count(launch)
                    counted[index][case.label] = {k: float(n) for k, n in counts.items()}
        except OSError as error:
            return [{"unavailable": error.strerror or str(error)} for _ in self._arms.arms]
        return counted

    def _measure_round(self, case: CaseRounds, turns: Sequence[tuple[int, int]]) -> None:
        case.pulse_s.append(self._pulse())
        self._time_empty_launches(case)
        self._begin_round(case, turns[-1][0])
        for arm, position in turns:
            self._measure_turn(case.samples(arm), case, position)

    def _begin_round(self, case: CaseRounds, last: int) -> None:
        """For warm caches, launch the wash-out of the arm whose turn comes last."""
        if case.state is State.warm:
            with self._context.turn(last):
                self._wash_out(case.samples(last))

    @contextmanager
    def _turn(self, case: CaseRounds, arm: ArmSamples) -> Iterator[None]:
        """Begin an arm's turn, with a flush for cold caches and a wash-out for hot ones."""
        if case.state is State.cold:
            self._context.machine.flush()
        with self._context.turn(arm.prepared.arm):
            if case.state is State.hot:
                self._wash_out(arm)
            yield

    def pilot(self, seconds: float) -> list[CasePilot]:
        """Warm up all cases, then measure rounds of them for about ``seconds``, as long for each.

        The rounds of a study follow from it
        (:mod:`labkit.experiment.schedule.case_time_allocation`). It reports no arm's times, so that
        nothing can follow from a difference between the arms. As in a measurement, the rounds of
        all cases are mixed: a round that follows one of its own case varies less. A case in two
        states of the caches is one case, whose round is one in each state. The same process must
        not measure afterwards.
        """
        with _no_garbage_collection():
            cases, warm_up_s, start = [], [], self._clock()
            for case in self._arms.warm_up():
                cases.append(case)
                warm_up_s.append(self._clock() - start)
                start = self._clock()
            round_s = [[self._pilot_round(case)] for case in cases]
            case_s = seconds / max(1, len(cases))
            more = [
                min(MAX_PILOT_ROUNDS, max(MIN_PILOT_ROUNDS, int(case_s / max(first_s, 1e-9)))) - 1
                for (first_s,) in round_s
            ]
            for index in spread_rounds(more, self._context.order):
                round_s[index].append(self._pilot_round(cases[index]))
        pilots: dict[str, CasePilot] = {}
        for case, warm_s, each_s in zip(cases, warm_up_s, round_s, strict=True):
            name = case.arms[0].prepared.batch.size.case.name
            other = pilots.get(name, CasePilot(name, 0.0, 0.0, 0.0, 0))
            pilots[name] = CasePilot(
                name,
                other.round_s + float(np.median(each_s)),
                other.warm_up_s + warm_s,
                max(other.sd, round_sd([np.log(arm.seconds) for arm in case.arms])),
                len(each_s),
            )
        return list(pilots.values())

    def _pilot_round(self, case: CaseRounds) -> float:
        arms, start = [arm.prepared.arm for arm in case.arms], self._clock()
        order = self._context.order.sample(arms, len(arms))
        self._measure_round(case, [(arm, position) for position, arm in enumerate(order)])
        return self._clock() - start

    def _pulse(self) -> float:
        start = self._clock()
        self._context.machine.pulse()
        return self._clock() - start

    def _time_empty_launches(self, case: CaseRounds) -> None:
        """Time empty launches, in a chain and singly, if an arm of the case has a queue."""
        queue = self._arms.queue
        if queue is None or not any(arm.prepared.batch.queued for arm in case.arms):
            return
        longest = max(map(case.chain_length, case.arms))
        chained, single = (empty_chain(queue, self._clock, length) for length in (longest, 1))
        case.empty_s.append((chained, single))

    def _measure_turn(self, arm: ArmSamples, case: CaseRounds, position: int) -> None:
        """Measure one turn of one arm, as the module's docstring describes."""
        length = case.chain_length(arm)
        launch_name = f"round {len(arm.seconds)}"
        with self._turn(case, arm):
            launches = [
                self._timed_launch(arm, launch_name, length)
                for _ in range(case.timed_launches(arm))
            ]
            single = self._timed_launch(arm, f"{launch_name}, by itself", 1) if length > 1 else None
        fastest = min(launches, key=lambda launch: launch.seconds)
        arm.seconds.append(fastest.seconds)
        arm.mean_s.append(statistics.fmean(launch.seconds for launch in launches))
        arm.host_s.append(fastest.host_s)
        if single is not None:
            arm.single_s.append(single.seconds)
        arm.positions.append(position)
        arm.report = (single or fastest).report

    def _wash_out(self, arm: ArmSamples) -> None:
        name = f"round {len(arm.seconds)}, wash-out"
        self._arms.launch(arm.prepared.arm, arm.prepared.washout, name)

    def _timed_launch(self, arm: ArmSamples, launch_name: str, chain_length: int) -> TimedLaunch:
        prepared = arm.prepared
        prepared.batch.poison(chain_length)
        launch = self._arms.launch(prepared.arm, prepared.batch, launch_name, chain_length)
        kernel_case_samples.check_outputs(prepared, launch, launch_name)
        counters = self._counters[prepared.arm]
        counters.update(launch.report.counters())
        counters[f"engine.{self._arms.arms[prepared.arm].engine}"] += chain_length
        return launch

    def _measurement(self, index: int, hardware: dict[str, Any]) -> Measurement:
        arm, records = self._arms.arms[index], []
        values: dict[str, NDArray[np.float32]] = {}
        for case in arm.workload.cases:
            reason = kernel_cases.skip_reason(arm.geometry(case), arm.workload)
            if reason is not None:
                records.append(CaseRecord(case=case.name, skipped=reason))
                continue
            for rounds, samples in ((r, arm) for r in self._cases for arm in r.arms):
                prepared = samples.prepared
                if prepared.arm == index and prepared.batch.size.case.name == case.name:
                    records.append(kernel_case_samples.case_record(samples, rounds))
                    values |= kernel_case_samples.output_values(samples, rounds)
        counters = {name: float(n) for name, n in sorted(self._counters[index].items())}
        notes = {"launch_s": round(self._arms.launch_s[index], 6), "hardware": hardware}
        return Measurement(cases=tuple(records), counters=counters, notes=notes, values=values)

    def close(self) -> None:
        self._arms.memory.clear()
        self._cases.clear()


def round_sd(log_times: Sequence[NDArray[np.float64]]) -> float:
    """Return the standard deviation of a round's log ratio of two arms, robust against outliers.

    ``log_times``: for each arm, its log times in the same rounds. Two rounds of a single arm are
    taken for the same round of two arms.
    """
    times = np.asarray(log_times, np.float64)
    ratios = times[1:] - times[0] if len(times) > 1 else math.sqrt(2) * times
    deviations = np.abs(ratios - np.median(ratios, axis=1, keepdims=True))
    rounds = times.shape[1]
    return float(NORMAL_SD * np.median(deviations) * math.sqrt(rounds / max(1, rounds - 1)))


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
