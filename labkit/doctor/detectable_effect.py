"""What a minute can see here: short A/A processes, for kernels and for requests.

They are a study's own processes (the worker, turns and all), two equal arms in each, so
that their noise and their cost are a study's. Whatever cannot be tried is said in a line;
the rest of the doctor does not need it.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from labkit.experiment.cell_manifest import write_manifest
from labkit.experiment.doctor_noise import MIN_PROCESSES, PilotNoise
from labkit.experiment.run_failures import one_line
from labkit.experiment.run_launcher import ProcessLauncher
from labkit.records import Record

MOST = 5  # processes of each kind
SECONDS = 24.0  # for all of them; no process begins that would likely end later
ALWAYS = (
    "ablation=none",
    "design=quick",
    f"design.blocks={MOST}",
    "design.runs_per_block=1",
    "design.isolation=in_process",
    "design.timeout_s=20",
    "engine=paged",
    "model=tiny",
)
ASKED: Mapping[str, Sequence[str]] = {
    "kernels": (
        "workload=kernel_decode",
        "workload.repeats=40",
        "workload.cases=[{name:decode,decode:64,context:128}]",
    ),
    "requests": ("workload=chat", "workload.num_requests=8", "workload.concurrency=8"),
}


class Trial:
    """Short processes of one kind, made ready at construction.

    Parameters
    ----------
    overrides
        What is asked, as on the command line.
    folder
        Where its files go; it need not exist.

    Raises
    ------
    Exception
        Whatever keeps this machine from it.
    """

    def __init__(self, overrides: Sequence[str], folder: Path) -> None:
        from labkit import app, workload
        from labkit.experiment.cell_composer import to_cell

        app.register()
        (composed,) = app.compose_cells(app.Command((), (*ALWAYS, *overrides), multirun=False))
        workload.prepare(composed.experiment)
        self.cell = to_cell(composed, folder)
        self.launcher = ProcessLauncher()
        self.records: list[Record] = []
        self.walls: list[float] = []
        write_manifest(self.cell, MOST)
        self.launcher.prepare(self.cell)

    @property
    def failed(self) -> str | None:
        """What the first run that failed says, or None."""
        bad = next((record for record in self.records if not record.ok), None)
        return None if bad is None else f"{bad.outcome}: {bad.detail}"

    def fits(self, seconds: float) -> bool:
        """Tell whether one more process is worth it and likely ends in time."""
        return self.failed is None and max(self.walls, default=0.0) <= seconds

    def run(self) -> None:
        """Run the next process: every arm once, in turns."""
        start, block = time.monotonic(), len(self.walls)
        runs = [run for run in self.cell.schedule() if run.block == block]
        self.records += self.launcher.launch(runs, self.cell)
        self.walls.append(time.monotonic() - start)

    def sight(self) -> PilotNoise | str:
        """Return what was seen, or say why nothing was."""
        if self.failed is not None:
            return self.failed
        if len(self.walls) < MIN_PROCESSES:
            return f"only {len(self.walls)} of {MIN_PROCESSES} processes fit into {SECONDS:g} s"
        return estimate(self.records, self.walls)


def estimate(records: Sequence[Record], walls: Sequence[float]) -> PilotNoise:
    """Estimate noise and cost from the records of processes that took so many seconds each.

    Every block is one process that holds a baseline and its control.
    """
    from labkit.analysis.observations import build_rows, log_values
    from labkit.analysis.statistics.power import between_run_sd

    blocks = range(len(walls))
    one, other = (
        next(r.arm for r in records if r.role == role) for role in ("baseline", "control")
    )
    paired = next(row for row in build_rows(records, paired_baseline=one) if row.primary)
    alone = next(row for row in build_rows(records) if row.primary)
    interleaved_sd = between_run_sd(
        log_values(paired, one, blocks), log_values(paired, other, blocks)
    )
    assert interleaved_sd is not None, "a process would do"
    spread = [log_values(alone, arm, blocks).var(ddof=1) for arm in (one, other)]
    return PilotNoise(
        processes=len(walls),
        interleaved_sd=interleaved_sd,
        separate_sd=math.sqrt(statistics.fmean(map(float, spread))),
        interleaved_s=statistics.median(walls),
        separate_s=statistics.median(_alone_s(records, walls)),
    )


def _alone_s(records: Sequence[Record], walls: Sequence[float]) -> list[float]:
    """Return each process's seconds without one arm's turns: the shorter, for it loaded nothing."""
    return [
        wall - min(record.seconds["turns"] for record in records if record.block == block)
        for block, wall in enumerate(walls)
    ]


@contextmanager
def _reason(kind: str, found: dict[str, PilotNoise | str]) -> Iterator[None]:
    """Note what went wrong: whatever is broken here is a finding, and the next kind may work."""
    try:
        yield
    except Exception as error:
        found[kind] = one_line(error)


def look(on_step: Callable[[str], None], seconds: float = SECONDS) -> dict[str, PilotNoise | str]:
    """Try every kind, a process of each in turn; return its sight, or why there is none.

    Parameters
    ----------
    on_step
        Called with the words of each step as it begins.
    seconds
        For all processes; making ready, which compiles the first time, is not counted.

    Raises
    ------
    Interrupted
        A signal came; no process is left.
    """
    found: dict[str, PilotNoise | str] = {}
    trials: dict[str, Trial] = {}
    with tempfile.TemporaryDirectory(prefix="labkit-doctor-") as folder:
        for kind, overrides in ASKED.items():
            on_step(f"{kind}: making ready what the first study would")
            with _reason(kind, found):
                trials[kind] = Trial(overrides, Path(folder) / kind)
        end = time.monotonic() + seconds
        for number in range(1, MOST + 1):
            for kind, trial in trials.items():
                if kind not in found and trial.fits(end - time.monotonic()):
                    on_step(f"{kind}: equal arms in turns, process {number} of {MOST}")
                    with _reason(kind, found):
                        trial.run()
        for kind, trial in trials.items():
            if kind not in found:
                with _reason(kind, found):
                    found[kind] = trial.sight()
    return {kind: found[kind] for kind in ASKED}
