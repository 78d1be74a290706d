"""Interleaved kernel timing on a fake clock: what is timed, in which order, what is excluded."""

import dataclasses
import gc
import itertools
import math
import os
import random
import time
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from kernel_stubs import StubBackend, experiment, make_workload, reported

from labkit.config import Case, State
from labkit.workload.kernels import (
    interleaved_kernels,
    kernel_arms,
    kernel_cases,
    kernel_workload_kind,
)
from labkit.workload.kernels.interleaved_kernels import InterleavedKernels
from labkit.workload.kernels.kernel_arms import KernelArm
from labkit.workload.output_digest import array_outputs
from labkit.workload.turn_order import spread_rounds
from labkit.workload.workload_protocols import InvalidOutput, StaleOutput, TurnContext

FEW = Case(name="few", decode=5, context=40, factor=3)
PREFILL = Case(name="prefill", prefill=2, chunk=24, factor=2)
LARGE = Case(name="large", decode=64, context=2048)  # more than a wash-out needs
PULSE, FLUSH = 0.5, 3.0  # seconds


class World:
    """A clock that only the work moves, and everything that was done, in order."""

    def __init__(self):
        self.now, self.done, self.turn = 0.0, [], None
        self.collecting = []

    def clock(self):
        return self.now

    def spend(self, what, seconds):
        self.now += seconds
        self.done.append((what, self.turn))

    def pulse(self):
        self.spend("pulse", PULSE)

    def flush(self):
        self.spend("flush", FLUSH)

    @contextmanager
    def enter(self, arm):
        assert self.turn is None, "a turn inside a turn"
        self.turn = arm
        try:
            yield
        finally:
            self.turn = None


class Backend(StubBackend):
    """A launch takes ``seconds(world)``; other things that take time are named."""

    def __init__(self, world, seconds, value=0.0, kernel="decode"):
        self.world, self.seconds, self.value, self.kernel = world, seconds, value, kernel
        self.poisoned, self.memory, self.turn_ids = [], set(), set()

    def plan(self, *, block_tables, seq_lens, cu_seqlens_q, total_q=None):
        self.world.spend("plan", 11.0)
        return SimpleNamespace(num_seqs=len(seq_lens), map_us=12.5, pools=self.pools)

    def forward(self, layer, q, k, v, plan, out):
        assert layer == 0 and k is None and v is None
        self.poisoned.append(bool(np.isnan(out).all()))
        self.turn_ids.add(self.world.turn)
        places = (q, out, *plan.pools)
        self.memory.add(tuple(a.__array_interface__["data"][0] for a in places))
        self.world.collecting.append(gc.isenabled())
        out[:] = q + np.float32(self.value)
        self.world.spend(("launch", plan.num_seqs), self.seconds(self.world))
        return out

    def report(self, plan):
        kernel = self.kernel if plan.num_seqs > 1 else "other"
        return reported({"kernel.decode": 1}, kernel=kernel)


def interleave_kernels(world, backends, *wanted, seed=0, **changes):
    arms = [
        KernelArm("paged", lambda b=b: b, make_workload(*wanted, **changes), block_size=16)
        for b in backends
    ]
    setting = TurnContext(3, random.Random(seed), world.enter, world)
    return InterleavedKernels(arms, setting, clock=world.clock)


def measure_kernels(world, backends, *wanted, **changes):
    interleaved = interleave_kernels(world, backends, *wanted, **changes)
    interleaved.warm_up()
    world.done.clear()
    results = interleaved.measure(lambda text: None)
    interleaved.close()
    return results


def repeats(measurement, index=0):
    return measurement.cases[index].metrics[0].repeats


def test_the_default_clock_counts_waiting_for_a_device():
    """A GPU that works while the host waits takes no CPU time."""
    world = World()
    wait_s = 0.005

    class Waiting(Backend):
        def forward(self, *arguments):
            time.sleep(wait_s)
            return super().forward(*arguments)

    backend = Waiting(world, lambda world: 0.0)
    arm = KernelArm("paged", lambda: backend, make_workload(FEW), block_size=16)
    interleaved = InterleavedKernels([arm], TurnContext(3, random.Random(0), world.enter, world))
    interleaved.warm_up()
    (result,) = interleaved.measure(lambda text: None)
    assert min(repeats(result)) >= wait_s * 1e6
    assert result.notes["launch_s"] >= wait_s * len(repeats(result))


