"""Pilot A/A runs that estimate the smallest effect a one-minute study can detect on this machine.

A pilot runs the same worker processes as a study, with two identical arms interleaved in each, so
its noise and its cost are those of a study. There is one pilot for kernels and one for requests. If
a pilot cannot run, its result is the reason in one line, and the doctor continues without it.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from labkit.config import Experiment
from labkit.experiment.launch.run_launcher import WorkerLauncher
from labkit.experiment.schedule.cell_manifest import write_manifest
from labkit.experiment.schedule.doctor_noise_cache import MIN_PROCESSES, PilotNoise
from labkit.machine.exception_text import one_line
from labkit.records import Record

MAX_PROCESSES = 5  # of each kind of workload
TIME_LIMIT_S = 24.0  # for the processes of all kinds together
COMMON_OVERRIDES = (
    "ablation=none",
    "design=quick",
    f"design.blocks={MAX_PROCESSES}",
    "design.runs_per_block=1",
    "design.isolation=in_process",
    "design.timeout_s=20",
    "engine=paged",
    "model=tiny",
)
OVERRIDES_BY_KIND: Mapping[str, Sequence[str]] = {
    "kernels": (
        "workload=kernel_decode",
        "workload.repeats=40",
        "workload.cases=[{name:decode,decode:64,context:128}]",
    ),
    "requests": ("workload=chat", "workload.num_requests=8", "workload.concurrency=8"),
}


class Pilot:
    """Short A/A processes of one kind of workload. The constructor prepares them.

    ``overrides``: those of this kind, added to ``common``, those of all kinds. ``folder``: for the
    files of the pilot's cell; it need not exist. ``check`` is given the config, before anything is
    prepared for it. Raises any error that keeps this machine from preparing the cell.
    """

    def __init__(
        self,
        overrides: Sequence[str],
        folder: Path,
        common: Sequence[str] = COMMON_OVERRIDES,
        check: Callable[[Experiment], None] = lambda experiment: None,
    ) -> None:
        from labkit import workload
        from labkit.cli import hydra_arguments, multirun_composition
        from labkit.experiment.compose.cell_composer import to_cell

        multirun_composition.register()
        words = [*common, *map(hydra_arguments.read_override, overrides)]
        command = hydra_arguments.Command((), tuple(words), multirun=False)
        (composed,) = multirun_composition.compose_cells(command)
        check(composed.experiment)
        workload.prepare(composed.experiment)
        self.cell = to_cell(composed, folder)
        self.launcher = WorkerLauncher()
        self.records: list[Record] = []
        self.wall_times_s: list[float] = []
        write_manifest(self.cell, MAX_PROCESSES)
        self.launcher.prepare(self.cell)

    @property
    def failure(self) -> str | None:
        """Outcome and detail of the first run that failed; None if no run has failed."""
        failed = next((record for record in self.records if not record.ok), None)
        return None if failed is None else f"{failed.outcome}: {failed.detail}"

    def fits(self, remaining_s: float) -> bool:
        """Return whether the slowest process so far took at most ``remaining_s`` seconds.

        After a failure the result is False, so that no other process starts.
        """
        return self.failure is None and max(self.wall_times_s, default=0.0) <= remaining_s

    def run(self) -> None:
        """Run the next process, which interleaves both arms."""
        start, block = time.monotonic(), len(self.wall_times_s)
        runs = [run for run in self.cell.schedule() if run.block == block]
        self.records += self.launcher.launch(runs, self.cell)
        self.wall_times_s.append(time.monotonic() - start)

    def estimate(self) -> PilotNoise | str:
        """Return the noise and cost, or a line that says why they are unknown."""
        if self.failure is not None:
            return self.failure
        done = len(self.wall_times_s)
        if done < MIN_PROCESSES:
            return f"only {done} of {MIN_PROCESSES} processes fit into {TIME_LIMIT_S:g} s"
        return estimate_noise(self.records, self.wall_times_s)


def estimate_noise(records: Sequence[Record], wall_times_s: Sequence[float]) -> PilotNoise:
    """Return noise and cost from the records of A/A processes.

    Block ``i`` is one process, which ran the baseline and the control and took ``wall_times_s[i]``
    seconds.
    """
    from labkit.analysis.comparison.observations import build_rows, log_values
    from labkit.analysis.statistics.power import between_run_sd

    blocks = range(len(wall_times_s))
    baseline, control = (
        next(r.arm for r in records if r.role == role) for role in ("baseline", "control")
    )
    paired = next(row for row in build_rows(records, paired_baseline=baseline) if row.primary)
    unpaired = next(row for row in build_rows(records) if row.primary)
    interleaved_sd = between_run_sd(
        log_values(paired, baseline, blocks), log_values(paired, control, blocks)
    )
    assert interleaved_sd is not None, "one process is enough"
    variances = [log_values(unpaired, arm, blocks).var(ddof=1) for arm in (baseline, control)]
    return PilotNoise(
        processes=len(wall_times_s),
        interleaved_sd=interleaved_sd,
        separate_sd=math.sqrt(statistics.fmean(map(float, variances))),
        interleaved_s=statistics.median(wall_times_s),
        separate_s=statistics.median(_one_arm_times_s(records, wall_times_s)),
    )


def _one_arm_times_s(records: Sequence[Record], wall_times_s: Sequence[float]) -> list[float]:
    """Return the seconds that each process would have taken with one arm instead of two.

    The time of one arm's turns (``seconds["turns"]`` of its record) is subtracted from the seconds
    of the process. It is the shorter time of the two arms: the longer one includes loading, which a
    process with a single arm would do as well.
    """
    return [
        wall_s - min(record.seconds["turns"] for record in records if record.block == block)
        for block, wall_s in enumerate(wall_times_s)
    ]


@contextmanager
def _error_as_result(kind: str, results: dict[str, PilotNoise | str]) -> Iterator[None]:
    """Turn an exception into the result of pilot ``kind``, so that the other pilots still run."""
    try:
        yield
    except Exception as error:
        results[kind] = one_line(error)


def run_pilots(
    on_step: Callable[[str], None], time_limit_s: float = TIME_LIMIT_S
) -> dict[str, PilotNoise | str]:
    """Run the pilots of all kinds, one process of each in turn.

    ``on_step`` is called with a description of each step as it begins. ``time_limit_s``: for all
    processes. A process that would probably end later is not started. The preparation, which
    compiles kernels the first time, does not count. Returns, by kind of workload, the estimate or
    the reason that there is none. Raises ``Interrupted`` after a signal, when all processes have
    ended.
    """
    results: dict[str, PilotNoise | str] = {}
    pilots: dict[str, Pilot] = {}
    with tempfile.TemporaryDirectory(prefix="labkit-doctor-") as folder:
        for kind, overrides in OVERRIDES_BY_KIND.items():
            on_step(f"{kind}: preparing, as for a first study")
            with _error_as_result(kind, results):
                pilots[kind] = Pilot(overrides, Path(folder) / kind)
        end = time.monotonic() + time_limit_s
        for number in range(1, MAX_PROCESSES + 1):
            for kind, pilot in pilots.items():
                if kind not in results and pilot.fits(end - time.monotonic()):
                    on_step(f"{kind}: two equal arms, process {number} of {MAX_PROCESSES}")
                    with _error_as_result(kind, results):
                        pilot.run()
        for kind, pilot in pilots.items():
            if kind not in results:
                with _error_as_result(kind, results):
                    results[kind] = pilot.estimate()
    return {kind: results[kind] for kind in OVERRIDES_BY_KIND}
