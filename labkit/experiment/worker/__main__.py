"""A worker process's command line: ``python -m labkit.experiment.worker ARM RUN [ARM RUN ...]``.

``ARM`` is ``arms/ARM.json``. ``RUN`` is the record to write, ``.../b00-p02-ARM.json``, whose name
contains the block, position and arm. Several pairs are one block, whose arms are interleaved
(:mod:`labkit.experiment.worker.worker_run`). ``--turns FD`` is a socket over which a coordinator
grants the only arm its turns (:mod:`labkit.experiment.launch.turn_coordinator`). ``--keep CELL``
stores array outputs (:mod:`labkit.experiment.worker.output_array_files`) and traced steps
(:mod:`labkit.records.step_trace_file`) in that cell's folder. ``--prepare ARM ...`` loads and
warms up arms without measuring, so that nothing is compiled during a measured run. ``--pilot FILE
ARM ...`` writes to FILE what a process of these arms costs
(:class:`.case_time_allocation.CellPilot`).

A record is written to a temporary file and renamed. If the parent process has died, no record is
written.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit.config import ConfigError
from labkit.experiment.worker import output_array_files, worker_setup
from labkit.experiment.worker.granted_turns import GrantedTurns
from labkit.experiment.worker.run_draft import StageTimer
from labkit.experiment.worker.turn_protocol import Channel
from labkit.experiment.worker.worker_run import WorkerProcess
from labkit.experiment.worker.worker_status import WorkerStatus
from labkit.machine.exception_text import one_line
from labkit.machine.facts import machine_snapshot
from labkit.machine.processes import parent_death
from labkit.records import (
    Arm,
    Record,
    RecordError,
    parse_run_name,
    read_arm,
    step_counts,
    write_json,
    write_record,
    write_step_trace,
)

EXIT_CANNOT_WRITE = os.EX_IOERR


def perform(
    arm_paths: Sequence[Path],
    run_paths: Sequence[Path],
    spawned_ns: int,
    outputs_dir: Path | None = None,
    turns: Channel | None = None,
) -> list[Record]:
    """Do one run, or a block's runs interleaved, and return every record, including failed ones.

    ``spawned_ns``: the monotonic clock (ns) when the parent started this process. ``outputs_dir``:
    the cell's folder if array outputs and traces are to be stored there. ``turns``: the connection
    to the coordinator of live workers. Raises ``RecordError`` if an arm's file is not valid, or a
    run's name is that of another arm.
    """
    arms = [read_arm(path) for path in arm_paths]
    timer = StageTimer(spawned_ns)
    timer.seconds["startup"] = timer.since_spawn()
    status = WorkerStatus.from_environment()
    granted = None if turns is None else GrantedTurns(turns, timer, status.stopped_s)
    records = list(map(_new_record, arms, arm_paths, run_paths))
    process = WorkerProcess(records, arms, timer, granted, status)
    records = [worker_setup.without_values(record, arms) for record in process.run()]
    values = {k: array for run in process.runs for k, array in run.draft.output_values.items()}
    if outputs_dir is not None and values:
        output_array_files.save(outputs_dir, values)
    return [
        _with_step_trace(record, run.draft.step_trace, outputs_dir)
        for record, run in zip(records, process.runs, strict=True)
    ]


def _with_step_trace(
    record: Record, trace: Mapping[str, Any] | None, cell_dir: Path | None
) -> Record:
    """Return the record with a note on its traced steps; store the steps if ``cell_dir`` is set."""
    if trace is None:
        return record
    note: Mapping[str, Any] = step_counts(trace)
    if cell_dir is not None:
        try:
            note = write_step_trace(cell_dir, trace)
        except OSError as error:
            print(f"{cell_dir}: {error.strerror or error}; no trace is stored", file=sys.stderr)
    return replace(record, notes={**record.notes, "step_trace": note})


def _new_record(arm: Arm, arm_path: Path, run_path: Path) -> Record:
    block, position, name = parse_run_name(run_path.stem)
    if name != arm.name:
        raise RecordError(f"{run_path} is a run of arm {name}, but {arm_path} is arm {arm.name}")
    seed = int(arm.config.get("seed", 0))
    return Record(name, arm.role, block, position, seed, "ok", machine_snapshot.utc_now())


def prepare(arm_paths: Sequence[Path]) -> int:
    """Compile, build and cache what the runs of one arm, or of interleaved arms, need.

    Returns the exit status: 1 if that fails. The log then ends with the failure.
    """
    failure = _unrecorded(arm_paths, time.monotonic_ns()).prepare()
    if failure is None:
        return 0
    print(failure.to_line())  # to stdout, whose buffer may hold more and is written last
    return 1


def _unrecorded(arm_paths: Sequence[Path], spawned_ns: int) -> WorkerProcess:
    """Return the process of arms whose runs leave no record."""
    arms = list(map(read_arm, arm_paths))
    now = machine_snapshot.utc_now()
    records = [
        Record(arm.name, arm.role, 0, place, worker_setup.experiment_of(arm).seed, "ok", now)
        for place, arm in enumerate(arms)
    ]
    return WorkerProcess(records, arms, StageTimer(spawned_ns))


def survive_hangups() -> None:
    """Let no SIGHUP end this process, whose server may end while the process is stopped.

    The server alone connects this process's group with its session. If the server ends, the group
    is orphaned, and the kernel sends SIGHUP to an orphaned group that has a stopped process.
    """
    signal.signal(signal.SIGHUP, lambda number, frame: None)  # programs started later get it


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. The exit status is 0 if all records, failed ones too, were written."""
    parser = argparse.ArgumentParser(prog="python -m labkit.experiment.worker")
    parser.add_argument("paths", metavar="ARM RUN", type=Path, nargs="+")
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--pilot", metavar="FILE", type=Path, default=None)
    parser.add_argument("--seconds", type=float, default=1.0, help="of the pilot's rounds")
    parser.add_argument("--keep", metavar="CELL", type=Path, default=None)
    parser.add_argument("--turns", metavar="FD", type=int, default=None)
    parser.add_argument("--parent", type=int, default=None)
    parser.add_argument("--lifeline", type=int, default=None)
    parser.add_argument("--spawned", type=int, default=None)
    options = parser.parse_args(argv)
    paths = options.paths
    if not options.prepare and options.pilot is None and len(paths) % 2:
        parser.error("arguments must be pairs: ARM RUN [ARM RUN ...], or --prepare ARM ...")
    spawned_ns = options.spawned or time.monotonic_ns()
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if options.parent is not None:
        parent_death.watch_parent(options.parent, options.lifeline)
    turns = None if options.turns is None else Channel(socket.socket(fileno=options.turns))
    if turns is not None:
        survive_hangups()
    try:
        if options.prepare:
            return prepare(paths)
        if options.pilot is not None:
            write_json(options.pilot, _unrecorded(paths, spawned_ns).pilot(options.seconds))
            return 0
        records = perform(paths[::2], paths[1::2], spawned_ns, options.keep, turns)
    except (RecordError, ConfigError) as error:
        print(one_line(error), file=sys.stderr)
        return os.EX_DATAERR
    statuses = [
        _publish(path, record, options.parent)
        for path, record in zip(paths[1::2], records, strict=True)
    ]
    return max(statuses)


def _publish(path: Path, record: Record, parent: int | None) -> int:
    if parent is not None and not parent_death.parent_is_alive(parent):
        parent_death.kill_process_group()
    try:
        try:
            write_record(path, record)
        except (TypeError, ValueError) as error:
            traceback.print_exc()
            detail = f"a value in the record is not a finite number or not JSON: {one_line(error)}"
            bare = replace(record, cases=(), counters={}, notes={})
            write_record(path, replace(bare, outcome="invalid_output", detail=detail))
    except OSError as error:
        with contextlib.suppress(OSError):  # the log cannot be written either
            print(f"{path}: {error.strerror or error}", file=sys.stderr, flush=True)
        return EXIT_CANNOT_WRITE
    return 0


if __name__ == "__main__":
    status = main()
    with contextlib.suppress(OSError):  # the disk is full; the exit status reports that
        sys.stdout.flush()
        sys.stderr.flush()
    # The record is on disk: skip the teardown of LLVM and the thread pools, which only takes time.
    os._exit(status)