def test_only_the_launch_is_timed():
    world = World()
    # 2 s for the first arm, 5 s for the second; a pulse, a plan and a wash-out take theirs.
    results = measure_kernels(
        world, [Backend(world, lambda w: 2.0), Backend(world, lambda w: 5.0)], FEW
    )
    assert repeats(results[0]) == (2e6,) * 6 and repeats(results[1]) == (5e6,) * 6
    assert results[0].cases[0].notes["pulse_us"] == [PULSE * 1e6] * 6
    # The first launch, the rounds of warming up, and a wash-out and three launches a round.
    warm_up = results[0].cases[0].notes["warm_up_rounds"]
    assert warm_up == 2
    assert results[0].notes["launch_s"] == 2.0 * (1 + warm_up + 4 * 6)


def test_kernels_are_prepared_by_two_processes_from_either_end(tmp_path):
    """The first launch here waits until the other process has launched: another case."""

    def launched_processes() -> int:
        return sum(path.stat().st_size > 0 for path in tmp_path.iterdir())

    class MarkedBackend(Backend):
        def forward(self, layer, q, k, v, plan, out):
            with open(tmp_path / str(os.getpid()), "a") as file:
                file.write(f"{plan.num_seqs}\n")
            deadline = time.monotonic() + 20
            # A file exists before its line is written: only a written line is a launch.
            while launched_processes() < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            return super().forward(layer, q, k, v, plan, out)

    world = World()
    backend = MarkedBackend(world, lambda w: 1.0)
    interleave_kernels(world, [backend], FEW, PREFILL).prepare()
    launched = {int(path.name): path.read_text().split() for path in tmp_path.iterdir()}
    mine = launched.pop(os.getpid())
    ((other, theirs),) = launched.items()
    assert mine[0] == "5" and mine[-1] == "2"
    assert theirs[0] == "2"
    with pytest.raises(ProcessLookupError):
        os.kill(other, 0)


def test_macos_prepares_in_one_process(monkeypatch):
    """Its libraries may crash in a forked process."""
    monkeypatch.setattr(interleaved_kernels.sys, "platform", "darwin")
    monkeypatch.delattr(os, "fork")
    world = World()
    interleave_kernels(world, [Backend(world, lambda w: 1.0)], FEW).prepare()
    assert world.done


class Watched(Backend):
    """Notes when its report is looked at; ``out`` is the output of its last launch."""

    out = None

    def forward(self, layer, q, k, v, plan, out):
        self.out = out
        return super().forward(layer, q, k, v, plan, out)

    def report(self, plan):
        (report,) = super().report(plan)

        class Report(type(report)):
            @property
            def stale(_):
                self.world.done.append(("report", self.world.turn))
                return False

        del report.stale
        return (Report(**vars(report)),)


def test_the_clock_is_read_right_before_and_right_after_a_launch():
    """Neither the NaN fill nor a check comes between two readings of the clock."""
    world = World()
    backend = Watched(world, lambda w: 1.0)

    def clock():
        filled = backend.out is not None and bool(np.isnan(backend.out).all())
        world.done.append(("clock, filled" if filled else "clock", world.turn))
        return world.now

    world.clock = clock
    measure_kernels(world, [backend], FEW)
    pulse = ["clock", "pulse", "clock"]
    wash_out = ["clock", ("launch", 5), "clock", "report"]
    launch = ["clock, filled", ("launch", 5), "clock", "report"]
    assert [what for what, _ in world.done] == (pulse + wash_out + 3 * launch) * 6


def test_an_output_is_checked_after_the_clock_was_read():
    world = World()
    backend = Watched(world, lambda w: 1.0)
    interleaved = interleave_kernels(world, [backend], FEW)
    interleaved.warm_up()

    def clock():
        backend.out[4, 3, 15] += 1.0
        return world.now

    interleaved._arms.clock = clock
    with pytest.raises(InvalidOutput, match="the output differs from the first launch's"):
        interleaved.measure(lambda text: None)


