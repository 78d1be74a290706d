"""Does the section "Why" name what makes an arm slower? Studies with planted causes, in processes.

    python benchmarks/named_causes.py KIND [STUDIES] OUT [--processes 10] [--share 0.05]

KIND: what is planted into one arm; ``all``: every kind in turn.

    schedule    the scheduler takes 5 % of a step longer
    attention   the attention does; no step is replayed from a captured graph, in either arm
    sample      sampling does
    idle        the engine sleeps for 5 % of a step
    padding     decode steps are padded to ``max_num_seqs`` (6 of 12 rows are padding)
    none        nothing: the arm is a copy

The last line of a kind is the number of studies that name the planted cause first, and of those
that name another. OUT keeps the studies; existing ones are read, not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
KINDS = ("schedule", "attention", "sample", "idle", "padding", "none")
ARM = "planted"
OVERRIDES = [
    "workload=uniform", "model=tiny", "ablation=none", "engine=paged", "workload.concurrency=6",
    "workload.prompts.requests=18", "workload.prompts.input.tokens=48",
    "workload.prompts.output.tokens=48", "engine.scheduler.max_num_seqs=12", "design.looks=[]",
    "design.runs_per_block=1", "design.control=false", "design.isolation=in_process",
]  # fmt: skip
KIND_VARIABLE, SHARE_VARIABLE = "LABKIT_PLANTED_KIND", "LABKIT_PLANTED_SHARE"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("kind", choices=[*KINDS, "all"])
    parser.add_argument("studies", type=int, nargs="?", default=20)
    parser.add_argument("out", type=Path)
    parser.add_argument("--processes", type=int, default=10, help="processes of each study")
    parser.add_argument("--share", type=float, default=0.05, help="of a step's time")
    options = parser.parse_args()
    os.environ[SHARE_VARIABLE] = str(options.share)
    for kind in KINDS if options.kind == "all" else [options.kind]:
        named = [study(kind, options, number) for number in range(options.studies)]
        wanted = None if kind == "none" else kind
        others = sum(cause not in (wanted, None) for cause in named)
        print(f"{kind}: named in {named.count(kind)} of {len(named)} studies, another in {others}")
    return 0


def study(kind: str, options: argparse.Namespace, number: int) -> str | None:
    """Make the missing runs of a study and return the cause that its report names."""
    from labkit import analysis, workload
    from labkit.cli import multirun_composition
    from labkit.experiment.compose.cell_composer import compose_cell, to_cell
    from labkit.experiment.launch.run_launcher import WorkerLauncher
    from labkit.experiment.schedule.cell_runner import run_cell

    folder = options.out / f"{kind}-{number:02d}"
    words = [*OVERRIDES, f"design.blocks={options.processes}", f"seed={2000 + number}"]
    if kind == "padding":
        words.append(f"+ablation.arms.{ARM}={{engine.decode_shape:fixed}}")
    multirun_composition.register()
    with multirun_composition.initialized():
        composed = compose_cell([], words)
    if kind != "padding":
        (base,) = composed.arms
        composed = replace(composed, arms=(base, replace(base, name=ARM, role="arm")))
    workload.prepare(composed.experiment)
    cell = to_cell(replace(composed, name=folder.name), folder)
    os.environ[KIND_VARIABLE] = kind
    run_cell(cell, WorkerLauncher((sys.executable, str(HERE / "named_causes.py"), "--worker")))
    (arm,) = analysis.write_cell(cell.dir)["time"]["arms"]
    print(json.dumps({"study": folder.name, "cause": arm["cause"], **_first(arm)}), flush=True)
    cause: str | None = arm["cause"]
    return cause


def _first(arm: dict[str, Any]) -> dict[str, Any]:
    return {
        "total_pct": arm["total"]["pct"],
        "parts": {
            part["part"]: [round(part["pct"] or 0, 2), part["p_adjusted"]] for part in arm["parts"]
        },
    }


class Planted:
    """The delay of the arm that has the turn, as a share of the median of its last steps."""

    def __init__(self, share: float) -> None:
        self.share, self.active = share, False
        self.steps_s, self.spent_s = deque[float](maxlen=25), 0.0

    def delayed(
        self, call: Callable[..., Any], wait: Callable[[float], None], calls: int = 1
    ) -> Callable[..., Any]:
        """Return ``call`` with a delay before it. ``calls``: how often a step calls it."""

        def slower(*arguments: Any, **options: Any) -> Any:
            if self.active:
                start = time.perf_counter()
                wait(self.share * (median(self.steps_s) if self.steps_s else 0.0) / calls)
                self.spent_s += time.perf_counter() - start
            return call(*arguments, **options)

        return slower

    def timed(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return an engine's step that measures its own time, without the planted delay."""

        def timed(*arguments: Any) -> Any:
            self.spent_s, start = 0.0, time.perf_counter()
            events = step(*arguments)
            self.steps_s.append(time.perf_counter() - start - self.spent_s)
            return events

        return timed


def spin(seconds: float) -> None:
    """Wait busily."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def plant(kind: str, share: float) -> None:
    """Plant the delay of a kind into the arm's turns in this process."""
    from labkit.engine.attention.backends.cpu_backend import CpuBackend
    from labkit.engine.llm_engine import LLMEngine
    from labkit.engine.numpy_port import kernel_graph_replay
    from labkit.engine.scheduler.scheduler import Scheduler
    from labkit.engine.step_loop import StepLoop
    from labkit.experiment.worker.worker_run import WorkerProcess

    planted, turn = Planted(share), WorkerProcess._turn

    @contextmanager
    def known(self: WorkerProcess, arm: int) -> Any:
        with turn(self, arm):
            planted.active = self.runs[arm].arm.name == ARM
            yield
            planted.active = False

    patches: Any = {
        "schedule": (Scheduler, "schedule", spin, 1),
        "attention": (CpuBackend, "forward", spin, 4),
        "sample": (StepLoop, "_sample", spin, 1),
        "idle": (LLMEngine, "step", time.sleep, 1),
    }
    WorkerProcess._turn = known  # type: ignore[method-assign]
    if kind in patches:
        owner, name, wait, calls = patches[kind]
        setattr(owner, name, planted.delayed(getattr(owner, name), wait, calls))
        LLMEngine.step = planted.timed(LLMEngine.step)  # type: ignore[method-assign]
    if kind == "attention":
        kernel_graph_replay.replay_obstacle = lambda _attention: "planted"


def work(arguments: Sequence[str]) -> int:
    """Run the worker of a study, with its planted delay."""
    from labkit.experiment.worker import __main__ as worker

    sys.argv[1:] = arguments
    if "--prepare" not in arguments:
        plant(os.environ[KIND_VARIABLE], float(os.environ[SHARE_VARIABLE]))
    return worker.main()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        status = work(sys.argv[2:])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # as the real worker does
    sys.exit(main())
