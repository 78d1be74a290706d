"""A batch that can be launched, and what one timing of it is.

On NumPy arrays, and in the emulator, a launch runs when it is called, and a timing is that of
one launch. A device with a queue is told of launches first and runs them when they are waited
for. There a timing is that of a *chain*: launches that are waited for together, each attending
with the output of the one before as its queries, as the layers of a model do. So none of them
can be left out or run beside another. The time is divided by their number, and what the host
does to describe them is not in it.
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
from labkit.workload.kernel_cases import Arrays, Geometry
from labkit.workload.measurement import InvalidOutput, StaleOutput

if TYPE_CHECKING:
    from labkit.engine.attention.attention_metadata import AttentionMetadata
    from labkit.engine.attention.launch_report import LaunchReport
    from labkit.engine.attention.paged_backend import PagedBackend

Clock = Callable[[], float]
PLANS = 5  # of which the median is taken


class Queue(Protocol):
    """Arrays that may be lazy, and where they are evaluated; NumPy's as ``NUMPY_DTYPES``."""

    def put(self, array: NDArray[Any]) -> Any:
        """Copy an array to the device; it lies there when this returns."""

    def wait(self, arrays: Sequence[Any]) -> None:
        """Evaluate arrays, all in one."""

    def read(self, array: Any) -> NDArray[Any]:
        """Return an evaluated array as NumPy's, a view where that can be."""

    def poison(self, like: Any, count: int, alone: bool) -> None:
        """Leave NaN in the memory that so many arrays like this one will be given.

        ``alone``: no other memory is kept for reuse, so that it is certain; else likely.
        """

    def empty(self, start: Any) -> Any:
        """Return the smallest launch there is, lazy; it waits for ``start``, None: for none."""


@dataclass(frozen=True)
class Launch:
    """One timing.

    ``seconds``, ``host_s``: of one launch, where a chain was timed its share: what the launch
    took, and what the host took to describe it where that is apart (else 0). ``report``: of
    all launches. ``outputs``: [tokens, heads, head_dim], one of each launch.
    """

    seconds: float
    host_s: float
    report: LaunchReport
    outputs: tuple[NDArray[Any], ...]


@dataclass(frozen=True)
class Batch:
    """A batch of given geometry, planned on a backend of its own over the shared memory.

    ``make_plan``: plans the batch once more. ``links``: launches in a chain; 1: no chain.
    ``queued``: whether a call only describes a launch, which runs when it is waited for.
    """

    attention: PagedBackend
    workload: Workload
    size: Geometry
    arrays: Arrays
    plan: AttentionMetadata
    make_plan: Callable[[], AttentionMetadata]
    links: int = 1
    queued: bool = False

    @property
    def dtype(self) -> Precision:
        """What the numbers of the outputs are."""
        raise NotImplementedError

    @property
    def timed(self) -> int:
        """How many launches of a turn on hot caches are timed, of which the fastest counts."""
        return 1

    def poison(self, links: int = 1, first: bool = False) -> None:
        """Fill what the next launches write with NaN.

        On a queue it is certain for the ``first`` of all and likely for the others, whose
        outputs must be the bits of the first.
        """
        raise NotImplementedError

    def launch(self, clock: Clock, which: str, links: int = 1) -> Launch:
        """Launch, once or as a chain, and time it.

        Raises
        ------
        StaleOutput
            A stamp is not that of its launch.
        InvalidOutput
            The output lies elsewhere, or not every launch ran.
        """
        raise NotImplementedError

    def planning(self, clock: Clock) -> tuple[float, float]:
        """Return the medians of what planning takes and its maps: seconds, microseconds."""
        times, maps = zip(*(self._plan_once(clock) for _ in range(PLANS)), strict=True)
        return statistics.median(times), statistics.median(maps)

    def _plan_once(self, clock: Clock) -> tuple[float, float]:
        start = clock()
        plan = self.make_plan()
        return clock() - start, plan.map_us

    def _report(self, where: str, links: int) -> LaunchReport:
        """Return the report of all launches since the last; none is stale or missing."""
        (report,) = self.attention.report(self.plan)
        if report.stale:
            raise StaleOutput(
                f"{where}: the kernel's stamp is {report.stamp}, expected {report.expected_stamp}"
            )
        if report.launches != links:
            raise InvalidOutput(f"{where}: {report.launches} of {links} launches ran")
        return report


class HostBatch(Batch):
    """A batch on NumPy arrays: launches run when they are called, one at a time.

    It is computed in float32, whatever type the numbers were rounded to.
    """

    dtype = Precision.float32

    @cached_property
    def timed(self) -> int:
        """See ``cases.timed``."""
        return kernel_cases.timed(self.size, self.workload)

    def poison(self, links: int = 1, first: bool = False) -> None:
        """Fill the output with NaN."""
        self.arrays.out.fill(np.nan)

    def launch(self, clock: Clock, which: str, links: int = 1) -> Launch:
        """Launch once; see ``Batch``."""
        arrays = self.arrays
        start = clock()
        out = self.attention.forward(0, arrays.q, None, None, self.plan, arrays.out)
        seconds = clock() - start
        where = f"{self.size.case.name}: {which}"
        report = self._report(where, links)
        if not np.shares_memory(out, arrays.out):
            raise InvalidOutput(f"{where}: the output was not written where it was asked for")
        return Launch(seconds, 0.0, report, (arrays.out,))


@dataclass(frozen=True, kw_only=True)
class QueueBatch(Batch):
    """A batch on lazy arrays; where it is not ``queued``, as in the emulator, a call is timed."""

    queue: Queue

    @property
    def dtype(self) -> Precision:
        """The workload's."""
        return self.workload.dtype

    def poison(self, links: int = 1, first: bool = False) -> None:
        """Leave NaN where the next outputs will lie; see ``Batch``."""
        self.queue.poison(self.arrays.q, links, alone=first)

    def launch(self, clock: Clock, which: str, links: int = 1) -> Launch:
        """Launch a chain; see ``Batch``."""
        start = clock()
        outs = self._chain(self.plan, links)
        waiting = [*outs, *self.attention.pending(self.plan)]
        told = clock()
        self.queue.wait(waiting)
        done = clock()
        report = self._report(f"{self.size.case.name}: {which}", links)
        outputs = tuple(self.queue.read(out) for out in outs)
        if not self.queued:
            return Launch((done - start) / links, 0.0, report, outputs)
        return Launch((done - told) / links, (told - start) / links, report, outputs)

    def _chain(self, plan: AttentionMetadata, links: int) -> list[Any]:
        outs: list[Any] = []
        for _ in range(links):
            q = outs[-1] if outs else self.arrays.q
            outs.append(self.attention.forward(0, q, None, None, plan))
        return outs

    def _plan_once(self, clock: Clock) -> tuple[float, float]:
        """Count what the first launch prepares for those that follow: arrays on the device."""
        if not self.queued:
            return super()._plan_once(clock)
        start = clock()
        plan = self.make_plan()
        self._chain(plan, 1)
        first = clock()
        self._chain(plan, 1)
        again = clock() - first
        return max(0.0, first - start - again), plan.map_us


def empty_chain(queue: Queue, clock: Clock, links: int) -> float:
    """Time launches of nothing, each waiting for the one before; seconds of one of them."""
    last = None
    for _ in range(links):
        last = queue.empty(last)
    start = clock()
    queue.wait([last])
    return (clock() - start) / links
