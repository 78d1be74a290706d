"""Timing of queued launches: a chain is timed as a whole and includes every launch."""

import random
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from kernel_stubs import StubBackend, make_workload, reported

from labkit.config import Attention, Case, Device, Precision, State
from labkit.engine import attention
from labkit.workload import device_availability
from labkit.workload.kernels import kernel_cases, launch_timing
from labkit.workload.kernels.interleaved_kernels import InterleavedKernels
from labkit.workload.kernels.kernel_arms import KernelArm
from labkit.workload.kernels.launch_timing import MlxLaunchQueue
from labkit.workload.workload_protocols import (
    InvalidOutput,
    StaleOutput,
    TurnContext,
    single_arm_context,
)

FEW = Case(name="few", decode=5, context=40, factor=3)
# Seconds.
DESCRIBE, PLAN, PREPARE, VIEW, EMPTY = 0.25, 11.0, 4.0, 100.0, 0.125


class World:
    """A clock that only the work moves, and everything that was done, in order."""

    def __init__(self):
        self.now, self.done = 0.0, []

    def clock(self):
        self.done.append("clock")
        return self.now

    def spend(self, what, seconds):
        self.now += seconds
        self.done.append(what)

    def pulse(self):
        self.done.append("pulse")

    def flush(self):
        self.done.append("flush")

    @contextmanager
    def enter(self, arm):
        yield


class Node:
    """A lazy array: what it waits for, what makes it, and how long that takes."""

    def __init__(self, world, needs=(), make=None, seconds=0.0, value=None):
        self.world, self.needs, self.make, self.seconds = world, needs, make, seconds
        self.value = value

    def __getitem__(self, key):
        return Node(self.world, [self], lambda v: v[key], VIEW)

    def reshape(self, shape):
        return Node(self.world, [self], lambda v: v.reshape(shape), VIEW)


class LaunchQueue:
    """Runs what is waited for, and no more; what does not wait for each other runs at once."""

    def __init__(self, world):
        self.world, self.waits, self.poisoned = world, [], []

    def put(self, array):
        return Node(self.world, value=np.array(array))

    def wait(self, arrays):
        depths = {}
        for array in arrays:
            self._depth(array, depths)
        for level in range(1, 1 + max(depths.values(), default=0)):
            nodes = [node for node, depth in depths.items() if depth == level]
            for node in nodes:
                node.value = node.make(*(need.value for need in node.needs))
            self.world.now += max(node.seconds for node in nodes)
        self.world.done.append(("wait", max(depths.values(), default=0)))

    def _depth(self, node, depths):
        if node.value is not None:
            return 0
        if node not in depths:
            depths[node] = 1 + max((self._depth(need, depths) for need in node.needs), default=0)
        return depths[node]

    def read(self, node):
        assert node.value is not None, "read before it was evaluated"
        return node.value

    def poison(self, like, count, alone):
        assert self.read(like).shape == (5, 4, 16)
        self.world.done.append((f"poison{', alone' * alone}", count))

    def empty(self, start):
        start = Node(self.world, value=np.zeros(1)) if start is None else start
        return Node(self.world, [start], lambda v: v + 1, EMPTY)


class Backend(StubBackend):
    """A lazy launch of ``seconds``; the host takes time to describe it, and to prepare a plan.

    ``fault(number, out)`` may change the output of the launch of that number in its chain.
    """

    arrays = "mlx"

    def __init__(self, world, seconds=2.0, fault=None):
        self.world, self.seconds, self.fault = world, seconds, fault
        self.stale, self.lost, self.seen = None, 0, set()

    def adopt(self, keys, values):
        super().adopt(keys, values)
        self.seen.update(id(pool.needs[0].needs[0]) for pool in self.pools)

    def plan(self, *, block_tables, seq_lens, cu_seqlens_q, total_q=None):
        self.world.spend("plan", PLAN)
        return SimpleNamespace(map_us=12.5, launched=[], prepared=False)

    def forward(self, layer, q, k, v, plan):
        assert layer == 0 and k is None and v is None
        self.world.spend("describe", DESCRIBE + (0 if plan.prepared else PREPARE))
        plan.prepared = True
        number = len(plan.launched)

        def make(q, keys, values):
            out = q * np.float32(0.5) + keys.ravel()[0]
            if self.fault is not None:
                self.fault(number, out)
            return out

        plan.launched.append(Node(self.world, [q, *self.pools], make, self.seconds))
        return plan.launched[-1]

    def pending(self, plan):
        return []

    def report(self, plan):
        ran = [node.value is not None for node in plan.launched]
        stale = not all(ran) or self.stale == len(ran)
        plan.launched = []
        stamp, launches = 6 if stale else 7, len(ran) - self.lost
        return reported({"kernel.decode": len(ran)}, launches=launches, stamp=stamp)


