"""What is installed, by which name, with which extras; ``.ci/install`` takes uv or else pip."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from labkit.config import (
    Ablation,
    Attention,
    Case,
    ConfigError,
    Engine,
    Experiment,
    Model,
    ModelShape,
    Workload,
    package_extras,
)
from labkit.machine.facts import code_revision
from labkit.workload import device_availability

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


ROOT = SCRIPT.parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = set(PROJECT["optional-dependencies"])


def test_every_name_that_is_to_be_installed_is_ours_and_exists():
    """On the package index, the name labkit is somebody else's."""
    assert PROJECT["name"] == package_extras.DISTRIBUTION
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("conf/**/*.yaml")]
    code = [*ROOT.glob("labkit/**/*.py"), *ROOT.glob("benchmarks/*.py")]
    text = "\n".join(path.read_text("utf-8") for path in [*pages, *code])
    assert re.findall(r"(?:install|uvx) (?:-\S+ )*['\"]?labkit\b(?!'s)", text) == []
    assert re.findall(r"(?<!mlx-)\blabkit\[\w+\]'", text) == []
    named = re.findall(r"(?:mlx-labkit|DISTRIBUTION\})\[(\w+)\]|install_hint\('(\w+)'\)", text)
    named = {name for pair in named for name in pair if name}
    named |= set(re.findall(r"require_packages\((?:\(.*?\)|\w+), \"(\w+)\"", text))
    assert {"mlx", "video", "server", "http", "slurm"} <= named <= EXTRAS


def test_every_extra_is_installed_alone_once_a_week():
    spec = importlib.util.spec_from_file_location(
        "check_wheel", ROOT / "tests/packaging/check_wheel.py"
    )
    check_wheel = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check_wheel)
    weekly = yaml.safe_load((ROOT / ".github/workflows/weekly.yml").read_text("utf-8"))
    matrix = weekly["jobs"]["packages"]["strategy"]["matrix"]["extra"]
    assert set(matrix) == set(check_wheel.USES) == (EXTRAS - {"dev"}) | {""}


def test_the_main_job_needs_no_extra_and_models_name_theirs(monkeypatch):
    monkeypatch.setattr(package_extras, "find_spec", lambda name: None)
    requests = Experiment(model=Model(shape=ModelShape()), ablation=Ablation(arms={"base": {}}))
    kernels = replace(requests, workload=Workload(kind="kernel", cases=[Case("one", 1, 16)]))
    device_availability.check(kernels)
    needing = requests, replace(kernels, engine=Engine(attention=Attention(backend="gather")))
    for experiment in needing:
        with pytest.raises(ConfigError, match=r"mlx_lm.*; run: pip install 'mlx-labkit\[mlx\]'$"):
            device_availability.check(experiment)


def test_a_version_is_released_with_its_changelog(tmp_path):
    (tmp_path / "labkit").mkdir()
    (tmp_path / "labkit/__init__.py").write_text('__version__ = "0.2.0"\n')
    script = Path(shutil.copy(SCRIPT.with_name("changelog"), tmp_path / "labkit/changelog"))

    def release(version, title):
        (tmp_path / "CHANGELOG.md").write_text(f"# Log\n\n{title}\n\n- new\n\n## 0.1.0\n\n- old\n")
        done = subprocess.run([script, version], capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr.strip()

    title = "## 0.2.0 (12 May 2027)"
    assert release("0.2.0", title) == (0, f"{title}\n\n- new\n", "")
    for version, other, why in (
        ("0.2.1", title, "labkit/__init__.py is not version 0.2.1"),
        ("0.2.0", "## 0.2.0 (unreleased)", "CHANGELOG.md calls 0.2.0 unreleased; write its date"),
        ("0.2.0", "## 0.2.01", "CHANGELOG.md has no version 0.2.0"),
    ):
        assert release(version, other) == (1, "", why)


def test_records_name_the_commit_that_pip_installed(tmp_path):
    assert code_revision.commit(tmp_path) is None
    origin = tmp_path / "mlx_labkit-0.2.0.dist-info/direct_url.json"
    origin.parent.mkdir()
    for vcs, commit in (
        ({}, None),
        ({"vcs_info": {"vcs": "git", "commit_id": "ab" * 20}}, "ab" * 20),
    ):
        origin.write_text(json.dumps({"url": "https://example.org/labkit", **vcs}))
        code_revision.commit.cache_clear()
        assert code_revision.commit(tmp_path) == commit
    code_revision.commit.cache_clear()
