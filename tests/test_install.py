"""``.ci/install`` installs with uv if it is on PATH or in the environment, otherwise with pip."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / ".ci/install"


def program(path, status):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\necho "{path.name} $@"\nexit {status}\n', "utf-8")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("uv", "status", "installers"),
    [
        ("path", 0, ["uv"]),
        ("env", 0, ["uv"]),
        ("env", 1, ["uv", "python"]),
        (None, 0, ["python"]),
    ],
)
def test_the_installer_and_its_fallback(uv, status, installers, tmp_path):
    program(tmp_path / "env/bin/python", 0)
    if uv is not None:
        program(tmp_path / {"path": "path/uv", "env": "env/bin/uv"}[uv], status)
    done = subprocess.run(
        [SCRIPT, tmp_path / "env", "-e", ".[dev]"],
        env={"PATH": f"{tmp_path / 'path'}{os.pathsep}/usr/bin{os.pathsep}/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == installers
    assert all(" pip install " in line and line.endswith("-e .[dev]") for line in lines)
    assert ("uv could not install" in done.stderr) == (len(installers) > 1)
