"""Arms whose preparation failed: their runs fail with its reason and are not started.

A preparation loads and warms up an arm as a run does, so a run would fail in the same way. With a
server it would wait for the same time-out again, in every block.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from labkit.experiment.cell import ReadyCell
from labkit.experiment.launch import child_process
from labkit.experiment.permuted_blocks import Run
from labkit.experiment.worker.run_failures import OUT_OF_MEMORY_MESSAGES, RunFailure
from labkit.machine.facts import fingerprint
from labkit.records import Record

MODULE = re.compile(r"^(\w+\.)+(?=\w+: )")  # of an exception's class, in a traceback's last line


def preparation_failure(ending: child_process.ProcessExit, log: Path) -> RunFailure | None:
    """Return why a preparation failed, or None if it succeeded; ``log`` is its log."""
    if ending.code == 0:
        return None
    status = ending.signal_name or f"exit {ending.code}"
    lines = child_process.last_lines(log)
    reason = MODULE.sub("", child_process.crash_reason(log)) if lines else status
    memory = ("MemoryError", *OUT_OF_MEMORY_MESSAGES)
    out_of_memory = ending.out_of_memory or any(message in reason for message in memory)
    outcome = "timeout" if ending.timed_out else "oom" if out_of_memory else "crashed"
    return RunFailure(outcome, reason)


def failed_records(
    runs: Sequence[Run], cell: ReadyCell, failures: Mapping[str, RunFailure]
) -> list[Record]:
    """Return the records of runs of arms that are not prepared, or that share a process with one.

    ``failures``: why the preparation failed, by the arm's name.
    """
    first = next(run for run in runs if run.arm in failures)
    records = []
    for run in runs:
        failure = failures.get(run.arm)
        notes = {"isolation": cell.design.isolation.value}
        detail = f"its preparation failed: {failure.detail}" if failure is not None else ""
        if failure is None:
            failure = failures[first.arm]
            notes["failed_by"] = first.name
            detail = f"in one process with {first.name}: its preparation failed: {failure.detail}"
        elif (log := cell.paths.runs / f"prepare-{run.arm}.log").exists():
            notes["log"] = str(log.relative_to(cell.dir))
        records.append(
            Record(
                run.arm,
                cell.arm(run.arm).role,
                run.block,
                run.position,
                cell.seed,
                outcome=failure.outcome,
                detail=detail,
                started=fingerprint.utc_now(),
                environment=fingerprint.take(),
                notes=notes,
            )
        )
    return records
