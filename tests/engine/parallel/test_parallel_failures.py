"""A failing rank is named at once, and no rank outlives the engine's process."""

import os
import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from process_state import running

from labkit.config import Budget, Engine, Scheduler, TensorParallel
from labkit.engine import Request, SamplingParams
from labkit.engine.engine_protocol import EngineError
from labkit.engine.parallel import rank_processes, tensor_parallel_engine
from labkit.engine.parallel.rank_messages import RankCall
from labkit.engine.parallel.rank_worker import RankWorker
from labkit.engine.user_classes import UserClassError

FAILING = (sys.executable, str(Path(__file__).with_name("failing_rank.py")))
ROOT = Path(__file__).parents[3]


def make(path, command=rank_processes.RANK_COMMAND, straggler_timeout_s=60.0):
    scheduler = Scheduler(max_num_seqs=3, max_num_batched_tokens=16)
    engine = Engine(parallel=TensorParallel(2), budget=Budget(blocks=64), scheduler=scheduler)
    parallel_engine = tensor_parallel_engine.create(engine, path, command, straggler_timeout_s)
    for index in range(3):
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        parallel_engine.submit(Request(str(index), tuple(range(1, 12 + index)), params))
    return parallel_engine


@pytest.mark.parametrize("has_setup", [False, True])
def test_a_rank_whose_pipe_closes_ends_without_an_error(capfd, monkeypatch, has_setup):
    ours, theirs = Pipe()
    worker = RankWorker(theirs)
    if has_setup:
        monkeypatch.setattr(worker, "_build", lambda: SimpleNamespace(notes={}))
        monkeypatch.setattr(worker, "_reply", lambda engine, result: None)
        ours.send(RankCall("set_up"))
    ours.close()
    assert worker.run() == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "has_traceback"),
    [(UserClassError("queue=a:B: key() failed", "a:B"), False), (ZeroDivisionError("x"), True)],
)
def test_a_mistake_of_a_user_s_class_is_no_traceback(capfd, monkeypatch, error, has_traceback):
    ours, theirs = Pipe()
    worker = RankWorker(theirs)
    monkeypatch.setattr(worker, "_build", Mock(side_effect=error))
    ours.send(RankCall("set_up"))
    assert worker.run() == 1
    assert ("Traceback" in capfd.readouterr().err) is has_traceback
    assert ours.recv().message == f"{type(error).__name__}: {error}"


def drain(engine):
    while engine.has_work():
        engine.step()


def gone(pids, seconds=5.0):
    end = time.monotonic() + seconds
    while any(map(running, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(running, pids))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("fewer", r"do not compute the same step \(rank 0: \w{16}; rank 1: \w{16}\)"),
        ("nothing", "do not compute the same step"),
        ("another", "sampled different tokens from the same step"),
        ("die", r"rank 1 \(process \d+\) has ended: SIGKILL"),
        ("wrong", "rank 1: ZeroDivisionError: on purpose"),
        ("stop", "rank 1: no reply 2 s after the others"),
        ("stop_forward", "^rank 1: no reply, and no CPU time used in 2 s$"),
    ],
)
def test_a_failing_rank_ends_the_step_and_all_ranks(model_dir, monkeypatch, fault, message):
    real = rank_processes.worker_environment.worker_environment

    def environment(base, **facts):
        clean, removed = real(base, **facts)
        path = os.pathsep.join([str(ROOT), clean.get("PYTHONPATH", "")])
        return clean | {"FAULT": fault, "PYTHONPATH": path}, removed

    monkeypatch.setattr(rank_processes.worker_environment, "worker_environment", environment)
    engine = make(model_dir("qwen3"), FAILING)
    if fault.startswith("stop"):  # not before: a rank that starts may use no CPU time for as long
        engine._ranks._straggler_timeout_s = 2.0
    pids = engine._ranks.pids
    with pytest.raises(RuntimeError, match=message) as caught:
        drain(engine)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, rank_processes.RankError) is (fault != "wrong")
    assert gone(pids, 0.0) and not engine.has_work()
    with pytest.raises(EngineError, match="the ranks have ended"):
        engine.submit(Request("late", (1,), SamplingParams()))
    engine.close()


OWNER = """
import sys, threading
sys.path[:0] = {paths}
from pathlib import Path
from test_parallel_failures import make
def own():
    engine = make(Path(sys.argv[1]))
    engine.step()
    print(*engine._ranks.pids, flush=True)
    return engine
{start}
sys.stdin.read()
"""
STARTS = {
    "main": "engine = own()",
    # The thread that started the ranks ends; they must not.
    "thread": "engines = []; t = threading.Thread(target=lambda: engines.append(own()))\n"
    "t.start(); t.join(); engines[0].step(); print('stepped', flush=True)",
}


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_ranks_end_with_the_process_that_started_them(model_dir, start):
    paths = [str(Path(__file__).parent), str(ROOT / "tests")]
    code = OWNER.format(paths=paths, start=STARTS[start])
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(model_dir("qwen3"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 2 and all(map(running, pids))
        if start == "thread":
            assert owner.stdout.readline() == "stepped\n"
    finally:
        owner.kill()
        owner.communicate()
    assert gone(pids)