@pytest.fixture(autouse=True)
def chains_of_four(monkeypatch):
    monkeypatch.setattr(kernel_cases, "MAX_CHAIN_LENGTH", 4)


def interleave_kernels(world, *backends, queued=True, **changes):
    arms = [
        KernelArm("paged", lambda b=b: b, make_workload(FEW, **changes), 16, queued)
        for b in backends
    ]
    setting = TurnContext(3, random.Random(0), world.enter, world)
    queue = LaunchQueue(world)
    return InterleavedKernels(arms, setting, world.clock, lambda dtype: queue)


def measure_kernels(world, *backends, **changes):
    interleaved = interleave_kernels(world, *backends, **changes)
    interleaved.warm_up()
    world.done.clear()
    return interleaved.measure(lambda text: None)


def metrics(case):
    return {metric.name: metric.repeats for metric in case.metrics}


def test_a_chain_is_waited_for_once_and_divided_by_its_launches():
    world = World()
    (result,) = measure_kernels(world, Backend(world))
    (case,) = result.cases
    assert metrics(case) == {"dispatch_us": (2e6,) * 6, "single_us": (2e6,) * 6}
    assert [m.primary for m in case.metrics] == [True, False]
    assert case.notes["launches"] == 4
    assert case.notes["empty_us"] == case.notes["empty_single_us"] == [EMPTY * 1e6] * 6
    assert case.notes["host_us"] == DESCRIBE * 1e6
    # First launch, first chain, rounds of warming up, and six of wash-out, chain and one alone:
    # no view of the input is in any of them.
    assert result.notes["launch_s"] == 2.0 * (1 + 4 + case.notes["warm_up_rounds"] + 6 * 6)
    assert case.notes["counters"] == {"kernel.decode": 1}  # of one launch
    assert result.counters == {"engine.paged": 30, "kernel.decode": 30}


def test_slower_launches_and_the_extra_cost_of_a_single_launch_are_recorded():
    world = World()
    backend = Backend(world)
    wait = LaunchQueue.wait

    class Costly(LaunchQueue):
        def wait(self, arrays):
            world.now += 1.0  # to wait at all
            wait(self, arrays)

    arm = KernelArm("paged", lambda: backend, make_workload(FEW), 16, True)
    interleaved = InterleavedKernels(
        [arm],
        TurnContext(3, random.Random(0), world.enter, world),
        world.clock,
        lambda dtype: Costly(world),
    )
    interleaved.warm_up()
    (result,) = interleaved.measure(lambda text: None)
    (case,) = result.cases
    assert metrics(case) == {"dispatch_us": (2.25e6,) * 6, "single_us": (3e6,) * 6}
    assert case.notes["empty_us"] == [(EMPTY + 0.25) * 1e6] * 6
    assert case.notes["empty_single_us"] == [(EMPTY + 1) * 1e6] * 6


def test_the_order_of_calls_in_a_round():
    world = World()
    measure_kernels(world, Backend(world))
    pulse = ["clock", "pulse", "clock"]
    nothing = ["clock", ("wait", 4), "clock", "clock", ("wait", 1), "clock"]

    def launch(chain_length, poison=True):
        calls = ["clock", *["describe"] * chain_length, "clock", ("wait", chain_length), "clock"]
        return [("poison", chain_length), *calls] if poison else calls

    expected = pulse + nothing + launch(1, poison=False) + launch(4) + launch(1)
    assert world.done == expected * 6


