"""Starts the measuring process, passes its steps on and gives its result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from labkit.machine.worker_environment import core_count, worker_environment

NOISE_S = 8.0
TIMEOUT_S = 120.0  # the first time on a machine it compiles


class CannotMeasure(Exception):
    """The measuring process failed; one line says how."""


def measure(
    on_step: Callable[[str], None], *, seconds: float = NOISE_S, timeout: float = TIMEOUT_S
) -> dict[str, Any]:
    """Measure this machine in a process that starts as a worker does.

    Parameters
    ----------
    on_step
        Called with the words of each step as it begins.
    seconds
        How long the noise is measured.
    timeout
        After so many seconds the process is ended.

    Raises
    ------
    CannotMeasure
        It failed or took too long.
    """
    cores = core_count()
    environment, _ = worker_environment(os.environ, threads=cores, cores=cores)
    environment["OPENBLAS_NUM_THREADS"] = str(cores)
    command = [sys.executable, "-m", "labkit.doctor.measurement_worker", str(seconds)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        timer = threading.Timer(timeout, process.kill)
        timer.start()
        try:
            result = _follow(process, on_step)
            status = process.wait()
        finally:
            timer.cancel()
            process.kill()
        if result is not None:
            return result
        errors.seek(0)
        last = (errors.read().strip().splitlines() or [f"it ended with status {status}"])[-1]
        raise CannotMeasure(f"the measuring process failed: {last}")


def _follow(
    process: subprocess.Popen[str], on_step: Callable[[str], None]
) -> dict[str, Any] | None:
    assert process.stdout is not None
    for line in process.stdout:
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if "step" in said:
            on_step(said["step"])
        if "result" in said:
            return dict(said["result"])
    return None
