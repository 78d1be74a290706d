"""Live sets: processes that take turns, and what is left when one of them or the parent dies."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from labkit import config
from labkit.experiment import Interrupted, StudyError
from labkit.experiment.launch import child_process, turn_coordinator
from labkit.experiment.launch.child_process import ChildProcess, Ticker
from labkit.experiment.launch.interrupt_signals import InterruptSignals
from labkit.experiment.launch.turn_coordinator import LiveCommand
from labkit.experiment.worker.granted_turns import GrantedTurns
from labkit.experiment.worker.run_draft import StageTimer
from labkit.experiment.worker.turn_protocol import Channel, ProtocolError
from labkit.experiment.worker.worker_status import SharedStatus
from labkit.machine.processes import process_tree
from labkit.workload.turn_order import Part, Round

WORKER = Path(__file__).with_name("live_worker.py")
ROOT = str(WORKER.parents[2])


def commands(folder: Path, timeout_s: float = 600.0, **tasks: str) -> dict[str, LiveCommand]:
    """Return the workers' commands; ``tasks``: what each does (``live_worker.py``)."""
    environment = {**os.environ, "PYTHONPATH": ROOT}
    return {
        name: LiveCommand(
            (sys.executable, str(WORKER), name, task, str(folder)),
            environment,
            folder / f"{name}.log",
            SharedStatus(),
            timeout_s,
        )
        for name, task in tasks.items()
    }


def run(folder: Path, timeout_s: float = 60.0, seed: int = 0, load_together=True, **tasks: str):
    """Run a set, and return how its processes ended and what those that finished have logged."""
    endings = turn_coordinator.run(
        commands(folder, timeout_s, **tasks),
        order=random.Random(seed),
        on_tick=lambda: None,
        load_together=load_together,
    )
    logs = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    return endings, logs


def turns(logs) -> list[tuple[str, object]]:
    """Return all turns in the order of time, as pairs of a worker and what it was told."""
    every = [(start, name, what) for name, log in logs.items() for start, _, what in log["turns"]]
    return [(name, what) for _, name, what in sorted(every)]


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """How three workers ended that took turns, and their logs."""
    return run(tmp_path_factory.mktemp("three"), x="rounds", y="rounds", z="rounds")


def test_every_round_has_every_arm_once_and_positions_are_balanced(three):
    endings, logs = three
    assert [ending.code for ending in endings] == [0, 0, 0]
    order = turns(logs)
    rounds = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert len(rounds) == 9
    for one in rounds:
        assert sorted(name for name, _ in one) == ["x", "y", "z"]
        assert [position for _, (_, position) in one] == [0, 1, 2]
        assert len({part for _, (part, _) in one}) == 1
    firsts = [one[0][0] for one in rounds if one[0][1][0] == "b"]
    assert sorted(firsts) == ["x", "y", "z"]


def test_the_processes_of_an_arm_know_that_they_are_stopped(three):
    _, logs = three
    assert [log["takes_turns"] for log in logs.values()] == [True] * 3


def test_only_the_process_that_has_the_turn_runs(three):
    _, logs = three
    ticks = {name: log["ticks"] for name, log in logs.items()}
    for name, log in logs.items():
        turns_of_it = [(start, end) for start, end, _ in log["turns"]]
        others = [at for other in set(logs) - {name} for at in ticks[other]]
        assert not [at for at in others for s, e in turns_of_it if s < at < e]
        # On a busy machine a short turn may be over before the next tick.
        assert [at for at in ticks[name] for s, e in turns_of_it if s < at < e]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_child_in_a_session_of_its_own_is_stopped_and_ends_with_its_worker(tmp_path):
    _, logs = run(tmp_path, x="fork", y="rounds")
    assert logs["x"]["ticks"]
    for start, end, _ in logs["y"]["turns"]:
        assert not any(start < at < end for at in logs["x"]["ticks"])
    assert any(s < at < e for s, e, _ in logs["x"]["turns"] for at in logs["x"]["ticks"])
    assert not left(tmp_path)


def test_workers_may_have_rounds_again_after_an_exchange(tmp_path):
    endings, logs = run(tmp_path, x="stages", y="stages")
    assert [ending.code for ending in endings] == [0, 0]
    assert {name: len(log["turns"]) for name, log in logs.items()} == {"x": 18, "y": 18}
    assert logs["x"]["gathered"] == [["x", "y"], 0] and logs["y"]["gathered"] == [["x", "y"], 1]