def test_the_first_launches_find_nothing_but_nan():
    world = World()
    interleave_kernels(world, Backend(world)).warm_up()
    poison = [what for what in world.done if what[0].startswith("poison")]
    assert poison == [("poison, alone", 1), ("poison, alone", 4)]
    first, chain = (world.done.index(what) for what in poison)
    assert ("wait", 1) in world.done[first:chain] and world.done[chain + 1] == "clock"


def test_on_cold_caches_one_launch_is_timed():
    world = World()
    (result,) = measure_kernels(world, Backend(world), state=State.both)
    hot, cold = result.cases
    assert set(metrics(hot)) == {"dispatch_us", "single_us"}
    assert set(metrics(cold)) == {"dispatch_us"}
    assert (hot.notes["launches"], cold.notes["launches"]) == (4, 1)


def test_without_a_queue_a_call_is_timed_and_there_are_no_chains():
    world = World()
    (result,) = measure_kernels(world, Backend(world), queued=False)
    (case,) = result.cases
    assert metrics(case) == {"dispatch_us": ((2.0 + DESCRIBE) * 1e6,) * 6}
    assert not {"launches", "empty_us", "host_us"} & set(case.notes)
    assert case.notes["plan_us"] == PLAN * 1e6


def test_planning_counts_what_the_first_launch_prepares_and_no_launch():
    world = World()
    (result,) = measure_kernels(world, Backend(world))
    assert result.cases[0].notes["plan_us"] == (PLAN + PREPARE) * 1e6
    assert result.cases[0].notes["map_us"] == 12.5
    assert "plan" not in world.done, "while measuring"


def test_all_arms_share_input_arrays_and_the_host_keeps_no_copy():
    world = World()
    backends = Backend(world), Backend(world)
    interleaved = interleave_kernels(world, *backends)
    interleaved.warm_up()
    assert len(backends[0].seen) == 2 and backends[0].seen == backends[1].seen
    assert list(interleaved._arms.memory) == ["mlx"]
    one, other = interleaved.measure(lambda text: None)
    assert one.cases[0].outputs["digest"] == other.cases[0].outputs["digest"]
    assert not one.values
    interleaved.close()
    assert not interleaved._arms.memory


@pytest.mark.parametrize("launch", range(4))
def test_a_number_that_changes_in_any_launch_of_a_chain_is_refused(launch):
    world = World()
    backend = Backend(world)
    interleaved = interleave_kernels(world, backend)
    interleaved.warm_up()

    def wrong(number, out):
        if number == launch:
            out[2, 3, 15] = np.nextafter(out[2, 3, 15], np.float32(np.inf))

    backend.fault = wrong
    says = "output differs.* in 1 row.* token 2" if not launch else f"launch {launch + 1} "
    with pytest.raises(InvalidOutput, match=f"few: round 0.*{says}"):
        interleaved.measure(lambda text: None)


def test_nan_left_by_any_launch_of_a_chain_is_refused():
    def leaves(number, out):
        if number == 3:
            out[4, 1, 0] = np.nan

    world = World()
    with pytest.raises(InvalidOutput, match=r"first chain: the output has NaN, .* token 4, head 1"):
        interleave_kernels(world, Backend(world, fault=leaves)).warm_up()


def test_a_stale_stamp_in_a_chain_and_a_launch_that_did_not_run_are_refused():
    world = World()
    backend = Backend(world)
    backend.stale = 4
    with pytest.raises(StaleOutput, match="first chain: the kernel's stamp is 6, not 7"):
        interleave_kernels(world, backend).warm_up()
    backend = Backend(world)
    interleaved = interleave_kernels(world, backend)
    interleaved.warm_up()
    backend.lost = 1
    with pytest.raises(InvalidOutput, match="round 0, wash-out: 0 of 1 launches ran"):
        interleaved.measure(lambda text: None)


