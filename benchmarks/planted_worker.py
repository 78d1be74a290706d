"""The worker with a delay planted into arms whose names begin with ``planted``.

``planted_1pct`` is 1 % slower. Everything else is the real worker. The delay is planted where the
arm's config allows it:

- kernels: inside the launch
- video: inside the request for a clip's frames
- engines: inside the step; with ``engine.pipeline=overlap``, between two launches, when no step is
  in flight that would hide the delay
- labkit's server: inside the steps of the server's engine (``planted_server.py``)
- other servers: halfway through each turn the server is stopped, while the arm's clock runs on
- an arm with a revision of its own: nowhere, because its revision is slower
  (``planted_revision.py``)

With ``--beside FOLDER`` as the first arguments, two of these workers live at the same time and
alternate: a turn is one round of a kernel case, or a slice of an engine's steps. Only one of them
works at any moment. FOLDER holds the pipes through which they signal.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from labkit import config
from labkit.experiment.worker import __main__ as worker
from labkit.experiment.worker.worker_run import WorkerProcess
from labkit.records import read_arm

HERE = Path(__file__).resolve().parent


def planted_share(arm: str) -> float:
    """Return the share by which an arm is slower, for example 0.01 for ``planted_1pct``."""
    planted = re.match(r"planted_([\d.]+)pct", arm)
    return float(planted[1]) / 100 if planted else 0.0


class Planted:
    """Slows the arm that is being measured by ``share``, for example 0.01 for 1 %.

    ``since``: when the arm's turn began, or when the last delay of ``slow_period`` ended.
    """

    share = 0.0
    since = 0.0

    def slow(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call`` with a busy wait of ``share`` times its own duration after it."""

        def slower(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = call(*arguments, **options)
            end = time.perf_counter()
            spin_until(end + self.share * (end - start))
            return result

        return slower

    def slow_period(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call`` with a busy wait of ``share`` times the time since ``since`` after it."""

        def slower(*arguments: Any, **options: Any) -> Any:
            result = call(*arguments, **options)
            now = time.perf_counter()
            spin_until(now + self.share * (now - self.since))
            self.since = time.perf_counter()
            return result

        return slower


def spin_until(end: float) -> None:
    """Wait busily until ``time.perf_counter`` reaches ``end``."""
    while time.perf_counter() < end:
        pass


def plant() -> None:
    """Plant the delay where the config of the process's first arm allows it."""
    arm = read_arm(Path(sys.argv[1]))
    engine = arm.config.get("engine", {})
    if arm.environment:
        return
    if engine.get("name") != "openai":
        plant_calls(engine.get("pipeline"), arm.config["workload"]["kind"])
    elif engine["server"]["preset"] == "labkit":
        plant_server(planted_share(arm.name))
    else:
        plant_turns(planted_share(arm.name))


def plant_calls(pipeline: str | None, workload: str) -> None:
    """Plant the delay into the operations of this process that are timed."""
    from labkit.engine.attention.backends.cpu_backend import CpuBackend
    from labkit.engine.llm_engine import LLMEngine
    from labkit.engine.step_loop import StepLoop

    planted, turn = Planted(), WorkerProcess._turn

    @contextmanager
    def known(self: WorkerProcess, arm: int) -> Any:
        with turn(self, arm):
            planted.share = planted_share(self.runs[arm].arm.name)
            planted.since = time.perf_counter()
            yield
            planted.share = 0.0

    WorkerProcess._turn = known  # type: ignore[method-assign]
    if workload == "kernel":
        CpuBackend.forward = planted.slow(CpuBackend.forward)  # type: ignore[method-assign]
    elif workload == "video":
        from labkit.workload.video.interleaved_frame_decoding import InterleavedVideo

        initialize = InterleavedVideo.__init__

        def with_slow_requests(self: InterleavedVideo, *arguments: Any, **options: Any) -> None:
            initialize(self, *arguments, **options)
            self._take = planted.slow(self._take)

        InterleavedVideo.__init__ = with_slow_requests  # type: ignore[method-assign]
    elif pipeline == "overlap":  # its steps wait here for the step in flight
        StepLoop._finish = planted.slow_period(StepLoop._finish)  # type: ignore[method-assign]
    else:
        LLMEngine.step = planted.slow(LLMEngine.step)  # type: ignore[method-assign]


def plant_server(share: float) -> None:
    """Make this process start ``planted_server.py`` instead of ``-m labkit.serve``."""
    from labkit.engine.openai import server_process

    build_command = server_process.build_command

    def planted_command(options: config.Engine, model_dir: Path, port: int) -> list[str]:
        python, _, _, *overrides = build_command(options, model_dir, port)
        return [python, str(HERE / "planted_server.py"), str(share), *overrides]

    if share:
        server_process.build_command = planted_command


def plant_turns(share: float) -> None:
    """Make each turn longer by ``share``; the server is stopped (SIGSTOP) meanwhile, halfway."""
    from labkit.machine.processes.process_tree import ProcessTree
    from labkit.machine.processes.server_supervisor import SupervisedServer
    from labkit.workload.requests.interleaved_serving_arms import InterleavedServing

    initialize, run_slice = SupervisedServer.__init__, InterleavedServing._run_slice
    servers: list[ProcessTree] = []

    def started(self: SupervisedServer, *arguments: Any) -> None:
        initialize(self, *arguments)
        servers.append(ProcessTree(self.pid, whole_group=False))

    def longer(self: InterleavedServing, arm: Any, progress: Any) -> None:
        turn_s = self._order.slice_s
        self._order.slice_s = turn_s / 2  # type: ignore[misc]
        run_slice(self, arm, progress)
        with arm.clock.running():
            end = arm.clock() + share * turn_s
            for server in servers:
                server.signal(signal.SIGSTOP)
            time.sleep(max(0.0, end - arm.clock()))
            for server in servers:
                server.signal(signal.SIGCONT)
        run_slice(self, arm, progress)
        self._order.slice_s = turn_s  # type: ignore[misc]

    if share:
        SupervisedServer.__init__ = started  # type: ignore[method-assign,assignment]
        InterleavedServing._run_slice = longer  # type: ignore[method-assign]


PARKED_S = 0.004  # pause before a turn ends: twice as long as an idle thread of the pool spins
PATIENCE_S = 60.0
MORE_THAN_ROUNDS = 10_000  # more turns than a measurement has; the bytes fit into a pipe


class Beside:
    """The other worker, which alternates with this one.

    Each worker reads two named pipes, ``FOLDER/ARM.there`` and ``FOLDER/ARM.turn``. A byte in
    ``there`` says that the other worker has reached the meeting point; one in ``turn`` grants a
    turn.
    """

    def __init__(self, folder: Path, arm: str) -> None:
        self._pipes = {}
        for path in folder.iterdir():  # read and write: neither opening nor writing blocks
            owner, _, pipe = path.name.rpartition(".")
            self._pipes[owner == arm, pipe] = os.open(path, os.O_RDWR)
        self._mine = arm == min(path.stem for path in folder.iterdir())

    def next_turn(self) -> None:
        """End this process's turn, if it has the turn, and wait for the next one."""
        if self._mine:
            time.sleep(PARKED_S)
            self.tell("turn")
        self.hear("turn")
        self._mine = True

    def tell(self, pipe: str, times: int = 1) -> None:
        """Write ``times`` bytes to a pipe of the other process."""
        os.write(self._pipes[False, pipe], b"." * times)

    def hear(self, pipe: str) -> None:
        """Wait for a byte that the other process writes to a pipe of this process."""
        mine = self._pipes[True, pipe]
        if not select.select([mine], [], [], PATIENCE_S)[0]:
            raise TimeoutError(f"the other process did not respond within {PATIENCE_S:g} s")
        os.read(mine, 1)

    def meet(self) -> None:
        """Wait until both processes have reached this point."""
        self.tell("there")
        self.hear("there")


def take_turns(beside: Beside) -> None:
    """Patch the measurement so that each round or slice waits until the other process's is over."""
    from labkit.workload.kernels.interleaved_kernels import InterleavedKernels
    from labkit.workload.requests.interleaved_serving_arms import (
        InterleavedServing,
        ServingProgress,
        stalled_seconds,
    )

    pulse = InterleavedKernels._pulse

    def round_begins(self: Any) -> float:
        beside.next_turn()
        return pulse(self)

    def in_slices(self: Any, heartbeat: Callable[[str], None]) -> Any:
        (arm,) = self._arms
        progress = ServingProgress(arm.session.start(heartbeat))
        while not progress.generator.done:
            beside.next_turn()
            with self._turn(0):
                self._run_slice(arm, progress)
        (stalled_s,) = stalled_seconds([progress.step_times()])
        return [arm.session.measurement(progress.generator, stalled_s)]

    def together(measure: Any) -> Any:
        def measured(self: Any, heartbeat: Callable[[str], None]) -> Any:
            beside.meet()
            try:
                return measure(self, heartbeat)
            finally:
                beside.tell("turn", MORE_THAN_ROUNDS)
                beside.meet()

        return measured

    InterleavedKernels._pulse = round_begins  # type: ignore[method-assign]
    InterleavedKernels.measure = together(InterleavedKernels.measure)  # type: ignore[method-assign]
    InterleavedServing._measure = in_slices  # type: ignore[method-assign]
    InterleavedServing.measure = together(InterleavedServing.measure)  # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv[1] == "--beside":
        folder = Path(sys.argv[2])
        del sys.argv[1:3]
        take_turns(Beside(folder, Path(sys.argv[1]).stem))
    if not {"--prepare", "--pilot"} & set(sys.argv):  # only costs and noise count in a pilot
        plant()
    status = worker.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # as the real worker does
