"""The doctor's noise reaches the plan, for this machine only."""

from __future__ import annotations

import json

import pytest

from labkit.analysis.statistics.power import single_row_mde_pct
from labkit.experiment.schedule import doctor_noise_cache
from labkit.experiment.schedule.doctor_noise_cache import PilotNoise
from labkit.machine.facts import machine_snapshot
from labkit.records import machine_difference

NOISE = {"matmul_cv_pct": 1.5, "bandwidth_cv_pct": 2.5}
PILOT = PilotNoise(5, interleaved_sd=0.01, separate_sd=0.05, interleaved_s=2.0, separate_s=1.5)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_saved_noise_is_loaded_and_the_noisier_kernel_counts():
    assert doctor_noise_cache.load_noise_sd() is None
    doctor_noise_cache.save(machine_snapshot.take(), NOISE, {})
    assert doctor_noise_cache.load_noise_sd() == pytest.approx(0.025)


def test_another_machine_s_noise_is_not_loaded():
    other = {**machine_snapshot.take(), "cpu_model": "another"}
    doctor_noise_cache.save(other, NOISE, {"kernels": PILOT})
    assert (
        doctor_noise_cache.load_noise_sd() is None
        and doctor_noise_cache.load_pilot_noise("kernels") is None
    )


@pytest.mark.parametrize("text", ["", "{", "[]", '{"machine": {}}', '{"machine": 3, "cv_pct": 1}'])
def test_a_broken_file_is_ignored(folder, text):
    folder.mkdir()
    (folder / doctor_noise_cache.FILE_NAME).write_text(text)
    assert (
        doctor_noise_cache.load_noise_sd() is None
        and doctor_noise_cache.load_pilot_noise("kernels") is None
    )


def test_a_cache_that_cannot_be_written_is_no_error(folder):
    folder.write_text("a file")
    doctor_noise_cache.save(machine_snapshot.take(), NOISE, {"kernels": PILOT})
    assert (
        doctor_noise_cache.load_noise_sd() is None
        and doctor_noise_cache.load_pilot_noise("kernels") is None
    )


def test_pilot_noise_is_loaded_by_kind():
    doctor_noise_cache.save(machine_snapshot.take(), NOISE, {"kernels": PILOT})
    assert doctor_noise_cache.load_pilot_noise("kernels") == PILOT
    assert doctor_noise_cache.load_pilot_noise("requests") is None


@pytest.mark.parametrize(
    "change",
    [
        lambda kept: kept.pop("sights"),  # an older doctor's
        lambda kept: kept["sights"].update(version=doctor_noise_cache.PILOTS_VERSION + 1),
        lambda kept: kept["sights"]["kernels"].update(of_tomorrow=1),
        lambda kept: kept["sights"]["kernels"].update(interleaved_sd="0.01"),
        lambda kept: kept["sights"]["kernels"].update(interleaved_s=0.0),
        lambda kept: kept.update(sights=3),
    ],
)
def test_pilot_noise_of_another_version_is_ignored_and_the_noise_stays(folder, change):
    doctor_noise_cache.save(machine_snapshot.take(), NOISE, {"kernels": PILOT})
    kept = json.loads((folder / doctor_noise_cache.FILE_NAME).read_text())
    change(kept)
    (folder / doctor_noise_cache.FILE_NAME).write_text(json.dumps(kept))
    assert doctor_noise_cache.load_pilot_noise("kernels") is None
    assert doctor_noise_cache.load_noise_sd() == pytest.approx(0.025)


def test_the_keys_that_an_older_labkit_reads_are_still_written(folder):
    doctor_noise_cache.save(machine_snapshot.take(), NOISE, {"kernels": PILOT})
    kept = json.loads((folder / doctor_noise_cache.FILE_NAME).read_text())
    assert (kept["schema_version"], kept["cv_pct"]) == (1, 2.5)
    assert machine_difference(kept["machine"], machine_snapshot.take()) is None


def one_row(sd, blocks, runs):
    return single_row_mde_pct(sd, blocks, runs, 0.05, sd_df=4)


def test_a_minute_holds_as_many_blocks_as_its_seconds_allow():
    assert PILOT.interleaved_pct == one_row(0.01, 30, 1)  # a process is a block
    assert PILOT.separate_pct == one_row(0.05, 20, 1)  # a block is two processes
    slow = PilotNoise(5, interleaved_sd=0.01, separate_sd=0.05, interleaved_s=10.1, separate_s=5.1)
    assert slow.interleaved_pct is None and slow.separate_pct is None
    just = PilotNoise(5, interleaved_sd=0.01, separate_sd=0.05, interleaved_s=10.0, separate_s=5.0)
    assert just.interleaved_pct == one_row(0.01, 6, 1)
    assert just.separate_pct == one_row(0.05, 6, 1)


@pytest.mark.parametrize(
    "wrong",
    [(2, 0.1, 0.1, 1, 1), (5, -0.1, 0.1, 1, 1), (5, 0.1, 0.1, 0, 1), (5, 0.1, float("nan"), 1, 1)],
)
def test_impossible_pilot_noise_is_refused(wrong):
    with pytest.raises(ValueError, match="PilotNoise"):
        PilotNoise(*wrong)
