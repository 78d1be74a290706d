"""Launchers in this process whose records a test plants."""

from labkit.experiment.progress_display import Progress
from labkit.records import CaseRecord, Metric, Record

OUTPUTS = {"kind": "array", "digest": "00", "shape": [1], "dtype": "float32"}
OUTPUTS |= {"rows": "AAAAAA==", "heads": "AAAAAA=="}


class PlantedRuns:
    """Carries out runs without a process. A subclass's ``fields`` are what a record contains.

    ``dies_in``: a block, before which the user interrupts the study.
    """

    dies_in = None

    def __init__(self):
        self.launched = []

    def fields(self, run, cell):
        return {"notes": {"number": len(self.launched)}}

    def prepare(self, cell):
        """Nothing to build."""

    def launch(self, runs, cell):
        if runs[0].block == self.dies_in:
            raise KeyboardInterrupt
        pending = cell.paths.pending
        assert not any(pending.iterdir()), "a worker would meet another's record"
        return [self.record(run, cell) for run in runs]

    def record(self, run, cell):
        self.launched.append(run.name)
        place = run.block, run.position, cell.seed
        fields = {"outcome": "ok", "started": "2026-11-20T20:00:00Z", **self.fields(run, cell)}
        return Record(run.arm, cell.arm(run.arm).role, *place, **fields)


def kernel_fields(*repeats):
    """Return the fields of a good run of one kernel, with its times (us)."""
    metric = Metric("dispatch_us", "us", "lower", True, repeats)
    return {
        "counters": {"engine.paged": 1.0, "resolver.seq_map": 1.0},
        "cases": (CaseRecord("one", None, (metric,), OUTPUTS),),
    }


class Notes(Progress):
    """The lines that are shown to the user."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def note(self, line):
        self.lines.append(line)
