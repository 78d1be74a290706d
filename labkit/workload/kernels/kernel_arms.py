"""Arms of a kernel workload, which share memory: planning and launching of their batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.config import Case, Precision, Workload
from labkit.workload.kernels import kernel_cases
from labkit.workload.kernels.kernel_cases import CaseGeometry
from labkit.workload.kernels.launch_timing import (
    Clock,
    KernelBatch,
    NumpyBatch,
    QueuedBatch,
    TimedLaunch,
)
from labkit.workload.workload_protocols import TurnContext

if TYPE_CHECKING:
    from labkit.engine.attention.paged_backend_base import PagedBackend
    from labkit.workload.kernels.mlx_device_queue import MlxLaunchQueue


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
                kinds.add(arm.make_backend().arrays)
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
        queue = self.queue if backend.arrays == "mlx" else None
        arrays = self.memory[backend.arrays].view(size, arm.workload)
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
