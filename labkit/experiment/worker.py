"""A run's process: ``python -m labkit.experiment.worker ARM RUN``.

``ARM`` is ``arms/ARM.json`` and ``RUN`` the record to write, ``.../b00-p02-ARM.json``,
whose name says block, position and arm. ``--prepare ARM`` loads and warms up an arm
without measuring, so that no compilation falls inside a measured run. The stages are in
:mod:`labkit.experiment.stages`; the record is written by rename, or not at all where the
parent is gone.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import resource
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from labkit.config import ConfigError
from labkit.experiment import environment, stages, watchdog
from labkit.experiment.record import Record, RecordError, parse_run_name, read_arm, write
from labkit.experiment.stages import Draft, Stopwatch, one_line

EXIT_CANNOT_WRITE = os.EX_IOERR


def perform(arm_path: Path, run_path: Path, spawned_ns: int) -> Record:
    """Do one run and give its record, whatever its outcome.

    Raises
    ------
    RecordError
        The arm's file is not valid, or the run's name does not fit it.
    """
    arm = read_arm(arm_path)
    block, position, name = parse_run_name(run_path.stem)
    if name != arm.name:
        raise RecordError(f"{run_path}: a run of arm {name}, but {arm_path} is arm {arm.name}")
    watch = Stopwatch(spawned_ns)
    watch.seconds["startup"] = watch.since_spawn()
    seed = int(arm.config.get("seed", 0))
    started = environment.utc_now()
    record = Record(name, arm.role, block, position, seed, outcome="ok", started=started)
    draft = Draft(record, watch)
    stages.run(draft, arm)
    draft.note(compiles=draft.compiles)
    return replace(draft.record, seconds={**watch.seconds, "total": watch.since_spawn()})


def prepare(arm_path: Path) -> None:
    """Compile, build and cache whatever the arm's runs will need."""
    from labkit import workload

    arm = read_arm(arm_path)
    experiment = stages.experiment_of(arm)
    record = Record(arm.name, arm.role, 0, 0, experiment.seed, "ok", environment.utc_now())
    draft = Draft(record, Stopwatch(time.monotonic_ns()))
    stages.start_probe(draft).time()
    workload.prepare(experiment)
    session = stages.load(experiment, draft)
    try:
        session.warm_up()
    finally:
        session.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 0 whenever a record was written."""
    parser = argparse.ArgumentParser(prog="python -m labkit.experiment.worker")
    parser.add_argument("arm", type=Path)
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--parent", type=int, default=None)
    parser.add_argument("--lifeline", type=int, default=None)
    parser.add_argument("--spawned", type=int, default=None)
    options = parser.parse_args(argv)
    if options.prepare == (options.run is not None):
        parser.error("give a run to do, or --prepare")
    spawned_ns = options.spawned or time.monotonic_ns()
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if options.parent is not None:
        watchdog.start(options.parent, options.lifeline)
    try:
        if options.prepare:
            prepare(options.arm)
            return 0
        record = perform(options.arm, options.run, spawned_ns)
    except (RecordError, ConfigError) as error:
        print(one_line(error), file=sys.stderr)
        return os.EX_DATAERR
    return _publish(options.run, record, options.parent)


def _publish(path: Path, record: Record, parent: int | None) -> int:
    if parent is not None and not watchdog.alive(parent):
        watchdog.end()
    try:
        try:
            write(path, record)
        except (TypeError, ValueError) as error:
            traceback.print_exc()
            detail = f"a value in the record is not a finite number or not JSON: {one_line(error)}"
            bare = replace(record, cases=(), counters={}, notes={})
            write(path, replace(bare, outcome="invalid_output", detail=detail))
    except OSError as error:
        print(f"{path}: {error.strerror or error}", file=sys.stderr)
        return EXIT_CANNOT_WRITE
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # The record is on disk: taking LLVM and the thread pools apart would only cost time.
    os._exit(status)
