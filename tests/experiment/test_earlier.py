"""What earlier studies of this machine say about the next one."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from types import SimpleNamespace

import pytest

from labkit import analysis, config
from labkit.experiment import earlier, environment
from labkit.experiment.record import Record, read_runs
from labkit.experiment.runner import run_cell


def asked(workload="stub", isolation=config.Isolation.process):
    experiment = SimpleNamespace(workload=SimpleNamespace(name=workload))
    return SimpleNamespace(experiment=experiment, isolation=isolation)


@pytest.fixture
def done(make_cell, launcher, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cell = make_cell(folder="outputs/one/cell")
    run_cell(cell, launcher)
    analysis.write_cell(cell.dir)
    return cell


def test_start_up_is_what_a_run_costs_beyond_its_measurement(done, tmp_path):
    (found,) = earlier.studies(asked(), tmp_path / "outputs" / "two")
    assert found[0].resolve() == done.dir
    spent = [r.seconds["process"] - r.seconds["measure"] for r in read_runs(done.dir)]
    assert earlier.start_up(found[0]) == median(spent)
    assert min(spent) > 0
    assert max(spent) < max(r.seconds["process"] for r in read_runs(done.dir))


def test_only_the_same_workload_isolation_and_machine_count(done, tmp_path, monkeypatch):
    assert list(earlier.studies(asked("chat"), tmp_path)) == []
    assert list(earlier.studies(asked(isolation=config.Isolation.in_process), tmp_path)) == []
    here = environment.fingerprint()
    monkeypatch.setattr(environment, "fingerprint", lambda: {**here, "cpu_model": "another"})
    assert list(earlier.studies(asked(), tmp_path)) == []


def test_a_run_that_was_never_measured_has_no_start_up(tmp_path):
    record = Record("a", "arm", 0, 0, 1, "crashed", "2026-11-20T20:00:00Z", detail="planted")
    assert record.start_up_s is None
    timed = replace(record, seconds={"process": 2.0, "measure": 0.5})
    assert timed.start_up_s == 1.5
    assert earlier.start_up(tmp_path) is None
