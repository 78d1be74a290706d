"""Run ``labkit.doctor.measurement_worker`` in a process and return its result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from labkit.machine.worker_environment import core_count, worker_environment

NOISE_S = 8.0
TIMEOUT_S = 120.0  # the first process on a machine also compiles


class MeasurementError(Exception):
    """The measurement failed. The message is the reason in a single line."""


def measure(
    on_step: Callable[[str], None], *, noise_s: float = NOISE_S, timeout_s: float = TIMEOUT_S
) -> dict[str, Any]:
    """Measure this machine in a process that starts the way a worker does.

    ``on_step`` is called with a description of each step as it begins. ``noise_s``: duration of the
    noise measurement. Raises ``MeasurementError`` if the process failed, or was killed after
    ``timeout_s`` seconds.
    """
    cores = core_count()
    environment, _ = worker_environment(os.environ, threads=cores, cores=cores)
    environment["OPENBLAS_NUM_THREADS"] = str(cores)
    command = [sys.executable, "-m", "labkit.doctor.measurement_worker", str(noise_s)]
    start = time.monotonic()
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        timer = threading.Timer(timeout_s, process.kill)
        timer.start()
        try:
            result = _read_messages(process, on_step)
            status = process.wait()
        finally:
            timer.cancel()
            process.kill()
        if result is not None:
            return result
        if time.monotonic() - start >= timeout_s:  # the timer killed it
            raise MeasurementError(f"no result within {timeout_s:g} s; the machine is busy")
        errors.seek(0)
        last = (errors.read().strip().splitlines() or [f"it ended with status {status}"])[-1]
        raise MeasurementError(f"the measuring process failed: {last}")


def _read_messages(
    process: subprocess.Popen[str], on_step: Callable[[str], None]
) -> dict[str, Any] | None:
    """Read the worker's messages, pass its steps to ``on_step`` and return its result.

    Returns None if the worker ends without a result.
    """
    assert process.stdout is not None
    for line in process.stdout:
        try:
            message = json.loads(line)
        except ValueError:
            continue
        if "step" in message:
            on_step(message["step"])
        if "result" in message:
            return dict(message["result"])
    return None