@pytest.mark.parametrize("lost", [1, -1], ids=["lost", "doubled"])
def test_a_chain_with_a_lost_or_a_second_launch_is_refused(lost):
    """Its time is divided by the requested number of launches."""
    world = World()

    class Unreliable(Backend):
        def report(self, plan):
            self.lost = lost if len(plan.launched) == 4 and armed else 0
            return super().report(plan)

    armed: list[bool] = []
    interleaved = interleave_kernels(world, Unreliable(world))
    interleaved.warm_up()
    armed.append(True)
    with pytest.raises(InvalidOutput, match=rf"few: round 0: {4 - lost} of 4 launches ran"):
        interleaved.measure(lambda text: None)


def test_chains_do_similar_work_in_every_case():
    batch = make_workload(FEW, num_heads=16, num_kv_heads=4, head_dim=128)

    def chain_length(**case):
        size = kernel_cases.geometry(Case(name="x", **case), batch, 16)
        return kernel_cases.chain_length(size, batch), kernel_cases.work(size, batch)

    assert chain_length(decode=1, context=16)[0] == kernel_cases.MAX_CHAIN_LENGTH
    number, work = chain_length(decode=1024, context=128)
    assert 1 < number <= kernel_cases.CHAIN_BYTES / work.bytes < number + 1
    number, work = chain_length(prefill=8, chunk=512)
    assert 1 < number <= kernel_cases.CHAIN_FLOPS / work.flops < number + 1
    assert chain_length(decode=1024, context=2048)[0] == 1


@pytest.mark.parametrize(
    ("gpu", "options", "queued"),
    [
        ("metal", {"device": Device.metal}, True),
        ("metal", {"device": Device.cuda}, False),
        ("metal", {"backend": "gather"}, True),
        ("metal", {}, False),
        ("metal", {"device": Device.emulated}, False),
        ("cuda", {"device": Device.cuda}, True),
        ("cuda", {"device": Device.metal}, False),
        ("cuda", {"backend": "gather"}, True),
        ("cuda", {}, False),
        (None, {"backend": "gather"}, False),
        (None, {"device": Device.emulated}, False),
    ],
)
def test_only_a_gpu_has_a_queue(monkeypatch, gpu, options, queued):
    monkeypatch.setattr(device_availability, "mlx_gpu", lambda: gpu)
    assert device_availability.queued(Attention(**options)) is queued


# ------------------------------------------------------------------ on MLX, which is lazy


def gather():
    return attention.create(backend="gather")


def on_mlx(queue=MlxLaunchQueue, make=gather, queued=True, **changes):
    arm = KernelArm("paged", make, make_workload(FEW, **changes), 16, queued)
    interleaved = InterleavedKernels([arm], single_arm_context(seed=3), make_queue=queue)
    interleaved.warm_up()
    return interleaved


