"""Records of runs that failed or are not started, with the reason from the process or its log.

A run whose worker wrote a record keeps it. The runs of an arm whose preparation failed, or whose
runs all failed alike, are not started: a preparation loads and warms up an arm as a run does, so a
run would fail in the same way. With a server it would wait for the same time-out again, in every
block. A run that is not started has a record all the same, with the arm's outcome and the reason.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit.experiment import StudyError
from labkit.experiment.cell import ReadyCell
from labkit.experiment.launch.child_process import ProcessExit
from labkit.experiment.permuted_blocks import Run
from labkit.experiment.worker.run_failures import OUT_OF_MEMORY_MESSAGES, RunFailure
from labkit.machine.facts import machine_snapshot
from labkit.records import Record, RecordError, read_record

FAILED_RUNS = 3  # of an arm, all with the same outcome, after which it is not run any more
MODULE = re.compile(r"^(\w+\.)+(?=\w+: )")  # of an exception's class, in a traceback's last line
EMPTY_LOG = "its log is empty"
MAX_CRASH_LINES = 500
FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)')
PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep
NOT_OWN = (PACKAGE, f"{os.sep}site-packages{os.sep}", f"{os.sep}lib{os.sep}python", "<frozen ")


def collect(
    run: Run,
    cell: ReadyCell,
    ending: ProcessExit,
    log: Path,
    started: str,
    seconds: float,
    in_turn: Run | None,
) -> Record:
    """Return the worker's record, or one that says how the run ended without a record.

    ``in_turn``: the run whose arm had the turn when the process that the runs share died.
    """
    collected = _collect(run, cell, ending, log)
    if isinstance(collected, Record):
        status = {} if ending.code == 0 else {"exit": ending.signal_name or ending.code}
        return replace(collected, notes={**collected.notes, **status})
    notes: dict[str, Any] = {"log_tail": last_lines(log)}
    detail = collected.detail
    if in_turn is not None and collected.outcome == "timeout":
        detail = f"{detail} (in the turn of {in_turn.arm})"
    elif in_turn is not None and in_turn != run:
        notes["failed_by"] = in_turn.name
        detail = f"in one process with {in_turn.name}: {detail}"
    failed = _failed_record(run, cell, collected.outcome, detail, started, notes)
    return replace(failed, seconds={"total": seconds})


def _collect(run: Run, cell: ReadyCell, ending: ProcessExit, log: Path) -> Record | RunFailure:
    if ending.code == os.EX_IOERR:
        lines = last_lines(log, 1) or ["the worker cannot write its record"]
        raise StudyError(lines[0])
    pending, last = cell.paths.pending_record(run), crash_reason(log)
    if ending.timed_out:
        return RunFailure("timeout", f"killed after {ending.wall_s:.0f} s: {last}")
    if pending.exists():
        try:
            record = read_record(pending)
        except RecordError as error:
            cell.paths.move_to_abandoned(pending)
            detail = str(error).replace(f"{pending.parent}{os.sep}", "")
            return RunFailure("invalid_output", detail)
        pending.unlink()
        return record
    if ending.killed_for_memory:
        return RunFailure("oom", "killed by the kernel because memory ran out")
    if ending.signal_name is not None:
        return RunFailure("crashed", f"{ending.signal_name}: {last}")
    if ending.code == 0:
        return RunFailure("crashed", "the worker ended without a record")
    return RunFailure("crashed", f"exit status {ending.code}: {last}")


def preparation_failure(ending: ProcessExit, log: Path) -> RunFailure | None:
    """Return why a preparation failed, or None if it succeeded; ``log`` is its log.

    A process that ended by itself has written the failure as its log's last line. One that was
    killed has not, nor has that of an earlier labkit: then the log is judged.
    """
    if ending.code == 0:
        return None
    lines = last_lines(log)
    by_itself = ending.code > 0 and not ending.timed_out
    written = RunFailure.from_line(lines[-1]) if lines and by_itself else None
    if written is not None:
        return written
    status = ending.signal_name or f"exit {ending.code}"
    reason = MODULE.sub("", crash_reason(log)) if lines else status
    if ending.timed_out:
        return RunFailure("timeout", reason)
    memory = ("MemoryError", *OUT_OF_MEMORY_MESSAGES)
    if ending.killed_for_memory or any(message in reason for message in memory):
        return RunFailure("oom", reason)
    # EX_DATAERR: this config is not valid for the worker's labkit, which may be an arm's own.
    return RunFailure("refused" if ending.code == os.EX_DATAERR else "crashed", reason)


def run_failures(records: Sequence[Record], cell: ReadyCell) -> dict[str, RunFailure]:
    """Return why arms are not run any more: each of their runs failed, and in the same way.

    ``records``: all that the command has run. Runs that another arm's failure ended do not count,
    and an arm that claims to run out of memory is always run.
    """
    failures = {}
    for arm in cell.arms:
        own = [r for r in records if r.arm == arm.name and "failed_by" not in r.notes]
        alike = len({record.outcome for record in own}) == 1
        if len(own) < FAILED_RUNS or not alike or own[0].ok or arm.out_of_memory:
            continue
        reason = f"not run, as the first {FAILED_RUNS} runs failed ({own[0].run}: {own[0].detail})"
        failures[arm.name] = RunFailure(own[0].outcome, reason, own[0].notes.get("log"))
    return failures


def failed(
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
        elif failure.log is not None:
            notes["log"] = failure.log
        started = machine_snapshot.utc_now()
        records.append(_failed_record(run, cell, failure.outcome, detail, started, notes))
    return records


def _failed_record(
    run: Run, cell: ReadyCell, outcome: str, detail: str, started: str, notes: Mapping[str, Any]
) -> Record:
    return Record(
        run.arm,
        cell.arm(run.arm).role,
        run.block,
        run.position,
        cell.seed,
        outcome=outcome,
        detail=detail,
        started=started,
        environment=machine_snapshot.take(),
        notes=notes,
    )


def crash_reason(log: Path) -> str:
    """Return the line of a dead process's log that says most about its death.

    It is the last line or, after a fatal signal, the innermost Python frame outside labkit and the
    installed packages of the thread that died; of the main thread, which is the last, if a thread
    without Python frames died. For a log without lines it says so.
    """
    lines = last_lines(log, MAX_CRASH_LINES)
    dumps = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error: ")]
    if not dumps:
        return lines[-1] if lines else EMPTY_LOG
    dump = lines[dumps[-1] :]
    threads = [i for i, line in enumerate(dump) if line.endswith("(most recent call first):")]
    died = [i for i in threads if dump[i].startswith("Current thread ")] or threads[-1:] or [0]
    end = next((i for i in threads if i > died[0]), len(dump))
    frames = [match for line in dump[died[0] : end] if (match := FRAME.fullmatch(line))]
    own = [frame for frame in frames if not any(part in frame["file"] for part in NOT_OWN)]
    error = lines[dumps[-1]].removeprefix("Fatal Python error: ")
    if not frames:
        return error
    frame = (own or frames)[0]
    return f"{error} ({frame['file']}:{frame['line']}, in {frame['function']})"


def last_lines(log: Path, count: int = 10) -> list[str]:
    """Return the last lines of a log that are not blank."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]
