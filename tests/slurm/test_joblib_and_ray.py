"""The same study through joblib and through a local cluster of Ray, two workers each."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile

import pytest
from studies import cells, command, own_environment, tables


@pytest.fixture
def short_folder():
    """A folder whose path is short."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as name:
        yield name


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(["hydra/launcher=joblib"], marks=pytest.mark.slow),
        pytest.param(
            ["hydra/launcher=ray", "hydra.launcher.ray.init.num_cpus=2"], marks=pytest.mark.ray
        ),
    ],
    ids=["joblib", "ray"],
)
def test_two_workers_end_with_the_tables_of_a_local_study(launcher, local, tmp_path, short_folder):
    pytest.importorskip(launcher[0].partition("=")[2])
    environ = {**os.environ, **own_environment(tmp_path)}
    environ["RAY_TMPDIR"] = str(short_folder)  # its sockets have no room for a test's own path
    done = subprocess.run(
        command("out=study", *launcher), cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert tables(tmp_path / "study") == local
    workers = {
        json.loads((c / "sitting.json").read_text())["pid"] for c in cells(tmp_path / "study")
    }
    assert len(workers) == 2
    assert f"labkit: 2 cells sent to {launcher[0]}; waiting" in done.stderr
    assert "continue with" not in done.stderr