def test_every_launch_of_an_arm_is_in_its_own_turn(monkeypatch):
    monkeypatch.setattr(kernel_cases, "WASHOUT_BYTES", 1)  # a part of the batch washes out
    world = World()
    backends = [Backend(world, lambda w: 1.0, kernel="decode") for _ in range(3)]
    measure_kernels(world, backends, FEW, PREFILL)
    assert [backend.turn_ids for backend in backends] == [{0}, {1}, {2}]


def test_arms_run_in_random_order_within_a_case():
    orders = set()
    for seed in range(8):
        world = World()
        interleaved = interleave_kernels(
            world, [Backend(world, lambda w: 1.0) for _ in range(3)], FEW, seed=seed
        )
        world.done.clear()
        interleaved.warm_up()
        orders.add(tuple(arm for what, arm in world.done if what != "plan")[:3])
    assert len(orders) > 2 and {tuple(sorted(order)) for order in orders} == {(0, 1, 2)}


def test_each_launch_has_its_own_time():
    world = World()
    steps = iter(range(1, 1000))
    (result,) = measure_kernels(world, [Backend(world, lambda w: float(next(steps)))], FEW)
    assert len(set(repeats(result))) == 6


@pytest.mark.parametrize(("brief_bytes", "launches"), [(48e6, 4), (1, 2)])
def test_a_round_is_a_pulse_and_each_arms_wash_out_and_launches_in_its_own_turn(
    monkeypatch, brief_bytes, launches
):
    monkeypatch.setattr(kernel_cases, "BRIEF_BYTES", brief_bytes)
    world = World()
    measure_kernels(world, [Backend(world, lambda w: 1.0), Backend(world, lambda w: 1.0)], FEW)
    length = 1 + 2 * launches
    assert len(world.done) == 6 * length
    for start in range(0, len(world.done), length):
        pulse, *calls = world.done[start : start + length]
        assert pulse == ("pulse", None)
        assert {what[0] for what, _ in calls} == {"launch"}
        arms = [arm for _, arm in calls]
        assert sorted(arms) == [0] * launches + [1] * launches
        assert arms[0] == arms[launches - 1] != arms[-1] == arms[launches]


def test_the_fastest_launch_of_a_turn_counts_and_never_the_wash_out():
    world = World()
    interleaved = interleave_kernels(world, [Backend(world, lambda w: next(seconds))], FEW)
    seconds = itertools.repeat(9.0)
    interleaved.warm_up()
    seconds = itertools.cycle([1.0, 7.0, 2.0, 8.0])
    (result,) = interleaved.measure(lambda text: None)
    assert repeats(result) == (2e6,) * 6 and result.cases[0].notes["fastest_of"] == 3
    mean = (7 + 2 + 8) / 3  # by which an arm's own slow launches are judged
    notes = result.cases[0].notes
    assert notes["as_measured"]["dispatch_us"] == pytest.approx([mean * 1e6] * 6)


def test_a_cold_turn_flushes_instead():
    world = World()
    (result,) = measure_kernels(world, [Backend(world, lambda w: 1.0)], FEW, state=State.cold)
    assert [what for what, _ in world.done[:3]] == ["pulse", "flush", ("launch", 5)]
    assert len(world.done) == 6 * 3
    assert repeats(result) == (1e6,) * 6 and result.cases[0].notes["state"] == "cold"


def test_a_warm_round_begins_with_one_wash_out_of_the_arm_whose_turn_is_last(monkeypatch):
    monkeypatch.setattr(kernel_cases, "BRIEF_BYTES", 1)  # one launch a turn
    world, orders = World(), []
    backends = [Backend(world, lambda w: orders.append(w.turn) or 1.0) for _ in range(3)]
    interleaved = interleave_kernels(world, backends, FEW, state=State.warm, repeats=4)
    interleaved.warm_up()
    orders.clear()
    results = interleaved.measure(lambda text: None)
    rounds = [orders[i : i + 4] for i in range(0, len(orders), 4)]
    assert len(rounds) == 12 and all(sorted(arms[1:]) == [0, 1, 2] for arms in rounds)
    assert all(arms[0] == arms[-1] for arms in rounds)  # the first launch follows another arm, too
    assert len({tuple(arms) for arms in rounds}) > 3
    for result in results:
        assert repeats(result) == (1e6,) * 12 and result.cases[0].notes["state"] == "warm"


