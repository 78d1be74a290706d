"""The arms of a kernel workload, which share memory: they plan, launch and warm up batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.config import Case, Precision, State, Workload
from labkit.workload.kernels import kernel_cases
from labkit.workload.kernels.kernel_case_samples import (
    ArmSamples,
    CaseRounds,
    ExpectedOutput,
    PreparedArm,
    equal_bits,
    refuse_nan,
    sha256_of,
)
from labkit.workload.kernels.kernel_cases import CaseGeometry, scaled_case, washout_share
from labkit.workload.kernels.launch_timing import (
    Clock,
    KernelBatch,
    MlxLaunchQueue,
    NumpyBatch,
    QueuedBatch,
    TimedLaunch,
)
from labkit.workload.output_digest import array_outputs
from labkit.workload.workload_protocols import TurnContext

if TYPE_CHECKING:
    from labkit.engine.attention.paged_backend_base import PagedBackend

SETTLED_RATIO = 0.98  # times have settled if a round takes at least this share of the fastest
MAX_ROUNDS = 20


@dataclass(frozen=True)
class KernelArm:
    """One arm: an attention operation and its workload.

    ``engine``: name of the engine that the operation belongs to. Launches are counted under this
    name, because every arm claims that its engine ran. ``make_backend``: returns a new backend;
    every batch has a backend of its own.
    ``block_size``: tokens in a KV block. ``queued``: whether the device has a queue.
    """

    engine: str
    make_backend: Callable[[], PagedBackend]
    workload: Workload
    block_size: int
    queued: bool = False

    def geometry(self, case: Case) -> CaseGeometry:
        return kernel_cases.geometry(case, self.workload, self.block_size)

    def case(self, name: str) -> Case | None:
        """Return the arm's case of this name, or None if the arm lacks or skips it."""
        case = next((case for case in self.workload.cases if case.name == name), None)
        if case is None or kernel_cases.skip_reason(self.geometry(case), self.workload):
            return None
        return case