def test_mlx_evaluates_a_chain_at_once_and_every_launch_of_it(monkeypatch):
    import mlx.core as mx

    interleaved = on_mlx()
    evaluate, calls = mx.eval, []
    monkeypatch.setattr(mx, "eval", lambda *arrays: (calls.append(len(arrays)), evaluate(*arrays)))
    (batch,) = [arm.prepared.batch for case in interleaved._cases for arm in case.arms]
    launch = batch.launch(iter(range(9)).__next__, "a chain", 4)
    assert calls == [4 + 2]  # outputs and pools
    assert launch.seconds == 0.25 and launch.report.launches == 4
    assert len({out.tobytes() for out in launch.outputs}) == 4
    # Each attended with the one before as its queries, as the reference does.
    reference = attention.create(backend="reference")
    arrays = batch.arrays
    reference.adopt(*([np.asarray(pool)] for pool in (arrays.k_pool, arrays.v_pool)))
    reference.bind(0, scale=0.25, heads=4)
    plan = reference.plan(
        block_tables=batch.plan.block_tables,
        seq_lens=batch.plan.seq_lens,
        cu_seqlens_q=batch.plan.cu_seqlens_q,
    )
    q = np.asarray(arrays.q)
    for out in launch.outputs:
        q = reference.forward(0, q, None, None, plan)
        np.testing.assert_allclose(out, q, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", list(Precision))
def test_on_mlx_every_type_is_chained_and_read_as_it_is_stored(dtype):
    interleaved = on_mlx(queue=MlxLaunchQueue, dtype=dtype)
    (result,) = interleaved.measure(lambda text: None)
    (case,) = result.cases
    assert case.notes["launches"] == 4 and len(case.metrics) == 2
    assert case.outputs["dtype"] == dtype.value
    reference = on_mlx(make=lambda: attention.create(backend="reference"), dtype=dtype)
    (expected,) = reference.measure(lambda text: None)
    assert expected.cases[0].outputs["dtype"] == "float32"
    allowed = {"float32": 1e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype.value]
    (values,), (others,) = result.values.values(), expected.values.values()
    off = np.abs(values - others).max()
    assert off / np.abs(others).max() <= allowed
    if dtype is not Precision.float32:
        assert off > 1e-5, "computed in float32"


def test_on_mlx_inputs_are_evaluated_before_and_no_pool_is_copied():
    import mlx.core as mx

    large = make_workload(Case(name="large", decode=8, context=4096))
    arm = KernelArm("paged", gather, large, 16, True)
    before = mx.get_active_memory()
    interleaved = InterleavedKernels([arm], single_arm_context(seed=3), make_queue=MlxLaunchQueue)
    (size,) = [kernel_cases.geometry(case, large, 16) for case in large.cases]
    batches = [interleaved._arms.plan(arm, case) for case in large.cases for _ in range(3)]
    active_bytes = mx.get_active_memory() - before
    assert size.pool_bytes <= active_bytes < 1.1 * size.pool_bytes
    del batches


def place(array):
    return np.asarray(array).__array_interface__["data"][0]


@pytest.mark.parametrize("alone", [True, False])
def test_on_mlx_outputs_are_given_memory_that_holds_nan(monkeypatch, alone):
    import mlx.core as mx

    queue = MlxLaunchQueue()
    like = queue.put(np.ones((64, 16, 128), np.float32))
    mx.clear_cache()
    earlier = [queue.put(np.ones((64, 16, 128), np.float32)) for _ in range(30 if alone else 5)]
    del earlier  # their memory is kept for reuse
    evaluate, poisoned = mx.eval, set()

    def watched(arrays):
        evaluate(arrays)
        assert all(np.isnan(np.asarray(array)).all() for array in arrays)
        poisoned.update(map(place, arrays))

    monkeypatch.setattr(mx, "eval", watched)
    queue.poison(like, 4, alone)
    monkeypatch.undo()
    outs = [like]
    for _ in range(4):
        outs.append(mx.sin(outs[-1]))
    queue.wait(outs)
    assert {place(out) for out in outs[1:]} <= poisoned
    assert len(poisoned) == (4 if alone else 8)


def test_the_emulator_runs_a_launch_when_it_is_called(monkeypatch):
    from labkit.metal.emulator import EmulatorUnavailable
    from labkit.metal.emulator.cpp_compilation import find_compiler

    try:
        find_compiler()
    except EmulatorUnavailable as error:
        pytest.skip(str(error))
    options = {"head_dim": 64, "repeats": 1, "warmup": 0}
    interleaved = on_mlx(make=lambda: attention.create(device="emulated"), queued=False, **options)
    (result,) = interleaved.measure(lambda text: None)
    (case,) = result.cases
    assert case.notes["plan_us"] > 0 and "launches" not in case.notes
    assert [m.name for m in case.metrics] == ["dispatch_us"]
    on_cpu = on_mlx(make=lambda: attention.create(), queued=False, **options)
    (expected,) = on_cpu.measure(lambda text: None)
    (values,), (others,) = result.values.values(), expected.values.values()
    np.testing.assert_allclose(values, others, rtol=0, atol=1e-5)
    assert launch_timing.TIMED_PLANS > 1