@pytest.mark.parametrize("state", [State.hot, State.warm, State.cold])
def test_hardware_is_counted_from_the_caches_of_a_measured_turn(monkeypatch, state):
    world = World()

    def count(work):
        world.spend("counted", 0.0)
        work()
        return {"cycles": 7}

    monkeypatch.setattr(interleaved_kernels.hardware_counters, "count", count)
    backends = [Backend(world, lambda w: 1.0) for _ in range(2)]
    results = measure_kernels(world, backends, FEW, state=state)
    a, b = (turn for what, turn in world.done if what == "counted" and turn is not None)
    launch = ("launch", 5)
    first, second = ([("counted", arm), (launch, arm)] for arm in (a, b))
    before = {
        State.hot: ([(launch, a)], [(launch, b)]),
        State.warm: ([(launch, b)], []),
        State.cold: ([("flush", None)], [("flush", None)]),
    }[state]
    expected = [*before[0], *first, *before[1], *second]
    assert world.done[-len(expected) :] == expected
    assert [result.notes["hardware"] for result in results] == [{"few": {"cycles": 7.0}}] * 2
    assert all(backend.poisoned[-1] for backend in backends)


def test_the_caches_of_a_single_arm_are_hot():
    world = World()
    (result,) = measure_kernels(world, [Backend(world, lambda w: 1.0)], FEW, state=State.warm)
    assert result.cases[0].notes["state"] == "hot"
    assert [what for what, _ in world.done[:3]] == ["pulse", ("launch", 5), ("launch", 5)]


def test_hot_and_cold_in_one_study_are_two_rows_of_a_case():
    world = World()
    cold = {"now": False}

    def flush():
        cold["now"] = True

    world.flush = flush

    def launch(w):
        seconds, cold["now"] = (9.0 if cold["now"] else 4.0), False
        return seconds

    (result,) = measure_kernels(world, [Backend(world, launch)], FEW, state=State.both)
    assert [case.case for case in result.cases] == ["few (hot)", "few (cold)"]
    assert repeats(result, 0) == (4e6,) * 6 and repeats(result, 1) == (9e6,) * 6


def test_a_carry_over_from_the_other_arm_is_gone_when_hot():
    """What is planted: a launch after another arm's is slower, and more so for arm 1."""

    def arm(number):
        def seconds(world):
            carried = world.last is not None and world.last != number
            world.last = number
            return 1.0 + (0.02 * (1 + number) if carried else 0.0)

        return seconds

    def ratio(state):
        world = World()
        world.last = None
        backends = [Backend(world, arm(0)), Backend(world, arm(1))]
        results = measure_kernels(world, backends, FEW, state=state, repeats=20)
        return np.median(np.array(repeats(results[1])) / np.array(repeats(results[0])))

    assert ratio(State.hot) == 1.0
    assert ratio(State.cold) > 1.01  # without the wash-out it is seen


