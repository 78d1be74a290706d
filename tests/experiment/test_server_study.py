"""A server as an arm of a study: real workers, and a server without a model."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from labkit.experiment.launch import turn_coordinator
from labkit.machine.processes import server_supervisor
from labkit.records import read_runs

ROOT = Path(__file__).resolve().parents[2]
ASKED = (
    "engine=openai", "engine.server.preset=null_server", "workload.num_requests=6",
    "workload.concurrency=3", "design=quick", "design.blocks=1", "design.runs_per_block=1",
)  # fmt: skip


@pytest.fixture
def study(tmp_path):
    """A function that starts a study; it is killed at the end, and what it left too."""
    started = []

    def start(*words):
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "labkit", *ASKED, *words, f"out={tmp_path / 'study'}", "-m"],
                # No time is claimed here, so the lock of whoever is timing is not waited for.
                env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_study_of_a_server(study, tmp_path):
    process = study("+ablation.arms.roomy={engine.server.most_late_ms:9999.0}")
    message, _ = process.communicate(timeout=170)
    (runs,) = (tmp_path / "study").glob("*/runs")
    records = read_runs(runs.parent)
    assert len(records) == 3 and all(record.ok for record in records), message
    for record in records:
        notes = record.notes["engine"]
        assert notes["server"]["preset"] == "null_server" and notes["server"]["kept"] is None
        assert notes["client"]["floor"]["streams"] == 3
        assert record.counters["tokens.usage"] == record.counters["tokens.stream"]
        assert len(record.notes["together"]) == 3 and record.notes["isolation"] == "live"
        slice_ms = 1e3 * turn_coordinator.LONG_SLICE_S
        assert notes["client"]["lag_ms"]["p99"] < slice_ms  # stops are no lag
    report = (tmp_path / "study" / "report.md").read_text("utf-8")
    assert "### HTTP streams and client overhead" in report
    assert "compared as text, which is weaker" in report


def _server_and_supervisor(study):
    """Return a running server of the study and the supervisor that started it, or None."""
    for server in psutil.Process(study.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            supervisor, words = server.parent(), " ".join(server.cmdline())
            is_supervisor = server_supervisor.__name__ in words
            if "openai.null_server --port" in words and not is_supervisor and supervisor:
                return server, supervisor
    return None


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker", "study"])
def test_kill_9_of_a_study_leaves_no_server(study, victim):
    process = study()
    found, deadline = None, time.monotonic() + 120
    while found is None and time.monotonic() < deadline:
        time.sleep(0.05)
        found = _server_and_supervisor(process)
    assert found is not None, "the server never came"
    worker = found[1].parent()
    os.kill(process.pid if victim == "study" else worker.pid, signal.SIGKILL)
    # A closed pipe ends them at once; the rest is for a busy machine.
    _, left = psutil.wait_procs(found, timeout=5.0)
    assert not [one for one in left if one.status() != psutil.STATUS_ZOMBIE]
