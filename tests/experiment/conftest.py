"""Fixtures: a cell whose runs are real processes with a stub workload."""

from __future__ import annotations

import dataclasses
import math
import sys
import tempfile
import time
from types import SimpleNamespace

import pytest
from stub_arms import STUB, make_arm

from labkit import config
from labkit.experiment.cell import ReadyCell
from labkit.experiment.launch import child_process, turn_coordinator
from labkit.experiment.launch.run_launcher import WorkerLauncher
from labkit.machine import cache_entries


@pytest.fixture(scope="session")
def user_cache():
    """Where kernels are compiled already; read before a test has a cache of its own."""
    return cache_entries.root()


@pytest.fixture(scope="session")
def stub_cache(tmp_path_factory):
    """One cache for all stub workers: their bytecode is compiled once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def make_cell(tmp_path, monkeypatch, stub_cache):
    """Give a function that makes a cell; the lock and the cache are the test's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("LABKIT_CACHE", str(stub_cache))
    monkeypatch.setenv("LABKIT_TEST_FAULT", "")

    def make(
        *, control=True, blocks=1, runs_per_block=1, seed=7, folder="cell", timeout_s=60.0, **design
    ):
        arms = (
            make_arm("base", "baseline"),
            make_arm("seq_map", resolver="seq_map", engaged=["resolver.seq_map"]),
            *([make_arm("control", "control")] if control else []),
        )
        design = config.Design(
            blocks=blocks,
            runs_per_block=runs_per_block,
            timeout_s=timeout_s,
            control=control,
            **{"isolation": config.Isolation.process, **design},
        )
        return ReadyCell(tmp_path / folder, folder, arms, design, seed, "Which is faster?")

    return make


@pytest.fixture
def launcher():
    return WorkerLauncher((sys.executable, str(STUB)))


@pytest.fixture
def time_over(tmp_path, monkeypatch):
    """Let the parent's clock jump ahead shortly after a worker hangs: its time is over.

    Not at once, because a deadline that the parent sets after the jump would be far away.
    """
    hangs, began = tmp_path / "hangs", []

    def monotonic():
        now = time.monotonic()
        if hangs.exists():
            began.append(now)
        return now + 1e6 if began and now > began[0] + 0.3 else now

    clock = SimpleNamespace(**{**vars(time), "monotonic": monotonic})
    monkeypatch.setenv("LABKIT_TEST_HANGS", str(hangs))
    monkeypatch.setattr(child_process, "TICK_S", 0.02)
    monkeypatch.setattr(child_process, "SUSPENDED_S", math.inf)  # it is not a ctrl-Z
    monkeypatch.setattr(child_process, "time", clock)
    monkeypatch.setattr(turn_coordinator, "time", clock)


@pytest.fixture
def replace():
    return dataclasses.replace
