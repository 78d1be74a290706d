"""The doctor's noise reaches the plan, for this machine only."""

from __future__ import annotations

import pytest

from labkit.experiment import doctor_noise, environment


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_is_kept_is_found_and_the_worse_kernel_counts():
    assert doctor_noise.find() is None
    doctor_noise.keep(environment.fingerprint(), {"matmul_cv_pct": 1.5, "bandwidth_cv_pct": 2.5})
    assert doctor_noise.find() == pytest.approx(0.025)


def test_another_machine_s_noise_is_not_ours():
    other = {**environment.fingerprint(), "cpu_model": "another"}
    doctor_noise.keep(other, {"matmul_cv_pct": 1.0, "bandwidth_cv_pct": 1.0})
    assert doctor_noise.find() is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"machine": {}}', '{"machine": 3, "cv_pct": 1}'])
def test_a_broken_file_is_no_noise(folder, text):
    folder.mkdir()
    (folder / doctor_noise.NAME).write_text(text)
    assert doctor_noise.find() is None


def test_a_cache_that_cannot_be_written_is_no_error(folder):
    folder.write_text("a file")
    doctor_noise.keep(environment.fingerprint(), {"matmul_cv_pct": 1.0, "bandwidth_cv_pct": 1.0})
    assert doctor_noise.find() is None
