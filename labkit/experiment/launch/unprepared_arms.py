"""Arms whose preparation failed, or whose runs all failed alike: further runs are not started.

A preparation loads and warms up an arm as a run does, so a run would fail in the same way. With a
server it would wait for the same time-out again, in every block. A run that is not started has a
record all the same, with the arm's outcome and the reason.
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

FAILED_RUNS = 3  # of an arm, all with the same outcome, after which it is not run any more
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


def run_failures(records: Sequence[Record], cell: ReadyCell) -> dict[str, RunFailure]:
    """Return why arms are not run any more: each of their runs failed, and in the same way.

    ``records``: all that the command has run. Runs that another arm's failure ended do not count,
    and an arm that claims to run out of memory is always run.
    """
    failures = {}
    for arm in cell.arms:
        own = [r for r in records if r.arm == arm.name and "failed_by" not in r.notes]
        outcomes = {record.outcome for record in own}
        if len(own) < FAILED_RUNS or len(outcomes) > 1 or own[0].ok or arm.out_of_memory:
            continue
        reason = f"not run, as the first {FAILED_RUNS} runs failed ({own[0].run}: {own[0].detail})"
        failures[arm.name] = RunFailure(own[0].outcome, reason)
    return failures


def failed_records(
    runs: Sequence[Run], cell: ReadyCell, failures: Mapping[str, RunFailure]
) -> list[Record]:
    """Return the records of runs that are not started, or that share a process with one.

    ``failures``: why an arm is not run, by its name.
    """
    first = next(run for run in runs if run.arm in failures)
    records = []
    for run in runs:
        failure = failures.get(run.arm)
        notes = {"isolation": cell.design.isolation.value}
        detail = failure.detail if failure is not None else ""
        if failure is None:
            failure = failures[first.arm]
            notes["failed_by"] = first.name
            detail = f"in one process with {first.name}: {failure.detail}"
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