@pytest.fixture
def alarm():
    """Let a test fail that would hang: nothing else interrupts a send that blocks."""

    def late(number, frame):
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_messages_may_be_longer_than_a_socket_s_buffer(tmp_path, alarm):
    endings, logs = run(tmp_path, x="long", y="long")
    assert [ending.code for ending in endings] == [0, 0]
    values = ["x" * (1 << 20), "y" * (1 << 20)]
    assert logs["x"]["gathered"] == [values, 0] and logs["y"]["gathered"] == [values, 1]
    assert {name: len(log["turns"]) for name, log in logs.items()} == {"x": 18, "y": 18}


def test_a_worker_that_reads_no_message_is_killed_when_its_time_is_over(tmp_path, time_over, alarm):
    endings, logs = run(tmp_path, x="long", y="deaf")
    assert [ending.timed_out for ending in endings] == [False, True]
    assert len(logs["x"]["turns"]) == 18


def test_a_signal_ends_a_set_whose_worker_reads_no_message(tmp_path, monkeypatch, alarm):
    hangs = tmp_path / "hangs"
    monkeypatch.setenv("LABKIT_TEST_HANGS", str(hangs))

    def interrupt():
        while not hangs.exists():
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(Interrupted, match="SIGINT"):
        run(tmp_path, x="long", y="deaf")
    thread.join()
    assert not left(tmp_path)


def test_workers_that_are_not_ready_for_the_same_are_refused(tmp_path):
    with pytest.raises(ProtocolError, match="workers sent parts and slices"):
        run(tmp_path, x="rounds", y="slices")


def test_slices_end_for_each_arm_alone_and_all_get_the_values_of_all(tmp_path):
    endings, logs = run(tmp_path, x="slices", yyyy="slices")
    assert [ending.code for ending in endings] == [0, 0]
    assert {what for _, what in turns(logs)} == {turn_coordinator.SLICE_S}
    assert {name: len(log["turns"]) for name, log in logs.items()} == {"x": 1, "yyyy": 4}
    assert logs["x"]["gathered"] == [["1 turns", "4 turns"], 0]
    assert logs["yyyy"]["gathered"] == [["1 turns", "4 turns"], 1]


def test_a_worker_reads_for_how_long_it_was_stopped(three):
    _, logs = three
    for name, log in logs.items():
        others = [one for other, one in logs.items() if other != name]
        others_s = sum(end - start for one in others for start, end, _ in one["turns"])
        in_turn_s = sum(end - start for start, end, _ in log["turns"])
        assert others_s < log["stopped_s"] < log["alive_s"] - in_turn_s


def test_a_stop_begins_before_the_processes_of_other_groups_are_stopped(tmp_path, monkeypatch):
    """The more processes an arm had, the more time of each turn would be charged to it."""
    now, send = [0.0], process_tree._send

    def slow_send(process, number):
        send(process, number)
        now[0] += 1.0

    clock = SimpleNamespace(**{**vars(time), "perf_counter": lambda: now[0]})
    monkeypatch.setattr(turn_coordinator, "time", clock)
    monkeypatch.setattr(process_tree, "time", clock)
    monkeypatch.setattr(process_tree, "_send", slow_send)
    _, logs = run(tmp_path, x="rounds")
    # A second for the stop after each answer: hello, probed, loaded, parts, nine times done. The
    # signals to continue are sent on the running clock.
    assert logs["x"]["stopped_s"] == 13.0


def test_threads_are_placed_before_turns_and_released_after_them(three, tmp_path, monkeypatch):
    """They are loaded one after the other; the three were together."""
    calls = []

    class Placement:
        def place(self, arm, pids):
            calls.append(("place", arm, len(pids) > 0))

        def release(self, arm, pids):
            calls.append(("release", arm, len(pids) > 0))

    monkeypatch.setattr(turn_coordinator, "ThreadPlacement", Placement)
    _, logs = run(tmp_path, load_together=False, x="rounds", y="rounds")
    for loaded, together in ((three[1], True), (logs, False)):
        (_, first_end), (second_start, _), *_ = sorted(log["loaded"] for log in loaded.values())
        assert (second_start < first_end) == together
    assert [len(log["turns"]) for log in logs.values()] == [9, 9]
    placed = [("place", arm, True) for arm in (0, 1)] * 2  # at the first and the sixth turn
    assert sorted(calls[:4]) == sorted(placed)
    assert calls[4:] == [("release", 0, True), ("release", 1, True)]


def test_a_killed_worker_ends_alone(tmp_path):
    endings, logs = run(tmp_path, x="rounds", y="kill", z="rounds")
    assert [ending.signal_name for ending in endings] == [None, "SIGKILL", None]
    assert {name: len(log["turns"]) for name, log in logs.items()} == {"x": 9, "z": 9}


def test_turns_on_a_system_without_waitid(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "waitid", raising=False)  # macOS before Python 3.13
    endings, logs = run(tmp_path, x="rounds", y="rounds")
    assert [ending.code for ending in endings] == [0, 0]
    assert {name: len(log["turns"]) for name, log in logs.items()} == {"x": 9, "y": 9}