def test_rounds_are_spread_over_the_whole_time_and_turns_are_in_random_order():
    world = World()
    results = measure_kernels(
        world, [Backend(world, lambda w: 1.0) for _ in range(3)], FEW, PREFILL, repeats=10
    )
    sizes = [what[1] for what, _ in world.done if what != "pulse"][::6]  # three arms
    halves = [sizes[: len(sizes) // 2].count(n) / sizes.count(n) for n in (5, 2)]
    assert all(0.4 < share < 0.6 for share in halves)
    places = [result.cases[0].notes["turns"] for result in results]
    assert {tuple(sorted(place[i] for place in places)) for i in range(30)} == {(0, 1, 2)}
    for place in places:  # in every three rounds each arm has every place
        assert {tuple(sorted(place[i : i + 3])) for i in range(0, 30, 3)} == {(0, 1, 2)}
    assert len({tuple(place[i] for place in places) for i in range(30)}) == 6  # every order


def test_spread_rounds_runs_every_round_once_in_its_share_of_the_time():
    order = spread_rounds([3, 30], random.Random(1))
    assert order.count(0) == 3 and order.count(1) == 30
    positions = [i for i, row in enumerate(order) if row == 0]
    assert [p * 3 // len(order) for p in positions] == [0, 1, 2]
    assert order != spread_rounds([3, 30], random.Random(2))


def test_the_garbage_collector_is_off_only_while_measuring():
    world = World()
    interleaved = interleave_kernels(world, [Backend(world, lambda w: 1.0)], FEW)
    interleaved.warm_up()
    assert all(world.collecting)
    world.collecting.clear()
    frozen = []
    interleaved.measure(lambda text: frozen.append(gc.get_freeze_count()))
    assert world.collecting and not any(world.collecting)
    assert frozen[0] > 0 and gc.isenabled() and gc.get_freeze_count() == 0


def test_garbage_is_collected_before_measuring_and_a_disabled_collector_stays_disabled():
    class Loop:
        def __init__(self):
            self.me = self

    world = World()
    interleaved = interleave_kernels(world, [Backend(world, lambda w: 1.0)], FEW)
    interleaved.warm_up()
    gc.disable()
    try:
        garbage = weakref.ref(Loop())
        assert garbage() is not None
        there = []
        interleaved.measure(lambda text: there.append(garbage()))
        assert not any(there) and not gc.isenabled()
    finally:
        gc.enable()


def test_a_measured_launch_writes_into_a_poisoned_output():
    world = World()
    backend = Backend(world, lambda w: 1.0)
    measure_kernels(world, [backend], FEW)
    assert backend.poisoned[-24:] == [False, True, True, True] * 6  # wash-out, launches
    assert backend.poisoned[0]


def test_all_arms_work_on_the_same_memory():
    world = World()
    backends = [Backend(world, lambda w: 1.0) for _ in range(3)]
    backends[1].arrays = "any"  # it gets NumPy arrays, too
    measure_kernels(world, backends, FEW, PREFILL)
    assert len({memory for backend in backends for memory in backend.memory}) == 1


def test_an_output_is_compared_with_the_arms_own_first():
    world = World()
    backends = [Backend(world, lambda w: 1.0), Backend(world, lambda w: 1.0, value=1.0)]
    one, other = measure_kernels(world, backends, FEW)
    assert one.cases[0].outputs["digest"] != other.cases[0].outputs["digest"]
    for measurement in (one, other):  # arms that differ keep what they gave
        assert list(measurement.values) == [measurement.cases[0].outputs["digest"]]
    same = measure_kernels(world, [Backend(world, lambda w: 1.0) for _ in range(2)], FEW)
    assert not same[0].values


def test_an_output_is_hashed_once_for_all_arms_that_agree(monkeypatch):
    hashed = []

    def outputs(out, dtype):
        hashed.append(out.copy())
        return array_outputs(out, dtype)

    monkeypatch.setattr(kernel_arms, "array_outputs", outputs)
    world = World()
    interleaved = measure_kernels(
        world, [Backend(world, lambda w: 1.0, value) for value in (0, 1, 0, 1)], FEW
    )
    digests = [measurement.cases[0].outputs["digest"] for measurement in interleaved]
    assert len(hashed) == 2 and digests[0] == digests[2] != digests[1] == digests[3]
    assert {array_outputs(out)["digest"] for out in hashed} == set(digests)


@pytest.mark.parametrize("row", range(5))
def test_an_output_that_changes_between_launches_is_refused(row):
    world = World()
    backend = Backend(world, lambda w: 1.0)
    interleaved = interleave_kernels(world, [backend], FEW)
    interleaved.warm_up()
    forward = backend.forward

    def wrong(*args):
        result = forward(*args)
        out = args[-1]
        out[row, 3, 15] = np.nextafter(out[row, 3, 15], np.float32(np.inf))
        return result

    backend.forward = wrong
    with pytest.raises(InvalidOutput, match=f"differs .* in 1 row, first at token {row}"):
        interleaved.measure(lambda text: None)


@pytest.mark.parametrize("row", [0, 4, 47])
def test_an_unwritten_output_element_is_refused(row):
    world = World()
    backend = Backend(world, lambda w: 1.0)
    forward = backend.forward

    def forgets(*args):
        result = forward(*args)
        out = args[-1]
        out[row, 3, 15] = np.nan
        return result

    backend.forward = forgets
    interleaved = interleave_kernels(world, [backend], PREFILL)
    with pytest.raises(InvalidOutput, match=f"has NaN, first at token {row}, head 3"):
        interleaved.warm_up()


def test_zeros_of_opposite_sign_differ():
    world = World()
    backend = Backend(world, lambda w: 1.0)
    forward = backend.forward
    signs = iter([0.0] * 4 + [-0.0] * 100)  # warming up takes three launches

    def signed(*args):
        result = forward(*args)
        out = args[-1]
        out[2, 0, 0] = next(signs)
        return result

    backend.forward = signed
    with pytest.raises(InvalidOutput, match=r"differs .* in 1 row, first at token 2"):
        measure_kernels(world, [backend], FEW)


def test_a_stale_stamp_and_an_output_elsewhere_are_refused():
    def launched(change):
        world = World()
        backend = Backend(world, lambda w: 1.0)
        forward, report = backend.forward, backend.report
        reports = []

        def changed(*args):
            out, launch_report = change(forward(*args), report(args[4])[0])
            reports.append(launch_report)
            return out

        backend.forward, backend.report = changed, lambda plan: (reports[-1],)
        interleave_kernels(world, [backend], FEW).warm_up()

    def stale(out, report):
        report.stale, report.stamp = True, 6
        return out, report

    with pytest.raises(StaleOutput, match="first launch: the kernel's stamp is 6, not 7"):
        launched(stale)
    with pytest.raises(InvalidOutput, match="not written to the given array"):
        launched(lambda out, report: (out.copy(), report))


@pytest.mark.parametrize(
    ("times", "rounds"),
    [
        ([10, 9, 8, 7, 7], 5),  # falls until the fourth round
        ([10, 10], 2),
        ([10, 9.9], 2),  # by less than 2 %
        ([100 * 0.9**n for n in range(40)], 20),  # never settles
    ],
)
def test_warm_up_ends_when_launches_stop_getting_faster(times, rounds):
    world = World()
    clock = iter([50.0, *times])  # the first launch
    (result,) = measured_until(world, Backend(world, lambda w: next(clock, 1.0)))
    assert result == rounds


def measured_until(world, backend):
    interleaved = interleave_kernels(world, [backend], FEW)
    interleaved.warm_up()
    return [case.warm_up_rounds for case in interleaved._cases]


def test_a_large_batch_is_washed_out_by_a_part_of_it_and_a_small_one_by_itself():
    batch = make_workload(LARGE, num_heads=16, num_kv_heads=4, head_dim=128)
    size = kernel_cases.geometry(LARGE, batch, 16)
    part = kernel_cases.geometry(
        kernel_cases.scaled_case(LARGE, kernel_cases.washout_share(size, batch)), batch, 16
    )
    assert 1 <= len(part.seq_lens) < 64 and part.seq_lens[0] == 2048
    work = kernel_cases.work(part, batch)
    assert work.bytes >= kernel_cases.WASHOUT_BYTES or work.flops >= kernel_cases.WASHOUT_FLOPS
    few = make_workload(FEW)
    assert kernel_cases.washout_share(kernel_cases.geometry(FEW, few, 16), few) == 1


def test_a_wash_out_batch_that_runs_another_kernel_is_not_used(monkeypatch):
    monkeypatch.setattr(kernel_cases, "WASHOUT_BYTES", 1)  # one request of each kind
    world = World()
    measure_kernels(world, [Backend(world, lambda w: 1.0)], FEW)
    assert {what for what, _ in world.done} == {"pulse", ("launch", 5)}
    world = World()
    measure_kernels(world, [Backend(world, lambda w: 1.0, kernel="other")], FEW)
    assert {what for what, _ in world.done} == {"pulse", ("launch", 5), ("launch", 1)}


@pytest.mark.parametrize("change", [{"repeats": 3}, {"warmup": 4}, {"state": State.cold}])
def test_arms_with_different_rounds_run_in_separate_processes(change):
    (name,) = change
    arms = [experiment(make_workload(FEW)), experiment(make_workload(FEW, **change))]
    assert f"workload.{name}" in kernel_workload_kind.KIND.apart(arms)
    assert kernel_workload_kind.KIND.apart([arms[0], arms[0]]) is None


def test_arms_on_warm_caches_that_copy_memory_run_in_separate_processes():
    fused, gather = (experiment(make_workload(FEW, state=State.warm)) for _ in range(2))
    assert kernel_workload_kind.KIND.apart([fused, gather]) is None
    attention = dataclasses.replace(gather.engine.attention, backend="gather")
    gather = dataclasses.replace(
        gather, engine=dataclasses.replace(gather.engine, attention=attention)
    )
    reason = kernel_workload_kind.KIND.apart([fused, gather])
    assert reason is not None and "engine.attention.backend" in reason
    assert kernel_workload_kind.KIND.apart([gather, gather]) is None


def test_the_estimate_of_cold_turns_has_flushes_and_that_of_others_their_wash_outs(monkeypatch):
    monkeypatch.setattr(kernel_cases, "BRIEF_BYTES", 1)  # one launch a turn is timed, hot or cold
    arms = [experiment(make_workload(FEW, repeats=100, state=state)) for state in State]

    def estimates(flush_s):
        monkeypatch.setattr(kernel_workload_kind, "FLUSH_SECONDS", flush_s)
        return {e.workload.state: kernel_workload_kind.KIND.estimate(e).seconds for e in arms}

    without, seconds = estimates(0.0), estimates(0.01)
    assert without[State.hot] > without[State.warm] > without[State.cold]
    wash_outs = without[State.hot] - without[State.cold]
    assert without[State.warm] - without[State.cold] == pytest.approx(wash_outs / 3)
    assert (seconds[State.hot], seconds[State.warm]) == (without[State.hot], without[State.warm])
    assert seconds[State.cold] - without[State.cold] == pytest.approx(100 * FEW.factor * 0.01)
    assert seconds[State.both] > seconds[State.cold]


def test_arms_with_another_repeat_factor_run_in_separate_processes():
    other = Case("few", decode=5, context=40, factor=4)
    arms = [experiment(make_workload(case)) for case in (FEW, other)]
    assert "factor" in kernel_workload_kind.KIND.apart(arms)


def test_the_warm_up_rule_matches_its_documentation():
    assert (kernel_arms.SETTLED_RATIO, kernel_arms.MAX_ROUNDS) == (0.98, 20)


def test_a_pilot_has_the_cost_and_the_noise_of_each_case_and_nothing_about_arms():
    world, noise = World(), random.Random(1)
    slow = Backend(world, lambda w: 4.0 * math.exp(noise.gauss(0, 0.1)))
    fast = Backend(world, lambda w: 2.0 * math.exp(noise.gauss(0, 0.1)))
    kernels = interleave_kernels(world, [slow, fast], FEW, LARGE, repeats=None)
    few, large = kernels.pilot(20_000.0)
    # A pulse and, of each arm, a wash-out and the launches that a turn times.
    launches = {"few": 4, "large": 2}
    for pilot in (few, large):
        assert pilot.round_s == pytest.approx(PULSE + launches[pilot.case] * 6.0, rel=0.1)
        assert pilot.warm_up_s > 3 * 6.0 and pilot.rounds == 200
    assert large.sd == pytest.approx(0.1 * math.sqrt(2), rel=0.3) and few.sd < large.sd
    assert {field.name for field in dataclasses.fields(few)} == {
        "case", "round_s", "warm_up_s", "sd", "rounds"
    }  # fmt: skip


def test_a_short_pilot_has_three_rounds_and_a_case_in_two_states_is_one():
    world = World()
    arms = [Backend(world, lambda w: 1.0), Backend(world, lambda w: 1.0)]
    (both,) = interleave_kernels(world, arms, FEW, state=State.both).pilot(0.0)
    (hot,) = interleave_kernels(world, arms, FEW, state=State.hot).pilot(0.0)
    assert (both.case, both.rounds, both.sd) == ("few", 3, 0.0)
    assert both.round_s > hot.round_s + 2 * FLUSH


@pytest.mark.parametrize(("arms", "sd"), [(1, 0.1 * math.sqrt(2)), (2, 0.1 * math.sqrt(2))])
def test_a_round_s_noise_is_that_of_a_ratio_and_outliers_do_not_count(arms, sd):
    times = np.random.default_rng(0).normal(0, 0.1, (arms, 400))
    times[:, :20] += 3.0 * np.arange(arms * 20).reshape(arms, 20)
    assert interleaved_kernels.round_sd(list(times)) == pytest.approx(sd, rel=0.15)
