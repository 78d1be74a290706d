"""Batches that can be launched, and the timing of a launch.

On NumPy arrays and in the emulator, a launch runs when it is called, and one launch is timed. On
a device with a queue, the host first describes launches; they run when the host waits for them.
There a *chain* is timed: several launches that the host waits for together. Each takes the output
of the previous launch as its queries, as the layers of a model do, so the device can neither skip
a launch nor run two launches in parallel. The time is divided by the number of launches and
excludes the host's work of describing them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from labkit.config import Precision, Workload
from labkit.workload.kernels import kernel_cases
from labkit.workload.kernels.kernel_cases import CaseGeometry, KernelMemory
from labkit.workload.workload_protocols import InvalidOutput, StaleOutput

if TYPE_CHECKING:
    from labkit.engine.attention.attention_metadata import AttentionMetadata
    from labkit.engine.attention.launch_evidence import LaunchReport
    from labkit.engine.attention.paged_backend_base import PagedBackend

Clock = Callable[[], float]
TIMED_PLANS = 5  # how often planning is timed; the median counts
EXTRA_ARRAYS = 4  # other live arrays of the outputs' size, besides the chain's outputs


class MlxLaunchQueue:
    """MLX's default device, for one element type: a device with lazy arrays.

    bfloat16 is uint16 in NumPy (``kv_dtypes.NUMPY_DTYPES``).
    """

    def __init__(self, dtype: Precision = Precision.float32) -> None:
        import mlx.core as mx

        self._mx = mx
        self._is_bfloat16 = dtype is Precision.bfloat16

    def put(self, stored: NDArray[Any]) -> Any:
        """Copy an array to the device and wait until the copy is complete."""
        array = self._mx.array(stored)
        copied = array.view(self._mx.bfloat16) if self._is_bfloat16 else array
        self._mx.eval(copied)
        return copied

    def wait(self, arrays: Sequence[Any]) -> None:
        self._mx.eval(*arrays)

    def read(self, array: Any) -> NDArray[Any]:
        """Return an evaluated array as a NumPy view of its memory."""
        return np.asarray(array.view(self._mx.uint16) if self._is_bfloat16 else array)

    def poison(self, like: Any, count: int, alone: bool) -> None:
        """Leave NaN in the memory that the next ``count`` arrays of the shape of ``like`` will use.

        Arrays of NaN are filled and freed. Filling the outputs themselves (``init_value``) would
        add a launch to the measured time. MLX may also reuse the memory of earlier outputs, so a
        few more arrays are filled. The reuse is certain only after the cache was cleared
        (``alone``), but then the next launch must allocate all its other memory anew.
        """
        if alone:
            self._mx.clear_cache()
        arrays = range(count + EXTRA_ARRAYS * (not alone))
        self._mx.eval([self._mx.full(like.shape, float("nan"), like.dtype) for _ in arrays])

    def empty(self, start: Any) -> Any:
        """Return a lazy launch of one thread: ``start`` (zero if None) plus one."""
        if start is None:
            start = self._mx.zeros(1)
            self._mx.eval(start)
        return start + 1


@dataclass(frozen=True)
class TimedLaunch:
    """One timed launch, or the timing of a chain divided by its length.

    ``seconds``: time of one launch. ``host_s``: time the host took to describe one launch; 0 if
    that time is part of ``seconds``. ``report``: the report of all launches. ``outputs``: one
    array [tokens, heads, head_dim] per launch.
    """

    seconds: float
    host_s: float
    report: LaunchReport
    outputs: tuple[NDArray[Any], ...]


@dataclass(frozen=True)
class KernelBatch:
    """The batch of one case, planned for the backend of one arm. The arms share inputs and pools.

    ``make_plan``: plans the batch again. ``chain_length``: launches in a chain; 1: no chain.
    ``queued``: whether a call only describes a launch, which runs when the host waits.
    """

    attention: PagedBackend
    workload: Workload
    size: CaseGeometry
    arrays: KernelMemory
    plan: AttentionMetadata
    make_plan: Callable[[], AttentionMetadata]
    chain_length: int = 1
    queued: bool = False

    @property
    def dtype(self) -> Precision:
        raise NotImplementedError

    @property
    def timed_launches(self) -> int:
        """Number of timed launches in a turn, if caches are not cold; the fastest counts."""
        return 1

    def poison(self, chain_length: int = 1, first: bool = False) -> None:
        """Fill the outputs of the next launches with NaN.

        On a device with a queue, only with ``first`` is it certain that the outputs use the
        poisoned memory. For later launches it is probable, and their outputs must equal the
        first launch's bit for bit.
        """
        raise NotImplementedError

    def launch(self, clock: Clock, launch_name: str, chain_length: int = 1) -> TimedLaunch:
        """Time one launch or a chain.

        Raises ``StaleOutput`` if the stamp that a kernel wrote is not the stamp of this launch.
        Raises ``InvalidOutput`` if the output is not in the array passed for it, or not every
        launch ran.
        """
        raise NotImplementedError

    def planning_times(self, clock: Clock) -> tuple[float, float]:
        """Return the median times of planning (seconds) and of building the maps (us).

        The resolver's maps are built during planning, so the first time includes the second.
        """
        times, maps = zip(*(self._plan_once(clock) for _ in range(TIMED_PLANS)), strict=True)
        return statistics.median(times), statistics.median(maps)

    def _plan_once(self, clock: Clock) -> tuple[float, float]:
        start = clock()
        plan = self.make_plan()
        return clock() - start, plan.map_us

    def _report(self, where: str, chain_length: int) -> LaunchReport:
        """Return the report since the last, or raise if a launch is stale or missing."""
        (report,) = self.attention.report(self.plan)
        if report.stale:
            raise StaleOutput(
                f"{where}: the kernel's stamp is {report.stamp}, not {report.expected_stamp}, so "
                "its output may be stale"
            )
        if report.launches != chain_length:
            raise InvalidOutput(f"{where}: {report.launches} of {chain_length} launches ran")
        return report


class NumpyBatch(KernelBatch):
    """A batch on NumPy arrays. A launch runs when it is called; there are no chains.

    All kernels compute in float32, even if the inputs were rounded to another type.
    """

    dtype = Precision.float32

    @cached_property
    def timed_launches(self) -> int:
        return kernel_cases.timed_launches(self.size, self.workload)

    def poison(self, chain_length: int = 1, first: bool = False) -> None:
        self.arrays.out.fill(np.nan)

    def launch(self, clock: Clock, launch_name: str, chain_length: int = 1) -> TimedLaunch:
        arrays = self.arrays
        start = clock()
        out = self.attention.forward(0, arrays.q, None, None, self.plan, arrays.out)
        seconds = clock() - start
        where = f"{self.size.case.name}: {launch_name}"
        report = self._report(where, chain_length)
        if not np.shares_memory(out, arrays.out):
            raise InvalidOutput(f"{where}: the output was not written to the given array")
        return TimedLaunch(seconds, 0.0, report, (arrays.out,))


@dataclass(frozen=True, kw_only=True)
class QueuedBatch(KernelBatch):
    """A batch on lazy arrays. On a device without a queue the call itself is timed as well."""

    queue: MlxLaunchQueue

    @property
    def dtype(self) -> Precision:
        return self.workload.dtype

    def poison(self, chain_length: int = 1, first: bool = False) -> None:
        self.queue.poison(self.arrays.q, chain_length, alone=first)

    def launch(self, clock: Clock, launch_name: str, chain_length: int = 1) -> TimedLaunch:
        start = clock()
        outs = self._chain(self.plan, chain_length)
        waiting = [*outs, *self.attention.pending(self.plan)]
        described = clock()
        self.queue.wait(waiting)
        done = clock()
        report = self._report(f"{self.size.case.name}: {launch_name}", chain_length)
        outputs = tuple(self.queue.read(out) for out in outs)
        if not self.queued:
            return TimedLaunch((done - start) / chain_length, 0.0, report, outputs)
        return TimedLaunch(
            (done - described) / chain_length, (described - start) / chain_length, report, outputs
        )

    def _chain(self, plan: AttentionMetadata, chain_length: int) -> list[Any]:
        outs: list[Any] = []
        for _ in range(chain_length):
            q = outs[-1] if outs else self.arrays.q
            outs.append(self.attention.forward(0, q, None, None, plan))
        return outs

    def _plan_once(self, clock: Clock) -> tuple[float, float]:
        """Return the times of planning (seconds) and of building the maps (microseconds).

        Planning includes the preparation of arrays on the device. The host prepares them while it
        describes the plan's first launch. So the planning time is that of the plan and the first
        description together, minus the time of the second description.
        """
        if not self.queued:
            return super()._plan_once(clock)
        start = clock()
        plan = self.make_plan()
        self._chain(plan, 1)
        first = clock()
        self._chain(plan, 1)
        second_s = clock() - first
        return max(0.0, first - start - second_s), plan.map_us


def empty_chain(queue: MlxLaunchQueue, clock: Clock, chain_length: int) -> float:
    """Return the seconds per launch of a chain of ``chain_length`` empty launches."""
    last = queue.empty(None)
    for _ in range(chain_length - 1):
        last = queue.empty(last)
    start = clock()
    queue.wait([last])
    return (clock() - start) / chain_length
