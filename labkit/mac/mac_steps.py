"""The steps of ``make mac``: commands that run one after another.

A step's output is written to a log and shown on the screen at the same time. If a step fails, the
next step still runs. Only ctrl-C stops the sequence.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

PASSED = "passed"
INTERRUPTED = "interrupted"
NOT_RUN = "not run"
# A kernel that hangs the GPU must not prevent the other steps.
STEP_TIMEOUT_S = 2 * 3600.0
STOP_TIMEOUT_S = 10.0  # for an interrupted step to finish its files
POLL_S = 0.2

ON_METAL = "engine.attention.device=metal"
HALF_KERNELS = "workload.dtype=float16"
HALF_SERVING = "engine.dtype=float16"
# Matrix products in full float32, so that the tokens can equal those of the reference.
EXACT_FLOAT32 = ("engine.dtype=float32", "engine.mlx.tf32=false")
# In half precision, mlx_lm and steps of other shapes may round a near tie to another token.
NO_IDENTITY = "ablation.claims.identity=none"
DECODE_ABLATIONS = "grid,split_kv,resolver,block_size"
REFERENCE_ARM = "{engine.attention.backend:reference,engine.attention.device:cpu}"
MLX_LM_ARM = "{engine:mlx_lm,engine.attention.device:cpu}"
VERIFICATION_FILE = "answers.md"


@dataclass(frozen=True)
class MacStep:
    """One command: this Python interpreter with ``arguments``, such as ``-m labkit ...``."""

    name: str
    description: str
    arguments: tuple[str, ...]

    @property
    def command(self) -> str:
        """The command as a person would type it."""
        return " ".join(["python", *map(shlex.quote, self.arguments)])


@dataclass(frozen=True)
class StepOutcome:
    """How a step ended: ``passed``, ``interrupted``, ``not run`` or ``failed (...)``."""

    step: MacStep
    status: str
    seconds: float = 0.0


def study_step(folder: Path, name: str, description: str, *overrides: str) -> MacStep:
    """Return the step that runs a study in a folder of its own below ``folder``."""
    out = f"out={(folder / name).as_posix()}"
    return MacStep(name, description, ("-m", "labkit", *overrides, out, "-m"))


def all_steps(folder: Path, memory_bytes: int) -> tuple[MacStep, ...]:
    """Return the steps for a Mac with ``memory_bytes`` of RAM. Their studies go to ``folder``.

    The largest case of ``ablation=seq_map`` has 4 GiB of keys and values in float16. It is measured
    if that is at most a sixth of the RAM.
    """
    pool_limit = f"workload.max_pool_bytes={max(1 << 30, memory_bytes // 6)}"
    kernels = ("engine=paged", ON_METAL, HALF_KERNELS, pool_limit)
    kernel_ablations = f"ablation=seq_map,{DECODE_ABLATIONS}"
    serving = ("engine=paged", ON_METAL, HALF_SERVING, NO_IDENTITY, "model=small")
    study, answers = partial(study_step, folder), (folder / VERIFICATION_FILE).as_posix()
    return (
        MacStep(
            "tests",
            "the Metal tests: every kernel, type and size against a float64 oracle",
            ("-m", "pytest", "-m", "metal", "-n", "0", "-p", "no:cacheprovider"),
        ),
        MacStep(
            "answers",
            "the cases of the studies below, on Metal, against the reference on the CPU",
            ("-m", "labkit.mac.kernel_verification", answers, *kernels, kernel_ablations, "-m"),
        ),
        study(
            "served_answers",
            "tokens served on Metal against those of the reference on the CPU",
            *("engine=paged", ON_METAL, *EXACT_FLOAT32, "workload=uniform_4", "design=quick"),
            *("ablation.claims.identity=tokens", f"+ablation.arms.reference={REFERENCE_ARM}"),
        ),
        study("seq_map", "seq_map against binary search, in float16", *kernels, "ablation=seq_map"),
        study(
            "decode",
            "the grid, split keys, resolvers and block sizes in decode attention",
            *(*kernels, f"ablation={DECODE_ABLATIONS}"),
        ),
        study(
            "decode_shape",
            "decode steps of constant shape, served",
            *(*serving, "ablation=decode_shape"),
        ),
        study(
            "serving",
            "labkit's engine against mlx_lm",
            *(*serving, "workload=ragged", f"+ablation.arms.mlx_lm={MLX_LM_ARM}"),
        ),
    )


def run_steps(
    steps: Sequence[MacStep],
    logs: Path,
    show: Callable[[str], None],
    timeout_s: float = STEP_TIMEOUT_S,
) -> list[StepOutcome]:
    """Run the steps in order and return their outcomes. After ctrl-C no further step runs.

    ``logs``: an existing folder, to which the logs ``STEP.log`` are written. ``show``: called with
    a step's output as it is written. ``timeout_s``: seconds after which a step is stopped.
    """
    outcomes: list[StepOutcome] = []
    for number, step in enumerate(steps, 1):
        if outcomes and outcomes[-1].status in (INTERRUPTED, NOT_RUN):
            outcomes.append(StepOutcome(step, NOT_RUN))
            continue
        show(f"\n[{number}/{len(steps)}] {step.name}: {step.description}\n{step.command}\n")
        outcomes.append(_run_step(step, logs / f"{step.name}.log", show, timeout_s))
        show(f"{step.name}: {outcomes[-1].status}\n")
    return outcomes


def _run_step(
    step: MacStep, log: Path, show: Callable[[str], None], timeout_s: float
) -> StepOutcome:
    start = time.monotonic()
    status = None
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *step.arguments],
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    with log.open(encoding="utf-8", errors="replace") as text:
        try:
            status = _show_until_exit(process, text, show, start + timeout_s)
        except KeyboardInterrupt:
            status = INTERRUPTED
        if status is not None:
            _stop(process)
        show(text.read())
    if status is None:
        status = PASSED if process.returncode == 0 else f"failed (exit {process.returncode})"
    return StepOutcome(step, status, time.monotonic() - start)


def _show_until_exit(
    process: subprocess.Popen[bytes], text: TextIO, show: Callable[[str], None], deadline: float
) -> str | None:
    """Show the log until the process exits or the deadline passes.

    Returns the step's status if the deadline passed, otherwise None.
    """
    while process.poll() is None:
        show(text.read())
        if time.monotonic() > deadline:
            return "failed (took too long)"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
    return None


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Wait until the process exits; if it does not exit in time, terminate it, then kill it.

    After ctrl-C the process usually exits by itself, because it receives the signal too.
    """
    for stop_harder in (process.terminate, process.kill):
        try:
            process.wait(STOP_TIMEOUT_S)
            return
        except subprocess.TimeoutExpired:
            stop_harder()
        except KeyboardInterrupt:  # pressed again
            process.kill()
    process.wait()
