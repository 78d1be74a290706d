"""Real live studies that are killed: nothing of theirs is left, and no server is left stopped."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="sets limits of running processes"),
]

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 2.0  # of the event, nothing is left
ASKED = (
    "engine=openai", "engine.server.preset=null_server", "workload=chat", "model=tiny",
    "workload.num_requests=60", "workload.concurrency=2", "design=quick", "design.blocks=1",
    "design.runs_per_block=1",
)  # fmt: skip


def stopped(process: psutil.Process) -> bool:
    return process.status() == psutil.STATUS_STOPPED


def alive(processes) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def wait_for(condition, seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


@pytest.fixture
def environment(tmp_path):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)}


@pytest.fixture
def server(environment):
    """The user's server: a process with a child in a session of its own, and its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = (
        "import subprocess, sys; "
        f"subprocess.Popen(['sleep', '1000'], start_new_session=True); "
        f"import runpy; sys.argv = ['null_server', '--port', '{port}']; "
        "runpy.run_module('labkit.engine.openai.null_server', run_name='__main__')"
    )
    process = subprocess.Popen([sys.executable, "-c", script], env=environment)
    wait_for(lambda: not socket.socket().connect_ex(("127.0.0.1", port)), 30, "no server")
    children = psutil.Process(process.pid).children()
    yield psutil.Process(process.pid), port
    for child in children:
        child.kill()
    process.kill()
    process.wait()


@pytest.fixture
def study(environment, server, tmp_path):
    """A running study of two servers that labkit starts and one that it did not start."""
    kept = f"+ablation.arms.kept={{engine.server.url:http://127.0.0.1:{server[1]}"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "labkit", *ASKED, f"{kept},engine.server.pause:true}}"),
            *(f"out={tmp_path / 'study'}", "-m"),
        ],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    yield psutil.Process(process.pid), process
    with suppress(psutil.Error):
        for one in psutil.Process(process.pid).children(recursive=True):
            one.kill()
    process.kill()
    process.communicate()


def command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended
        return []


def workers(study: psutil.Process) -> dict[str, psutil.Process]:
    """Return the study's workers by their arm."""
    found = {}
    for child in study.children():
        words = command(child)
        if "labkit.experiment.worker" in words and "--turns" in words:
            found[next(Path(word).stem for word in words if "/arms/" in word)] = child
    return found


def wait_until_measuring(study, server) -> list[psutil.Process]:
    """Wait until all three arms take turns; return all processes that the study has started."""
    parent, process = study

    def wait(condition, what: str) -> None:
        wait_for(lambda: process.poll() is not None or condition(), 90, what)
        assert process.poll() is None, process.communicate()

    wait(lambda: len(workers(parent)) == 3, "the workers never came")
    # It stops and continues again and again when all have loaded.
    for _ in range(4):
        wait(lambda: stopped(server), "the server was never stopped")
        wait(lambda: not stopped(server), "the server never continued")
    tree = [server, *server.children()]
    wait(lambda: all(map(stopped, tree)), "the server's child was never stopped")
    return parent.children(recursive=True)


def assert_nothing_left(processes, server) -> None:
    wait_for(lambda: not alive(processes), WITHIN_S, "processes of the study are left")
    assert not stopped(server) and not any(map(stopped, server.children()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_study_ends_all_and_continues_the_server(study, server, number):
    parent, process = study
    processes = wait_until_measuring(study, server[0])
    os.kill(parent.pid, number)
    assert_nothing_left(processes, server[0])
    assert process.wait(5) == (-number if number is signal.SIGKILL else 130)


@pytest.mark.parametrize("arm", ["base", "kept"])
def test_a_worker_that_is_killed_ends_alone_with_its_server(study, server, tmp_path, arm):
    parent, process = study
    wait_until_measuring(study, server[0])
    worker = workers(parent)[arm]
    own = worker.children(recursive=True)
    assert bool(own) == (arm == "base")
    worker.kill()
    wait_for(lambda: not alive([worker, *own]), WITHIN_S, "the worker's processes are left")
    if arm == "kept":
        wait_for(lambda: not stopped(server[0]), WITHIN_S, "the server is left stopped")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    outcomes = {path.stem.split("-")[-1]: path.read_text("utf-8")
                for path in (tmp_path / "study").glob("*/runs/*.json")}  # fmt: skip
    assert {name: '"outcome": "ok"' in text for name, text in outcomes.items()} == {
        name: name != arm for name in ("base", "kept", "control")
    }
    assert not stopped(server[0])


@pytest.mark.parametrize("who", ["study", "worker"])
def test_a_full_disk_ends_the_study_in_one_line(study, server, tmp_path, who):
    parent, process = study
    processes = wait_until_measuring(study, server[0])
    full = parent if who == "study" else workers(parent)["control"]
    resource.prlimit(full.pid, resource.RLIMIT_FSIZE, (0, 0))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    line = "File too large" if who == "study" else "the worker cannot write its record"
    assert "Traceback" not in output and line in output, output
    assert_nothing_left(processes, server[0])
