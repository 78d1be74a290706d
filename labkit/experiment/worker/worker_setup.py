"""What a worker does before and after it measures, such as loading the arms, stage by stage.

========================  ======================================================================
stage (key of a record's  work
``seconds``)
========================  ======================================================================
``startup``               from the parent's spawn to the first line of the worker
``fingerprint``           facts about the machine and the software
``numba``                 start numba and its thread pool, load the probe's kernels
``probe``                 time kernels that are the same for every arm
``load``                  memory limit, BLAS, threads, then the workload and every arm's engine
``canary``                check that MLX still computes known values
``warm_up``               unmeasured work, the same rule for every arm
``measure``               the measurement
``canary``, ``probe``     again, for diagnosis
``limits``                peak rates of the machine, for kernels on the CPU in the first blocks
``fingerprint``           the machine's state at the end
========================  ======================================================================

:class:`labkit.experiment.worker.worker_run.WorkerProcess` runs them in this order.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from labkit.config import Device, Experiment, from_plain
from labkit.config.env_interpolation import hide_values
from labkit.records import Arm, Record

if TYPE_CHECKING:
    from labkit.workload.workload_protocols import InterleavedArms, TurnContext

PEAK_RATE_BLOCKS = 3  # the number of first blocks that measure the machine's peak rates


def experiment_of(arm: Arm) -> Experiment:
    """Return an arm's config as an ``Experiment``. Every rule is checked again."""
    return from_plain(Experiment, {**arm.config, "ablation": {"arms": {"base": {}}}})


def without_values(record: Record, arms: Sequence[Arm]) -> Record:
    """Return a record without the values of the environment variables that the arms name.

    Only texts of others can hold them: errors, notes, facts of the machine. The record's own words
    (its arm, its outputs' kind) stay, also where a variable has the same value.
    """
    public, configs = [arm.name for arm in arms], [arm.config for arm in arms]

    def hidden(data: Any) -> Any:
        return hide_values(data, configs, public)

    texts = {
        name: hidden(getattr(record, name))
        for name in ("detail", "notes", "environment", "environment_end")
    }
    cases = tuple(
        dataclasses.replace(case, skipped=hidden(case.skipped), notes=hidden(case.notes))
        for case in record.cases
    )
    changed = dataclasses.replace(record, cases=cases, **texts)
    return record if changed == record else changed


def start_probe(on_compile: Callable[[], None]) -> tuple[Any, Mapping[str, Any]]:
    """Start numba with its thread pool, and load the machine probe's kernels.

    The probe times these kernels before and after the measurement, the same ones for every arm.
    ``on_compile`` is called at every compilation by numba from now on. Returns the probe and facts
    about the thread pool.
    """
    from labkit.machine.worker_environment import core_count, numba_without_scipy

    with _out_of_garbage_collection(), numba_without_scipy():
        _call_at_compilations(on_compile)
        from labkit.cpu.runtime import thread_pool
        from labkit.cpu.speed_probe import SpeedProbe

        pool = thread_pool.install()
        probe = SpeedProbe(threads=core_count())
        probe.load()
    return probe, pool.settings


@contextmanager
def _out_of_garbage_collection() -> Iterator[None]:
    """Exempt all objects that exist at the end of the ``with`` block from garbage collection.

    Otherwise the collector's search of numba's 90,000 objects takes a fifth of numba's start, and
    50 ms in every later full collection.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def _call_at_compilations(on_compile: Callable[[], None]) -> None:
    from numba.core import event

    class Listener(event.Listener):  # type: ignore[misc]
        def on_start(self, event: Any) -> None:
            on_compile()

        def on_end(self, event: Any) -> None:
            pass  # a compilation is counted when it starts

    event.register("numba:compile", Listener())


def load(
    experiments: Sequence[Experiment], setting: TurnContext, note: Callable[..., None]
) -> InterleavedArms:
    """Apply the memory limit, BLAS and threads, then load the workload and the arms' engines.

    ``note`` adds to the record's notes immediately, so that they remain if a later step fails.
    """
    from labkit import workload
    from labkit.machine import openblas_for_mlx
    from labkit.machine.processes import process_memory_limit
    from labkit.machine.worker_environment import blas_threads

    first = experiments[0]
    if (limit := first.engine.memory_limit) is not None:
        held_by = process_memory_limit.apply_memory_limit(limit)
        note(memory_limit={"bytes": limit, "held_by": held_by})
    if any(map(uses_mlx, experiments)):
        threads = max(blas_threads(e.engine.name, e.engine.threads) for e in experiments)
        note(blas=openblas_for_mlx.activate(first.engine.blas.value, threads))
    apply_thread_budget(thread_budget(first))
    return workload.load(experiments, setting)


def uses_mlx(experiment: Experiment) -> bool:
    """Return whether MLX multiplies matrices for an arm; labkit's kernels use NumPy and numba."""
    engine, workload = experiment.engine, experiment.workload
    if engine.name == "openai":
        return False
    own_kernels = engine.attention.backend in ("fused", "reference")
    return workload.loads_model or (workload.times_kernels and not own_kernels)


def thread_budget(experiment: Experiment) -> int:
    """Return the number of threads that an arm may use."""
    from labkit.machine.worker_environment import core_count

    return experiment.engine.threads or core_count()


def apply_thread_budget(threads: int) -> None:
    """Let numba's kernels use ``threads`` threads from now on, but not more than its pool has."""
    import numba

    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))


def forget_own_stop() -> None:
    """Let the thread pool forget that this process was stopped while other arms had their turns."""
    from labkit.cpu.runtime import thread_pool

    thread_pool.install().uncrowd()


def needs_peak_rates(experiment: Experiment, block: int) -> bool:
    """Return whether a process measures the machine's peak rates, for the roofline.

    Only kernels on the CPU have a roofline. Each of the first blocks measures the rates (0.2 s),
    and the best rate is the peak.
    """
    engine = experiment.engine
    on_cpu = engine.attention.device is Device.cpu and engine.memory_limit is None
    return experiment.workload.times_kernels and on_cpu and block < PEAK_RATE_BLOCKS


def measure_peak_rates(experiment: Experiment) -> Mapping[str, float]:
    """Return the peak rates of memory reads and matrix products with the arm's threads."""
    from labkit.cpu import roofline_peaks

    threads = thread_budget(experiment)
    apply_thread_budget(threads)
    return roofline_peaks.measure_peaks(threads)