def test_a_process_that_ended_instead_of_stopping_keeps_its_status(tmp_path):
    exits = [sys.executable, "-S", "-c", "raise SystemExit(3)"]
    child = ChildProcess(exits, InterruptSignals(), environment=os.environ, log=tmp_path / "log")
    child.await_stop()
    assert child.ended and child.close().code == 3


def test_a_short_turn_has_no_tick_in_it(tmp_path, monkeypatch):
    waits = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    answer, answers = os.pipe()
    ticks = []
    ticker = Ticker(lambda: ticks.append(time.monotonic()))
    ticker.due = 0.0
    with InterruptSignals() as signals:
        child = ChildProcess(waits, signals, environment=os.environ, log=tmp_path / "log")
        threading.Timer(0.05, os.write, (answers, b"done")).start()
        assert not child.wait_or_abort(child.now() + 60, ticker, [answer])
        assert ticks == [] and os.read(answer, 9) == b"done"
        monkeypatch.setattr(child_process, "TICK_S", 0.01)
        assert child.wait_or_abort(child.now() + 0.2, ticker, [answer])
        assert ticks  # of a long stage
    child.close()
    os.close(answer), os.close(answers)


def test_a_worker_that_hangs_in_its_turn_is_killed_when_its_own_time_is_over(tmp_path, time_over):
    endings, logs = run(tmp_path, x="rounds", y="hang")
    assert [ending.timed_out for ending in endings] == [False, True]
    assert len(logs["x"]["turns"]) == 9


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("old", "arm y: its worker uses version 3 of the turn protocol.* version 2"),
        ("garbage", "not a message of the turn protocol: b'not a message'"),
    ],
)
def test_another_protocol_is_refused_in_one_line(tmp_path, task, message):
    with pytest.raises(StudyError, match=message) as refused:
        run(tmp_path, x="rounds", y=task)
    assert "\n" not in str(refused.value)
    assert not left(tmp_path)


STUDY = """
import pathlib, random, sys
sys.path.insert(0, {here!r})
from labkit.experiment import Interrupted
from labkit.experiment.launch import child_process, turn_coordinator
from test_turn_coordinator import commands
try:
    endings = turn_coordinator.run(
        commands(pathlib.Path({folder!r}), x="rounds", y="hang"),
        order=random.Random(0), on_tick=lambda: None,
    )
    print(*(ending.suspended_s for ending in endings))
except Interrupted:
    sys.exit(130)
"""