class KernelArms:
    """The arms of one process, which share queries and KV memory of one element type.

    ``arms``: in the cell's order; not empty. ``context``: its seed is that of the inputs and block
    tables. ``make_queue``: returns the launch queue for an element type; called if an arm works on
    lazy MLX arrays. ``launch_s``: seconds spent in launches so far, by arm.

    In the warm-up every arm launches each case once for its output. Then rounds of wash-out
    launches follow until a round improves on the fastest earlier round by at most 2 %. There are at
    least ``1 + workload.warmup`` rounds, and at most 20 unless this minimum is larger.
    """

    def __init__(
        self,
        arms: Sequence[KernelArm],
        context: TurnContext,
        clock: Clock,
        make_queue: Callable[[Precision], MlxLaunchQueue],
    ) -> None:
        self.arms = tuple(arms)
        self.launch_s = [0.0] * len(arms)
        self.context = context
        self.clock = clock
        sizes = [(arm, arm.geometry(case)) for arm in arms for case in arm.workload.cases]
        runnable = [
            (arm, size) for arm, size in sizes if not kernel_cases.skip_reason(size, arm.workload)
        ]
        kinds: set[str] = set()
        for index, arm in enumerate(arms):
            with context.turn(index):
                kinds.add(_array_kind(arm.make_backend()))
        dtype = arms[0].workload.dtype
        self.queue = make_queue(dtype) if "mlx" in kinds else None
        memory = kernel_cases.allocate(
            max(size.pool_bytes for _, size in runnable),
            max(kernel_cases.query_elements(size, arm.workload) for arm, size in runnable),
            context.seed,
            dtype,
        )
        # By the kind of array (``numpy``, ``mlx``) that an arm reads.
        self.memory = {"numpy": memory.widened()} if "numpy" in kinds else {}
        if self.queue is not None:
            self.memory["mlx"] = memory.moved(self.queue.put)
        # Planning now raises the errors of bad maps early and compiles the code that builds maps.
        for index, arm in enumerate(arms):
            with context.turn(index):
                for size in (size for other, size in runnable if other is arm):
                    self.plan(arm, size.case)

    def case_names(self) -> list[str]:
        """Return the names of all arms' cases without duplicates, in the order of the arms."""
        names = (case.name for arm in self.arms for case in arm.workload.cases)
        return list(dict.fromkeys(names))

    def plan(self, arm: KernelArm, case: Case) -> KernelBatch:
        """Plan one arm's batch of a case, on a backend of its own."""
        size = arm.geometry(case)
        backend = arm.make_backend()
        kind = _array_kind(backend)
        queue = self.queue if kind == "mlx" else None
        arrays = self.memory[kind].view(size, arm.workload)
        if queue is not None:
            queue.wait([arrays.q, arrays.k_pool, arrays.v_pool])
        backend.adopt([arrays.k_pool], [arrays.v_pool])
        scale, heads = 1 / math.sqrt(arm.workload.head_dim), arm.workload.num_heads
        backend.bind(0, scale=scale, heads=heads, window=arm.workload.window)
        make_plan = partial(backend.plan, **self._plan_arguments(size))
        parts = (backend, arm.workload, size, arrays, make_plan(), make_plan)
        if queue is None:
            return NumpyBatch(*parts)
        chain_length = kernel_cases.chain_length(size, arm.workload) if arm.queued else 1
        return QueuedBatch(*parts, chain_length, arm.queued, queue=queue)

    def _plan_arguments(self, size: CaseGeometry) -> dict[str, Any]:
        starts = np.zeros(len(size.query_lens) + 1, np.int32)
        np.cumsum(size.query_lens, out=starts[1:])
        tables = kernel_cases.block_tables(size, self.context.seed)
        return {"block_tables": tables, "seq_lens": size.seq_lens, "cu_seqlens_q": starts}

    def launch(
        self, arm: int, batch: KernelBatch, launch_name: str, chain_length: int = 1
    ) -> TimedLaunch:
        """Launch a batch and add its time to the arm's ``launch_s``. Call it in the arm's turn."""
        launch = batch.launch(self.clock, launch_name, chain_length)
        self.launch_s[arm] += launch.seconds * chain_length
        return launch

    def compile(self, case_names: Sequence[str]) -> None:
        """Launch every arm once on each of the named cases, which compiles all kernels."""
        for name in case_names:
            for prepared in self._prepare(name):
                self._same_kernel(prepared)

    def warm_up(self) -> Iterator[CaseRounds]:
        """Warm up all cases in order, and yield each case once per state of the caches."""
        for name in self.case_names():
            prepared = self._prepare(name)
            if not prepared:
                continue
            if not all([self._same_kernel(arm) for arm in prepared]):  # every arm launches once
                prepared = [replace(arm, washout=arm.batch) for arm in prepared]
            rounds = self._settle(prepared)
            workload = self.arms[prepared[0].arm].workload
            case = prepared[0].batch.size.case
            for state in cache_states(workload.state, len(prepared)):
                label = f"{name} ({state.value})" if workload.state is State.both else name
                samples = [ArmSamples(arm, arm.report) for arm in prepared]
                yield CaseRounds(label, state, workload.num_repeats * case.factor, samples, rounds)

    def _prepare(self, name: str) -> list[PreparedArm]:
        """Prepare the arms that run a case, in random order."""
        expected: list[ExpectedOutput] = []
        order = list(enumerate(self.arms))
        self.context.order.shuffle(order)
        return [
            self._prepare_arm(index, case, expected)
            for index, arm in order
            if (case := arm.case(name)) is not None
        ]

    def _prepare_arm(self, index: int, case: Case, expected: list[ExpectedOutput]) -> PreparedArm:
        """Plan an arm's batch and its wash-out, and launch the batch for its outputs.

        ``expected``: outputs of the arms prepared before. This arm's output is appended if it
        differs from all of them.
        """
        arm = self.arms[index]
        with self.context.turn(index):
            batch = self.plan(arm, case)
            share = washout_share(batch.size, arm.workload)
            washout = batch if share == 1 else self.plan(arm, scaled_case(case, share))
            plan_s, map_us = batch.planning_times(self.clock)
            batch.poison(first=True)
            first = self.launch(index, batch, "the first launch")
            (out,) = first.outputs
            refuse_nan(out, f"{case.name}: the first launch")
            match = next((e for e in expected if equal_bits(e.out, out)), None)
            if match is None:
                match = ExpectedOutput(out.copy(), array_outputs(out, batch.dtype.value))
                expected.append(match)
            prepared = PreparedArm(index, batch, washout, match, (), plan_s, map_us, first.report)
            return replace(prepared, chain_digests=self._first_chain(prepared))

    def _first_chain(self, prepared: PreparedArm) -> tuple[bytes, ...]:
        """Launch the first chain, if chains are timed, and return the digests of its outputs."""
        length, launch_name = prepared.batch.chain_length, "the first chain"
        if length == 1:
            return ()
        prepared.batch.poison(length, first=True)
        launch = self.launch(prepared.arm, prepared.batch, launch_name, length)
        for out in launch.outputs:
            refuse_nan(out, f"{prepared.batch.size.case.name}: {launch_name}")
        return tuple(map(sha256_of, launch.outputs))

    def _same_kernel(self, prepared: PreparedArm) -> bool:
        """Return whether wash-out and batch launch the same kernel with the same partitions."""
        if prepared.washout is prepared.batch:
            return True
        with self.context.turn(prepared.arm):
            washout = self.launch(prepared.arm, prepared.washout, "a wash-out").report
        batch = prepared.report
        return (washout.kernel, washout.partitions) == (batch.kernel, batch.partitions)

    def _settle(self, prepared: Sequence[PreparedArm]) -> int:
        """Run rounds of wash-out launches until their times settle; return the number of rounds."""
        min_rounds = 1 + max(self.arms[arm.arm].workload.warmup for arm in prepared)
        max_rounds = max(min_rounds, MAX_ROUNDS)
        fastest = math.inf
        for number in range(1, max_rounds + 1):
            total = 0.0
            for arm in prepared:
                with self.context.turn(arm.arm):
                    total += self.launch(arm.arm, arm.washout, f"warm-up {number}").seconds
            if number >= min_rounds and total >= SETTLED_RATIO * fastest:
                return number
            fastest = min(fastest, total)
        return max_rounds


def _array_kind(backend: PagedBackend) -> str:
    """Return the kind of arrays that a backend gets: NumPy's if it takes any."""
    return "mlx" if backend.arrays == "mlx" else "numpy"


def cache_states(state: State, arms: int) -> tuple[State, ...]:
    """Return the states of the caches that ``workload.state`` asks for, with so many arms.

    A single arm's launches follow its own, so its caches are hot.
    """
    if state is State.both:
        return State.hot, State.cold
    return (State.hot if state is State.warm and arms == 1 else state,)
