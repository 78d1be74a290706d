"""The stages of a run's process, and the names of what can go wrong in them.

fingerprint, probe, load, canary, warm_up, measure, probe, fingerprint: in every process
the same code in the same order (:mod:`labkit.experiment.worker_process`).
"""

from __future__ import annotations

import gc
import math
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from labkit.config import ConfigError, Device, Experiment, from_plain
from labkit.experiment import known_answer_test
from labkit.machine import fingerprint
from labkit.records import Arm, Record, RecordError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from labkit.workload.interleaving import Setting, Turns
    from labkit.workload.measurement import Measurement


LIMITS_BLOCKS = 3  # whose processes measure the machine's limits
# How MLX, C++ and the system say that there is no memory left.
OUT_OF_MEMORY = ("Unable to allocate", "bad_alloc", "Cannot allocate memory")


class Failure(Exception):
    """A run that went wrong: the outcome's name and one line of detail."""

    def __init__(self, outcome: str, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.detail = detail


@dataclass
class Stopwatch:
    """Wall seconds per stage (monotonic clock), and which stage is on."""

    spawned_ns: int
    seconds: dict[str, float] = field(default_factory=dict)
    stage: str = "startup"

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Time one stage; a stage may come twice."""
        self.stage = stage
        start = time.monotonic_ns()
        try:
            yield
        finally:
            spent = (time.monotonic_ns() - start) / 1e9
            self.seconds[stage] = round(self.seconds.get(stage, 0.0) + spent, 6)

    def since_spawn(self) -> float:
        """Return the seconds since the parent started this process."""
        return round((time.monotonic_ns() - self.spawned_ns) / 1e9, 6)


@dataclass
class Draft:
    """What is known about the run so far; becomes a record however the run ends."""

    record: Record
    watch: Stopwatch
    compiles: dict[str, int] = field(default_factory=dict)
    values: dict[str, NDArray[np.float32]] = field(default_factory=dict)  # by digest

    def note(self, **items: Any) -> None:
        """Add to the record's notes."""
        self.record = replace(self.record, notes={**self.record.notes, **items})

    def fail(self, failure: Failure) -> None:
        """Name the run's failure; the first one counts."""
        if self.record.ok:
            self.record = replace(self.record, outcome=failure.outcome, detail=failure.detail)


def experiment_of(arm: Arm) -> Experiment:
    """Build the arm's config; every rule is checked again."""
    return from_plain(Experiment, {**arm.config, "ablation": {"arms": {"base": {}}}})


def uses_mlx(experiment: Experiment) -> bool:
    """Tell whether MLX multiplies for the arm; labkit's own kernels are NumPy and numba."""
    kernel, backend = experiment.workload.times_kernels, experiment.engine.attention.backend
    if experiment.engine.name == "openai":
        return False
    return experiment.workload.serves or (kernel and backend not in ("fused", "reference"))


def begin(draft: Draft) -> Any:
    """Take the fingerprint and the first probe; return the probe."""
    with draft.watch.time("fingerprint"):
        draft.record = replace(draft.record, environment=fingerprint.take())
    with draft.watch.time("numba"):
        probe = start_probe(draft)
    with draft.watch.time("probe"):
        draft.record = replace(draft.record, probe={"before": probe.time()})
    return probe


def probe_again(draft: Draft, probe: Any) -> None:
    """Take the second probe, which is for diagnosis only."""
    with draft.watch.time("probe"):
        draft.record = replace(draft.record, probe={**draft.record.probe, "after": probe.time()})


def note_limits(draft: Draft, experiment: Experiment) -> None:
    """Measure what the machine can do at best, for the roofline of kernels on the CPU.

    The first blocks do: what all of them reach at best is the limit, and it costs 0.2 s.
    """
    from labkit.cpu import roofline_peaks

    engine = experiment.engine
    on_cpu = engine.attention.device is Device.cpu and engine.memory_limit is None
    if experiment.workload.times_kernels and on_cpu and draft.record.block < LIMITS_BLOCKS:
        threads = budget_threads(experiment)
        use_threads(threads)
        with draft.watch.time("limits"):
            draft.note(limits=roofline_peaks.measure(threads))


def finish(draft: Draft) -> None:
    """Take the machine's state at the end."""
    with draft.watch.time("fingerprint"):
        draft.record = replace(draft.record, environment_end=fingerprint.state())


def start_probe(draft: Draft) -> Any:
    """Start numba and its pool, load the arm-blind kernels, and count compilations from now on."""
    from labkit.machine.worker_environment import core_count, numba_without_scipy

    with _kept_for_good(), numba_without_scipy():
        _count_compilations(draft)
        from labkit.cpu import thread_pool
        from labkit.cpu.speed_probe import Probe

        draft.note(pool=thread_pool.install().facts)
        probe = Probe(threads=core_count())
        probe.load()
    return probe


@contextmanager
def _kept_for_good() -> Iterator[None]:
    """Look for garbage neither meanwhile nor, ever after, among what there is then: modules stay.

    Among numba's some 90,000 objects the search took a fifth of its start, and 50 ms more whenever
    everything is searched.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def _count_compilations(draft: Draft) -> None:
    from numba.core import event

    class Listener(event.Listener):  # type: ignore[misc]
        def on_start(self, event: Any) -> None:
            stage = draft.watch.stage
            draft.compiles[stage] = draft.compiles.get(stage, 0) + 1

        def on_end(self, event: Any) -> None:
            """Nothing to count."""

    event.register("numba:compile", Listener())


def load(experiments: Sequence[Experiment], setting: Setting, draft: Draft) -> Turns:
    """Set what the process has one of, then load the workload and the arms' engines."""
    from labkit import workload
    from labkit.machine import openblas_for_mlx, process_memory_limit
    from labkit.machine.worker_environment import blas_threads

    first = experiments[0]
    limit = first.engine.memory_limit
    if limit is not None:
        draft.note(
            memory_limit={"bytes": limit, "held_by": process_memory_limit.apply_memory_limit(limit)}
        )
    if any(map(uses_mlx, experiments)):
        threads = max(blas_threads(e.engine.name, e.engine.threads) for e in experiments)
        draft.note(blas=openblas_for_mlx.activate(first.engine.blas.value, threads))
    use_threads(budget_threads(first))
    return workload.load(experiments, setting)


def budget_threads(experiment: Experiment) -> int:
    """Return the arm's CPU budget in threads."""
    from labkit.machine.worker_environment import core_count

    return experiment.engine.threads or core_count()


def use_threads(budget: int) -> None:
    """Hand numba's kernels a CPU budget from here on, as far as the pool has threads."""
    import numba

    numba.set_num_threads(min(budget, numba.config.NUMBA_NUM_THREADS))


def accept(measurement: Measurement, arm: Arm, draft: Draft) -> None:
    """Put a measurement into the record; refuse what is not a number or did not happen."""
    counters = {name: float(value) for name, value in measurement.counters.items()}
    broken = [name for name, value in counters.items() if not math.isfinite(value)]
    for name in broken:
        draft.fail(Failure("invalid_output", f"counter {name} is {counters.pop(name)}"))
    draft.values |= measurement.values
    draft.record = replace(draft.record, cases=measurement.cases, counters=counters)
    draft.note(**measurement.notes)
    if arm.all_served:
        for case in measurement.cases:
            unserved = case.notes.get("traffic", {}).get("unserved")
            if unserved:
                first = unserved[0]
                what = f"request {first['id']} {first['outcome']}: {first['error']}"
                claim = "the ablation claims that all are served (claims.all_served)"
                draft.fail(Failure("invalid_output", f"{what}; {claim}"))
    for name in dict.fromkeys(filter(None, [arm.engine_counter, *arm.engaged])):
        if not counters.get(name, 0) > 0:
            said = "stayed 0" if name in counters else "is missing"
            draft.fail(Failure("vacuous", f"the claimed counter {name} {said}"))


@contextmanager
def named_failures(draft: Draft) -> Iterator[None]:
    """Turn an exception into the outcome that names it."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        draft.fail(_failure(error, draft.watch.stage))
        try:
            known_answer_test.check()
        except Exception as stale:
            draft.note(canary=one_line(stale))


def _failure(error: Exception, stage: str) -> Failure:
    kind = type(error).__name__
    if isinstance(error, Failure):
        return error
    if isinstance(error, MemoryError) or any(text in str(error) for text in OUT_OF_MEMORY):
        return Failure("oom", f"{stage}: out of memory: {one_line(error) or kind}")
    if isinstance(error, ConfigError) or (isinstance(error, ValueError) and stage == "load"):
        return Failure("refused", one_line(error))
    if isinstance(error, known_answer_test.StaleResult) or kind == "StaleOutput":
        return Failure("stale", one_line(error))
    if kind == "InvalidOutput" or isinstance(error, RecordError):  # a metric that is no number
        return Failure("invalid_output", one_line(error))
    return Failure("crashed", f"{stage}: {kind}: {one_line(error)}")


def one_line(error: BaseException) -> str:
    """Return an exception's message as one line, or its name where it has none."""
    return " ".join(str(error).split()) or type(error).__name__
