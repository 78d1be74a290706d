"""The real worker on a stub workload, with faults on demand (tests only).

``LABKIT_TEST_FAULT`` is ``STAGE:KIND[:ARM[:BLOCK]]``, or several with blanks between: at that
stage (startup, load, warm_up, measure, write) of that arm's runs (all arms by default; where
several share the process, of the arms with that resolver) do KIND: kill, segv, hang, exit, raise,
value, memory, nan, inf-json, norecord, stale, poison. The stages of a preparation are
prepare-load and prepare-warm_up.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np

from labkit import records as record
from labkit.experiment.worker import __main__ as worker
from labkit.experiment.worker import worker_setup
from labkit.machine.facts import machine_snapshot
from labkit.records import CaseRecord, Metric
from labkit.workload.output_digest import array_outputs
from labkit.workload.turn_order import Part

# These outlive their package, which is replaced below.
from labkit.workload.workload_protocols import CasePilot, InvalidOutput, Measurement, StaleOutput

compilers = []  # called at a compilation, as numba does


class StubProbe:
    """No numba: the tests of the processes need no kernels."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def time(self) -> dict[str, float]:
        return {"matmul_us": 100.0, "bandwidth_us": 1000.0}


def fault(stage: str, resolver: str = "") -> str | None:
    faults = os.environ.get("LABKIT_TEST_FAULT", "").split()
    kinds = (kind_at(stage, resolver, *one.split(":")) for one in faults)
    return next(filter(None, kinds), None)


def kind_at(
    stage: str, resolver: str, place: str, kind: str, arm: str = "", block: str = ""
) -> str | None:
    prepares = "--prepare" in sys.argv
    runs = [word for word in sys.argv if ("arms/" if prepares else "pending") in word]
    own = f"/{arm}.json" if prepares else f"-{arm}.json"
    mine = resolver == arm if len(runs) > 1 else any(own in run for run in runs)
    if place != (f"prepare-{stage}" if prepares else stage) or (arm and not mine):
        return None
    if block and not any(block in run for run in runs):
        return None
    return kind


def strike(stage: str, resolver: str = "") -> str | None:
    kind = fault(stage, resolver)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "segv":
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "clock":  # the wall clock jumps back at every look
        steps = iter(range(10**9, 0, -1000))
        time.time = lambda: float(next(steps))
        time.time_ns = lambda: next(steps) * 10**9
        machine_snapshot.utc_now = lambda: f"2001-09-07T00:00:{next(steps):011d}Z"
    if kind == "hang":
        Path(os.environ["LABKIT_TEST_HANGS"]).touch()
        time.sleep(3600)
    if kind == "leave":  # a process of its own that nobody waits for
        subprocess.Popen(["sleep", os.environ["LABKIT_TEST_SLEEP"]])
    if kind == "exit":
        os._exit(7)
    if kind == "norecord":
        os._exit(0)
    errors = {
        "raise": RuntimeError("planted"),
        "value": ValueError("planted value"),
        "memory": MemoryError(),
        "stale": StaleOutput("planted stamp"),
        "poison": InvalidOutput("planted NaN"),
    }
    if kind in errors:
        raise errors[kind]
    return kind


class StubTurns:
    """Arms that are their resolvers, each with a single turn."""

    def __init__(self, resolvers: list[str], setting) -> None:
        self.resolvers, self.setting = resolvers, setting
        for arm, resolver in enumerate(resolvers):
            with setting.turn(arm):
                strike("load", resolver)

    def warm_up(self) -> None:
        for arm, resolver in enumerate(self.resolvers):
            with self.setting.turn(arm):
                strike("warm_up", resolver)

    prepare = warm_up

    def pilot(self, seconds: float) -> list[CasePilot]:
        self.warm_up()
        return [CasePilot("+".join(self.resolvers), seconds, 0.1, 0.2, 3)]

    def measure(self, beat) -> list[Measurement]:
        if self.setting.granted is not None:  # one turn, in turn with those of other processes
            for _ in self.setting.turn_order.rounds([Part("one", 1, (0,))]):
                cases = [self.measured(self.resolvers[0], beat)]
            return cases
        cases = []
        for arm, resolver in enumerate(self.resolvers):
            with self.setting.turn(arm):
                cases.append(self.measured(resolver, beat))
        return cases

    def measured(self, resolver: str, beat) -> Measurement:
        kind = strike("measure", resolver)
        if kind == "compile":
            compilers[-1]()
            compilers[-1]()
        time.sleep(float(os.environ.get("LABKIT_TEST_SECONDS", "0")))
        beat("one")
        value = float("nan") if kind == "nan" else 100.0 + self.setting.seed
        metric = Metric("dispatch_us", "us", "lower", True, (value, 101.0, 102.0))
        engaged = 0.0 if kind == "vacuous" else 3.0
        counters = {"engine.paged": 1.0, "resolver.seq_map": engaged}
        values = np.full((3, 2, 4), 1.5 if kind == "differ" else 1.0, np.float32)
        outputs = array_outputs(values)
        case = CaseRecord("one", None, (metric,), outputs)
        return Measurement((case,), counters, {"workload": "stub"}, {outputs["digest"]: values})

    def close(self) -> None:
        pass


def start_probe(on_compile):
    compilers.append(on_compile)
    return StubProbe(1), {}


def load(experiments, setting) -> StubTurns:
    return StubTurns([e.engine.attention.resolver for e in experiments], setting)


def write_record(path, body) -> None:
    kind = strike("write")
    if kind == "full":
        raise OSError(28, "No space left on device")
    if kind == "nan-json":
        data = body.to_json()
        data["cases"][0]["metrics"][0]["repeats"] = [float("nan")]
        path.write_text(json.dumps(data))
    elif kind == "half":
        path.write_text(json.dumps(body.to_json())[:200])
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        record.write_record(path, body)


if __name__ == "__main__":
    strike("startup")
    numba = types.ModuleType("numba")  # importing the real one takes most of a stub run
    numba.config = types.SimpleNamespace(NUMBA_NUM_THREADS=64)
    numba.set_num_threads = lambda threads: None
    sys.modules["numba"] = numba
    stub = types.ModuleType("labkit.workload")
    stub.load, stub.prepare = load, lambda experiment: None
    sys.modules["labkit.workload"] = stub
    import labkit

    labkit.workload = stub
    worker_setup.start_probe = start_probe
    worker_setup.forget_own_stop = lambda: None  # the pool is numba's
    worker_setup.needs_peak_rates = lambda experiment, block: False  # would compile with numba
    worker.write_record = write_record
    sys.exit(worker.main())
