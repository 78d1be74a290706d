"""Experiments: compose a study's cells, schedule their runs, launch them and record them.

Each line calls the next:

    labkit.cli.study_runner  runs the cells of one command
    hydra, compose           turn files and overrides into a checked cell
    schedule.cell_runner     runs the missing blocks of one cell, in the order of permuted_blocks
    launch.run_launcher      starts a worker process, and returns a record however the process ends
    launch.turn_coordinator  with isolation=live: starts a worker per arm; the workers take turns
    worker                   is the program of that process: it reads arms and writes records
    worker.worker_run        runs the stages of one arm, or of all arms of a block interleaved
    labkit.workload          measures kernels on cases, or engines on requests

optimum-benchmark has the same layers. Launcher and worker have the same names there. Its backend is
our engine, its scenario is our workload, and its report is our record.
"""


class StudyError(RuntimeError):
    """The study cannot continue (full disk, read-only folder, ...). The message is one line."""


class Interrupted(KeyboardInterrupt):
    """A signal stopped the study. Its records stay. The message is the signal's name."""
