"""Batches that can be launched, and the timing of a launch.

On NumPy arrays and in the emulator a launch runs when it is called, and one launch is timed. A
device with a queue first takes the description of launches and runs them when the host waits.
There a *chain* is timed: launches that the host waits for together, each of which takes the
output of the one before as its queries, as the layers of a model do. So the device can neither
skip a launch nor run two at once. The time is divided by the number of launches and excludes
the host's work of describing them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from labkit.config import Precision, Workload
from labkit.workload import kernel_cases
from labkit.workload.kernel_cases import Arrays, CaseGeometry
from labkit.workload.measurement import InvalidOutput, StaleOutput

if TYPE_CHECKING:
    from labkit.engine.attention.attention_metadata import AttentionMetadata
    from labkit.engine.attention.launch_report import LaunchReport
    from labkit.engine.attention.paged_backend import PagedBackend

Clock = Callable[[], float]
TIMED_PLANS = 5  # the median counts


class LaunchQueue(Protocol):
    """A device with lazy arrays; NumPy arrays have the types of ``NUMPY_DTYPES``."""

    def put(self, array: NDArray[Any]) -> Any:
        """Copy an array to the device; return when it is there."""

    def wait(self, arrays: Sequence[Any]) -> None:
        """Evaluate arrays in one call."""

    def read(self, array: Any) -> NDArray[Any]:
        """Return an evaluated array as a NumPy array, a view if possible."""

    def poison(self, like: Any, count: int, alone: bool) -> None:
        """Leave NaN in the memory that the next ``count`` arrays like this one will use.

        ``alone``: drop all other memory kept for reuse, so that this is certain; else likely.
        """

    def empty(self, start: Any) -> Any:
        """Return a lazy launch that does nothing; it waits for ``start`` unless that is None."""


@dataclass(frozen=True)
class TimedLaunch:
    """One timed launch, or the timing of a chain divided by its length.

    ``seconds``: time of one launch. ``host_s``: time the host took to describe it; 0 where it
    is part of ``seconds``. ``report``: of all launches. ``outputs``: [tokens, heads, head_dim],
    one of each launch.
    """

    seconds: float
    host_s: float
    report: LaunchReport
    outputs: tuple[NDArray[Any], ...]


@dataclass(frozen=True)
class KernelBatch:
    """A batch of given geometry, planned on a backend of its own over the shared memory.

    ``make_plan``: plans the batch again. ``chain_length``: launches in a chain; 1: no chain.
    ``queued``: whether a call only describes a launch, which runs when the host waits.
    """

    attention: PagedBackend
    workload: Workload
    size: CaseGeometry
    arrays: Arrays
    plan: AttentionMetadata
    make_plan: Callable[[], AttentionMetadata]
    chain_length: int = 1
    queued: bool = False

    @property
    def dtype(self) -> Precision:
        """Element type of the outputs."""
        raise NotImplementedError

    @property
    def timed_launches(self) -> int:
        """Launches of a turn on hot caches that are timed; the fastest counts."""
        return 1

    def poison(self, chain_length: int = 1, first: bool = False) -> None:
        """Fill the outputs of the next launches with NaN.

        On a queue this is certain for the ``first`` launch and likely for the others, whose
        outputs must equal the first bit for bit.
        """
        raise NotImplementedError

    def launch(self, clock: Clock, launch_name: str, chain_length: int = 1) -> TimedLaunch:
        """Time one launch or a chain.

        Raises
        ------
        StaleOutput
            A stamp is not the one expected of its launch.
        InvalidOutput
            The output is not in the array given for it, or not every launch ran.
        """
        raise NotImplementedError

    def planning_times(self, clock: Clock) -> tuple[float, float]:
        """Return the median time to plan (seconds) and to build the maps in it (microseconds)."""
        times, maps = zip(*(self._plan_once(clock) for _ in range(TIMED_PLANS)), strict=True)
        return statistics.median(times), statistics.median(maps)

    def _plan_once(self, clock: Clock) -> tuple[float, float]:
        start = clock()
        plan = self.make_plan()
        return clock() - start, plan.map_us

    def _report(self, where: str, chain_length: int) -> LaunchReport:
        """Return the report of all launches since the last; check that none is stale or missing."""
        (report,) = self.attention.report(self.plan)
        if report.stale:
            raise StaleOutput(
                f"{where}: the kernel's stamp is {report.stamp}, expected {report.expected_stamp}"
            )
        if report.launches != chain_length:
            raise InvalidOutput(f"{where}: {report.launches} of {chain_length} launches ran")
        return report


class NumpyBatch(KernelBatch):
    """A batch on NumPy arrays: launches run when they are called, one at a time.

    It computes in float32, whatever type the inputs were rounded to.
    """

    dtype = Precision.float32

    @cached_property
    def timed_launches(self) -> int:
        """See ``kernel_cases.timed_launches``."""
        return kernel_cases.timed_launches(self.size, self.workload)

    def poison(self, chain_length: int = 1, first: bool = False) -> None:
        """Fill the output with NaN."""
        self.arrays.out.fill(np.nan)

    def launch(self, clock: Clock, launch_name: str, chain_length: int = 1) -> TimedLaunch:
        """Launch once; see ``KernelBatch``."""
        arrays = self.arrays
        start = clock()
        out = self.attention.forward(0, arrays.q, None, None, self.plan, arrays.out)
        seconds = clock() - start
        where = f"{self.size.case.name}: {launch_name}"
        report = self._report(where, chain_length)
        if not np.shares_memory(out, arrays.out):
            raise InvalidOutput(f"{where}: the output was not written where it was asked for")
        return TimedLaunch(seconds, 0.0, report, (arrays.out,))


@dataclass(frozen=True, kw_only=True)
class QueuedBatch(KernelBatch):
    """A batch on lazy arrays; if it is not ``queued``, as in the emulator, the call is timed."""

    queue: LaunchQueue

    @property
    def dtype(self) -> Precision:
        """The workload's element type."""
        return self.workload.dtype

    def poison(self, chain_length: int = 1, first: bool = False) -> None:
        """Leave NaN where the next outputs will lie; see ``KernelBatch``."""
        self.queue.poison(self.arrays.q, chain_length, alone=first)

    def launch(self, clock: Clock, launch_name: str, chain_length: int = 1) -> TimedLaunch:
        """Launch a chain; see ``KernelBatch``."""
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
        """Include what the first launch prepares for the following ones: arrays on the device."""
        if not self.queued:
            return super()._plan_once(clock)
        start = clock()
        plan = self.make_plan()
        self._chain(plan, 1)
        first = clock()
        self._chain(plan, 1)
        second_s = clock() - first
        return max(0.0, first - start - second_s), plan.map_us


def empty_chain(queue: LaunchQueue, clock: Clock, chain_length: int) -> float:
    """Return the seconds of one of ``chain_length`` empty launches, each waiting for the last."""
    last = None
    for _ in range(chain_length):
        last = queue.empty(last)
    start = clock()
    queue.wait([last])
    return (clock() - start) / chain_length