def left(folder: Path, *words: str) -> list[str]:
    """Return the processes of a folder that are alive, each with its state.

    ``words``: words of their command line.
    """
    wanted = [str(WORKER), str(folder), *words]
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_text().split("\0")
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if set(wanted) <= set(line) and state != "Z":
            found.append(f"{entry.name} {state}")
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("number", "whole_job"),
    [(signal.SIGKILL, False), (signal.SIGTERM, False), (signal.SIGINT, False),
     (signal.SIGTERM, True)],
)  # fmt: skip
def test_nothing_is_left_alive_or_stopped_when_the_parent_is_ended(tmp_path, number, whole_job):
    script = textwrap.dedent(STUDY).format(here=str(WORKER.parent), folder=str(tmp_path))
    study = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": ROOT})
    end = time.monotonic() + 30
    while not any(
        line.endswith("T") for line in left(tmp_path)
    ):  # others are stopped while one hangs
        assert time.monotonic() < end and study.poll() is None
        time.sleep(0.05)
    for child in psutil.Process(study.pid).children(recursive=True) if whole_job else ():
        child.send_signal(number)
    study.send_signal(number)
    assert study.wait(timeout=20) == (-number if number == signal.SIGKILL else 130)
    end = time.monotonic() + 2
    while left(tmp_path) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_stopped_worker_started_ends_with_it_although_another_has_the_turn(tmp_path):
    script = textwrap.dedent(STUDY).format(here=str(WORKER.parent), folder=str(tmp_path))
    script = script.replace('x="rounds"', 'x="fork"')
    study = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": ROOT})
    try:
        end = time.monotonic() + 30
        while len([line for line in left(tmp_path) if line.endswith("T")]) < 2:  # y hangs
            assert time.monotonic() < end and study.poll() is None
            time.sleep(0.05)
        (worker,) = [int(line.split()[0]) for line in left(tmp_path, "x", "fork")]
        os.kill(worker, signal.SIGKILL)
        end = time.monotonic() + 2
        while left(tmp_path, "child") and time.monotonic() < end:
            time.sleep(0.05)
        assert not left(tmp_path, "child") and len(left(tmp_path)) == 1
    finally:
        study.terminate()
        study.wait(timeout=20)
    assert not left(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("tick_s", [1.0, 0.001])  # the turn is shorter or longer
def test_ctrl_z_stops_the_arm_that_has_the_turn_and_its_clock(tmp_path, tick_s):
    script = textwrap.dedent(STUDY).format(here=str(WORKER.parent), folder=str(tmp_path))
    script = script.replace("try:", f"child_process.TICK_S = {tick_s}\ntry:")
    study = subprocess.Popen(
        [sys.executable, "-c", script.replace('y="hang"', 'y="ctrl_z"')],
        env={**os.environ, "PYTHONPATH": ROOT},
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,  # as a job of a shell, which SIGTSTP stops
    )
    try:
        end = time.monotonic() + 30
        while psutil.Process(study.pid).status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < end and study.poll() is None
            time.sleep(0.01)
        start = time.monotonic()
        assert [line.split()[1] for line in left(tmp_path)] == ["T", "T"]
        time.sleep(0.5)
        suspended_s = time.monotonic() - start
        study.send_signal(signal.SIGCONT)
        output, _ = study.communicate(timeout=60)
    finally:
        study.kill()
        study.wait()
    assert study.returncode == 0 and min(map(float, output.split())) >= suspended_s
    logs = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(logs) == 2 and min(log["stopped_s"] for log in logs) >= suspended_s


# ------------------------------------------------------------------ the worker's side


@pytest.fixture
def ends():
    """Give the worker's and the coordinator's end of a connection."""
    one, other = map(Channel, socket.socketpair())
    yield one, other
    one.close()
    other.close()


def coordinate(channel: Channel, answers) -> threading.Thread:
    """Answer each message with the next of ``answers``, in a thread."""

    def answer():
        for verb, value in answers:
            time.sleep(0.02)
            channel.receive()
            channel.send(verb, value)

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def test_a_worker_has_the_rounds_that_are_granted_and_its_timer_pauses_meanwhile(ends):
    timer = StageTimer(time.monotonic_ns())
    granted = [("turn", ["b", 2]), ("turn", ["a", 0]), ("end", None)]
    start = time.monotonic()
    thread = coordinate(ends[1], granted)
    with timer.time("measure"):
        order = GrantedTurns(ends[0], timer, lambda: 0.0)
        rounds = list(order.rounds([Part("a", 1, (0,)), Part("b", 1, (0,))]))
    waited_s = time.monotonic() - start
    thread.join()
    assert rounds == [Round(1, ((0, 2),)), Round(0, ((0, 0),))]
    assert waited_s >= 0.06 > 0.03 > timer.seconds["measure"]
    assert timer.since_spawn() < waited_s


def test_a_worker_s_slices_end_when_it_has_finished(ends):
    left_over = [3]
    thread = coordinate(
        ends[1], [("turn", 0.1), ("turn", 0.2), ("turn", 0.1), ("gathered", [[5, 6], 1])]
    )
    order = GrantedTurns(ends[0], StageTimer(time.monotonic_ns()), lambda: 0.0)
    seconds = []
    for arm in order.slices(lambda: [0] if left_over[0] else []):
        assert arm == 0
        left_over[0] -= 1
        seconds.append(order.slice_s)
    assert order.gather([6]) == ([5, 6], 1)
    thread.join()
    assert seconds == [0.1, 0.2, 0.1]


def test_a_worker_s_clock_excludes_its_stops(ends):
    order = GrantedTurns(ends[0], StageTimer(time.monotonic_ns()), lambda: 1e6)
    clock, now = order.clock(), time.perf_counter()
    with clock.running():
        assert now - 1e6 <= clock() <= time.perf_counter() - 1e6


def test_a_worker_without_a_coordinator_says_so(ends):
    ends[1].close()
    with pytest.raises(ProtocolError, match="expected turn or end, got the end of the connection"):
        ends[0].expect("turn", "end")


def test_the_order_of_turns_depends_on_the_seed_and_the_block(make_cell, launcher, monkeypatch):
    """Two seeds or two blocks would otherwise share the order, and with it its accidents."""

    def draws(seed, block):
        cell = make_cell(seed=seed, blocks=2, isolation=config.Isolation.live)
        runs = [run for run in cell.schedule() if run.block == block]
        drawn = []
        monkeypatch.setattr(
            turn_coordinator, "run", lambda commands, *, order, **_: drawn.append(order.random())
        )
        statuses = [SimpleNamespace(fd=0, environment={}) for _ in runs]
        launcher.of(cell)._run_together(runs, cell, statuses, lambda: None)
        return drawn

    places = [(seed, block) for seed in (0, 1) for block in (0, 1)]
    assert len({tuple(draws(*place)) for place in places}) == 4
    assert draws(0, 1) == draws(0, 1)
