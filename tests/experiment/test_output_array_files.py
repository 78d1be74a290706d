"""Outputs that differ are stored once, for the first block; equal outputs are not stored."""

import json

import numpy as np
import pytest

from labkit.analysis import analyse_cell
from labkit.config import Isolation
from labkit.experiment.schedule.cell_runner import run_cell
from labkit.experiment.worker import output_array_files
from labkit.records import output_values_path, read_runs


def digests(cell):
    return {r.cases[0].outputs["digest"] for r in read_runs(cell.dir)}


def test_equal_arms_store_no_outputs(make_cell, launcher):
    cell = make_cell(blocks=2, isolation=Isolation.in_process)
    run_cell(cell, launcher)
    assert len(digests(cell)) == 1 and not (cell.dir / "outputs").exists()


@pytest.mark.parametrize("isolation", [Isolation.process, Isolation.in_process])
def test_differing_outputs_are_stored_once_and_their_distance_reported(
    make_cell, launcher, monkeypatch, isolation
):
    arm = "seq_map"
    monkeypatch.setenv("LABKIT_TEST_FAULT", f"measure:differ:{arm}")
    cell = make_cell(blocks=2, isolation=isolation, control=False)
    run_cell(cell, launcher)
    files = {path.stem for path in (cell.dir / "outputs").iterdir()}
    assert files == digests(cell) and len(files) == 2
    reason = analyse_cell(cell.dir)["gates"]["identical"]["reasons"][0]
    assert "first at token 0, head 0: 4,194,304 ULP apart [1 against 1.5]" in reason


def test_a_repeated_block_stores_only_its_own_outputs(make_cell, launcher, monkeypatch):
    monkeypatch.setenv("LABKIT_TEST_FAULT", "measure:differ:seq_map")
    run_cell(make_cell(isolation=Isolation.in_process), launcher)
    cell = make_cell(isolation=Isolation.in_process)
    next((cell.dir / "runs").glob("*-control.json")).unlink()
    monkeypatch.setenv("LABKIT_TEST_FAULT", "")
    run_cell(cell, launcher)
    assert len(digests(cell)) == 1 and not (cell.dir / "outputs").exists()


def test_only_the_first_block_is_stored_up_to_a_limit(make_cell, launcher, monkeypatch, tmp_path):
    run_cell(make_cell(isolation=Isolation.in_process), launcher)
    monkeypatch.setenv("LABKIT_TEST_FAULT", "measure:differ:seq_map")
    cell = make_cell(blocks=2, isolation=Isolation.in_process)
    run_cell(cell, launcher)
    assert len(digests(cell)) == 2 and not (cell.dir / "outputs").exists()
    assert "the values were not kept" in json.dumps(analyse_cell(cell.dir)["gates"])
    monkeypatch.setattr(output_array_files, "MAX_BYTES", 100)
    output_array_files.save(tmp_path, {"a": np.ones(20, np.float32), "b": np.ones(20, np.float32)})
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == ["a.npy"]


def test_a_full_disk_prints_a_line_and_leaves_no_partial_file(tmp_path, capsys, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    output_array_files.save(tmp_path, {"a": np.ones(4, np.float32)})
    assert "No space left on device; the values are not stored" in capsys.readouterr().err
    assert not any((tmp_path / "outputs").iterdir())
    assert output_values_path(tmp_path, "a").name == "a.npy"
