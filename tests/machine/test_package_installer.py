"""Environments of packages: built once, in a folder of the cache."""

from types import SimpleNamespace

import pytest

from labkit.machine import package_installer
from labkit.machine.package_installer import InstallError, build_venv

INDEX = "https://index.example/simple"


@pytest.fixture
def installs(monkeypatch, tmp_path):
    """Return a function that builds an environment, and the commands that it would have run."""

    def make(*, uv=True, lacking=(), **options):
        commands = []

        def run(command, timeout_s):
            commands.append([str(word).replace(str(tmp_path), "") for word in command])
            lacks = "install" in command and not any(word in command for word in lacking)
            error = b"error: no version of torch\n" if lacking and lacks else b""
            return SimpleNamespace(returncode=bool(error), stdout=b"", stderr=error)

        monkeypatch.setattr(package_installer, "run", run)
        monkeypatch.setattr(package_installer.shutil, "which", lambda name: uv and f"/{name}")
        parts = {"python": "/python", "requirements": ("a==1",), "without": (), "index": ""}
        for _ in range(2):
            build_venv(tmp_path / "env", **{**parts, **options})
        return commands

    return make


def test_hosts_of_two_architectures_share_no_environment(monkeypatch):
    folders = set()
    for machine in ("x86_64", "aarch64"):
        monkeypatch.setattr(package_installer.platform, "machine", lambda machine=machine: machine)
        folders.add(package_installer.folder_of("/usr/bin/python3", "3.11.2", ("a==1",)))
    assert len(folders) == 2


@pytest.mark.parametrize(
    ("uv", "starts"),
    [
        (True, [["/uv", "venv"], ["uv", "pip", "install"], ["uv", "pip", "uninstall"]]),
        (False, [["/python", "-m", "venv"], ["-m", "pip", "install"], ["-m", "pip", "uninstall"]]),
    ],
)
def test_an_environment_is_built_once_and_what_breaks_it_is_removed(installs, uv, starts):
    commands = installs(uv=uv, without=("b",))
    assert len(commands) == 3
    for command, start in zip(commands, starts, strict=True):
        assert " ".join(start) in " ".join(command)
    assert commands[1][-1] == "a==1" and commands[2][-1] == "b" and INDEX not in commands[1]


def test_another_index_is_asked_only_for_what_the_usual_ones_lack(installs, monkeypatch, tmp_path):
    monkeypatch.setattr(package_installer, "_answers", lambda index: True)
    _, first, second = installs(lacking=(INDEX,), index=INDEX)
    assert INDEX not in first and INDEX in second


@pytest.mark.parametrize("index", ["", "http://127.0.0.1:9/"])
def test_a_failure_is_one_line_that_names_the_log(installs, tmp_path, index):
    with pytest.raises(InstallError) as caught:
        installs(lacking=("nothing",), index=index)
    log = tmp_path / "env.log"
    assert str(caught.value) == f"error: no version of torch ({log})"
    assert log.read_text() == "error: no version of torch\n" and list(tmp_path.iterdir()) == [log]


def test_a_program_that_cannot_be_run_is_one_line():
    with pytest.raises(InstallError, match=r"^/no/such: No such file or directory$"):
        package_installer.run(["/no/such"], 1.0)
