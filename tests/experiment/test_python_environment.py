"""Python environments of arms: revisions, interpreters and requirements."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from git_command import git
from planted_cells import planted_cell

from labkit.analysis.pages.cell_report_content import CellReport
from labkit.config import ConfigError, Isolation
from labkit.experiment.cell import ReadyCell
from labkit.experiment.compose import cell_composer
from labkit.experiment.compose.cell_composer import to_cell
from labkit.experiment.launch import python_environment
from labkit.experiment.launch.exported_revision import RevisionError
from labkit.experiment.launch.python_environment import (
    Imports,
    PythonEnvironment,
    default_options,
    known_options,
)
from labkit.experiment.schedule.cell_manifest import write_manifest
from labkit.experiment.schedule.design_change_check import refuse_changes
from labkit.experiment.worker.turn_protocol import VERSION
from labkit.machine import package_installer
from labkit.machine.facts import code_revision
from labkit.records import Arm, Record, read_arm

IMPORTS = Imports(VERSION, default_options(), ())


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A Git checkout with two commits in place of labkit's own, and an empty cache."""
    folder = tmp_path / "checkout"
    (folder / "labkit").mkdir(parents=True)
    monkeypatch.setattr(code_revision, "CHECKOUT", folder)
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    (folder / "conf").mkdir()
    (folder / "conf" / "config.yaml").touch()
    git(folder, "init", "-q", "-b", "main")
    for version in "12":
        (folder / "labkit" / "__init__.py").write_text(f"version = {version}\n")
        git(folder, "add", ".")
        git(folder, "commit", "-q", "-m", version)
    return folder


def value_of_labkit(environment):
    """Return ``labkit.version`` as this environment's Python imports it."""
    code = "import labkit; print(labkit.version)"
    command = environment.command([sys.executable, "-c", code])
    variables = environment.variables({"PATH": os.environ["PATH"]})
    return int(subprocess.run(command, env=variables, check=True, capture_output=True).stdout)


def test_a_revision_is_exported_and_imported(checkout, monkeypatch):
    monkeypatch.chdir(checkout)  # Python must not import the working folder's labkit
    environment = PythonEnvironment.resolve({"revision": "main~1"})
    assert environment.revision == git(checkout, "rev-parse", "main~1")
    environment.build()
    assert value_of_labkit(environment) == 1
    exported = environment.variables({})["PYTHONPATH"].split(os.pathsep)[0]
    assert code_revision.commit(Path(exported)) == environment.revision


def test_a_revision_of_another_repository_precedes_and_keeps_labkit(checkout, tmp_path):
    (checkout / "src" / "engine").mkdir(parents=True)
    (checkout / "src" / "engine" / "__init__.py").touch()
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", "src")
    environment = PythonEnvironment.resolve({"revision": "main", "repository": str(checkout)})
    assert not environment.replaces_labkit
    environment.build()
    first = environment.variables({"PYTHONPATH": "/theirs"})["PYTHONPATH"].split(os.pathsep)
    assert first[0] == f"{first[1]}/src" and first[2] == "/theirs"
    assert os.listdir(first[0]) == ["engine"]


def test_a_revision_keeps_links_that_lead_out_of_it_or_nowhere(checkout):
    links = {"data": "/nowhere/data", "shared": "../shared", "built": "build/data"}
    for name, target in links.items():
        (checkout / name).symlink_to(target)
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", "links")
    environment = PythonEnvironment.resolve({"revision": "main", "repository": str(checkout)})
    environment.build()
    tree = environment.variables({})["PYTHONPATH"].split(os.pathsep)[0]
    assert {name: os.readlink(os.path.join(tree, name)) for name in links} == links


def test_an_identity_is_read_back(checkout):
    plain = {"revision": "main", "python": sys.executable, "requirements": ["a==1"]}
    environment = PythonEnvironment.resolve(plain)
    identity = json.loads(json.dumps(environment.identity()))
    assert identity["revision"] == environment.revision != "main"
    assert PythonEnvironment.of(identity) == environment
    assert PythonEnvironment.of({}).variables({"A": "b"}) == {"A": "b"}


def test_a_checkout_that_git_refuses_is_not_one_without_the_revision(checkout, monkeypatch):
    said = b"""fatal: detected dubious ownership in repository at '/labkit'
    To add an exception for this directory, call:

    \tgit config --global --add safe.directory /labkit
    """
    refused = subprocess.CompletedProcess([], 128, b"", said)
    monkeypatch.setattr(python_environment.package_installer, "run", lambda *_: refused)
    with pytest.raises(ConfigError, match="revision=HEAD: detected dubious ownership in repo"):
        PythonEnvironment.resolve({"revision": "HEAD"})


@pytest.mark.parametrize(
    ("plain", "line"),
    [
        ({"revision": "nope"}, "environment.revision=nope: no such revision"),
        ({"python": "/nowhere"}, "environment.python=/nowhere: no such program"),
        ({"foo": 1}, "environment.foo: no such option"),
        ({"python": 3}, "environment.python=3: must be of type str"),
        ({}, "environment: set python, requirements or revision"),
        (3, "environment: must be a map, not 3"),
        ({"revision": "--all"}, "environment: '--all' must not begin with '-'"),
        ({"requirements": ["-r/etc/x"]}, "environment: '-r/etc/x' must not begin with '-'"),
        ({"python": "python3", "repository": "/"}, "repository=/: set environment.revision, too"),
        ({"revision": "main", "repository": "/"}, "environment.repository: / is not a Git checkou"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(checkout, tmp_path, plain, line):
    with pytest.raises(ConfigError) as caught:
        PythonEnvironment.resolve(plain).build()
    assert line in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists()


def test_a_program_that_is_no_python_is_refused(checkout):
    environment = PythonEnvironment.resolve({"python": "true"})
    with pytest.raises(ConfigError, match=r"environment\.python=.*true: not a Python interpreter"):
        environment.imports([])


def test_a_revision_says_why_it_refuses_a_config(checkout):
    """The revision's labkit is a module that accepts one state of the caches."""
    (checkout / "labkit" / "config.py").write_text(
        "class Experiment:\n    pass\n\n\n"
        "def from_plain(cls, data):\n"
        "    assert data['ablation']['arms'], 'as a worker adds them'\n"
        "    if data['workload']['state'] != 'hot':\n"
        '        raise ValueError(f\'workload.state={data["workload"]["state"]}: only hot\')\n'
    )
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", "config")
    environment = PythonEnvironment.resolve({"revision": "main"})
    environment.build()
    assert environment.refusal('{"workload": {"state": "hot"}}') is None
    large = json.dumps({"workload": {"state": "cold"}, "text": "x" * 200_000})
    assert environment.refusal(large) == "workload.state=cold: only hot"


def test_a_revision_whose_worker_does_not_start_is_refused(checkout):
    environment = PythonEnvironment.resolve({"revision": "main"})
    environment.build()
    with pytest.raises(ConfigError, match=r"worker does not start: ModuleNotFoundError"):
        environment.imports([])


@pytest.mark.parametrize("uv", [True, False])
def test_requirements_are_installed_once_without_dependencies(checkout, monkeypatch, uv):
    commands = []

    def run(command, timeout_s, environment=None):
        commands.append(command)
        return SimpleNamespace(returncode=0, stderr=b"", stdout=b"")

    monkeypatch.setattr(package_installer, "run", run)
    monkeypatch.setattr(package_installer.shutil, "which", lambda name: "uv" if uv else None)
    environment = PythonEnvironment(requirements=("mlx==0.32.2",))
    for _ in range(2):
        environment.build()
    (command,) = commands
    assert command[:3] == (["uv", "pip", "install"] if uv else [sys.executable, "-m", "pip"])
    assert "--no-deps" in command and command[-1] == "mlx==0.32.2"
    folder = environment.variables({})["PYTHONPATH"].split(os.pathsep)[0]
    assert os.path.isdir(folder)
    other = PythonEnvironment(requirements=("mlx==0.32.3",)).variables({})
    assert other["PYTHONPATH"].split(os.pathsep)[0] != folder
    assert other["NUMBA_CACHE_DIR"] != environment.variables({})["NUMBA_CACHE_DIR"]


def test_a_requirement_that_cannot_be_had_leaves_the_installer_s_log(
    checkout, tmp_path, monkeypatch
):
    failed = SimpleNamespace(
        returncode=1, stdout=b"all\n",
        stderr=b"ERROR: from versions\nERROR: No matching distribution for x==9\n",
    )  # fmt: skip
    monkeypatch.setattr(package_installer, "run", lambda *arguments: failed)
    with pytest.raises(ConfigError) as caught:
        PythonEnvironment(requirements=("x==9",)).build()
    (log,) = (tmp_path / "cache" / "environments").iterdir()
    line = f"environment.requirements: No matching distribution for x==9 ({log})"
    assert str(caught.value) == line and log.read_bytes() == b"all\n" + failed.stderr


def test_options_that_a_revision_lacks_are_left_out_at_their_defaults():
    ours = {"engine": {"threads": None, "new": 1, "kv": {"new": 2, "old": 3}}, "seed": 0}
    theirs = {"engine": {"threads": None, "kv": {"old": 4}, "gone": 5}, "seed": 0}
    config = {"engine": {"threads": 2, "new": 1, "kv": {"new": 2, "old": 3}}, "seed": 1}
    expected = {"engine": {"threads": 2, "kv": {"old": 3}}, "seed": 1}
    assert known_options(config, theirs, ours) == expected
    config["engine"]["kv"]["new"] = 7
    with pytest.raises(
        ConfigError, match=r"^engine\.kv\.new=7: the arm's revision of labkit has no"
    ):
        known_options(config, theirs, ours)


def test_a_default_null_that_was_another_default_is_left_to_the_revision():
    ours = {"start_s": None, "limit": None, "rate": 1.0}
    theirs = {"start_s": 300.0, "limit": None, "rate": 2.0}
    assert known_options(ours, theirs, ours) == {"limit": None, "rate": 1.0}
    changed = {"start_s": 5.0, "limit": 3, "rate": None}
    assert known_options(changed, theirs, ours) == changed


@pytest.fixture
def fake_imports(monkeypatch):
    """Make environments import what this labkit does, without starting their Python.

    The function that it returns changes what they import, and why they refuse a config. The configs
    that they are asked about are in ``make.asked``.
    """

    def make(refusal=None, **changes):
        def refusal_of(environment, config):
            make.asked.append(json.loads(config))
            return refusal

        facts = Imports(**{**vars(IMPORTS), **changes})
        monkeypatch.setattr(cell_composer.python_environment, "imports_of", lambda *_: facts)
        monkeypatch.setattr(cell_composer.python_environment, "refusal_of", refusal_of)

    make.asked = []
    make()
    return make


KERNELS = ("workload=kernel_decode", "ablation=revisions")


def test_arms_with_environments_take_turns_in_processes_of_their_own(
    composed, checkout, fake_imports
):
    cell = composed(*KERNELS)
    assert cell.isolation is Isolation.live
    assert cell.separate_processes_reason == "arm before has an environment of its own"
    revisions = [git(checkout, "rev-parse", name) for name in ("HEAD~1", "HEAD", "HEAD~1")]
    assert [arm.environment["revision"] for arm in cell.arms] == revisions  # the last: the control
    with pytest.raises(ConfigError, match=r"in_process: arm before has an environment of its own"):
        composed(*KERNELS, "design.isolation=in_process")


@pytest.mark.parametrize("protocol", [None, VERSION + 1])
def test_another_turn_protocol_means_separate_processes(composed, checkout, fake_imports, protocol):
    fake_imports(protocol=protocol)
    cell = composed(*KERNELS)
    assert cell.isolation is Isolation.process
    line = f"the worker of arm before uses version {protocol or 'none'} of the turn protocol"
    assert f"; not live: {line}" in cell.separate_processes_reason
    with pytest.raises(RevisionError, match=rf"isolation=live: {line}, and this labkit uses"):
        composed(*KERNELS, "design.isolation=live")
    with pytest.raises(RevisionError, match=rf"round by round, but .*; not live: {line}"):
        composed("workload=scoring", "ablation=revisions")


def test_a_revision_that_reads_no_variables_is_refused_an_arm_that_names_one(
    composed, checkout, fake_imports, monkeypatch
):
    monkeypatch.setenv("LABKIT_TEST_NAME", "mine")
    words = (*KERNELS, "model.name='${oc.env:LABKIT_TEST_NAME}'")
    composed(*words)
    theirs = copy.deepcopy(default_options())
    del theirs["engine"]["server"]["api_key"]
    fake_imports(defaults=theirs)
    composed(*KERNELS)
    with pytest.raises(
        RevisionError, match=r"^arm before: \$\{oc.env:LABKIT_TEST_NAME\}: the arm's"
    ):
        composed(*words)


def test_a_revision_is_asked_about_the_config_that_its_workers_get(
    composed, checkout, fake_imports
):
    """Earlier versions read neither warm caches nor numbers that follow from the time."""
    theirs = copy.deepcopy(default_options())
    theirs["engine"]["server"]["start_timeout_s"] = 300.0
    fake_imports(defaults=theirs)
    cell = composed(*KERNELS)
    assert {arm.config["workload"]["state"] for arm in cell.arms} == {"hot"}
    assert all("start_timeout_s" not in one["engine"]["server"] for one in fake_imports.asked)
    kernels = fake_imports.asked[0]["workload"]
    assert kernels["repeats"] == 1 and {case["factor"] for case in kernels["cases"]} == {1}
    cell = composed("workload=chat", "ablation=revisions")
    assert cell.arms[0].config["workload"]["num_requests"] == 0
    assert fake_imports.asked[-1]["workload"]["num_requests"] is None


def test_what_a_revision_refuses_is_one_line_before_any_run(composed, checkout, fake_imports):
    fake_imports(refusal="workload.state=cold: must be one of: hot")
    line = (
        "arm before: the arm's revision of labkit refuses workload.state=cold: must be one of: hot"
    )
    with pytest.raises(RevisionError, match=f"^{line}$"):
        composed(*KERNELS, "workload.state=cold")


def test_a_class_must_exist_in_the_environment(composed, checkout, fake_imports):
    arm = "+ablation.arms.x={engine.name:'theirs.engine:Engine',environment:{python:python3}}"
    composed("workload=chat", arm)
    fake_imports(missing=("theirs.engine",))
    with pytest.raises(ConfigError, match=r"^arm x: engine\.name=theirs\.engine:Engine: no module"):
        composed("workload=chat", arm)


def test_a_study_does_not_continue_after_its_revision_has_moved(
    composed, checkout, fake_imports, tmp_path
):
    def cell() -> ReadyCell:
        return to_cell(composed(*KERNELS, "design.blocks=4"), tmp_path / "cell")

    write_manifest(cell(), 4)
    assert read_arm(tmp_path / "cell" / "arms" / "after.json").environment == {
        "revision": git(checkout, "rev-parse", "HEAD")
    }
    refuse_changes(cell())
    git(checkout, "commit", "-q", "--allow-empty", "-m", "3")
    with pytest.raises(ConfigError, match=r"arm after: environment\.revision was \w+, now \w+"):
        refuse_changes(cell())


def test_the_report_says_what_arms_with_environments_imported():
    def record(arm, commit, role="arm", mlx="0.32.4"):
        versions = {"mlx": mlx, "numpy": "2.4.6"}
        environment = {"git": commit, "python": "3.11.7", "versions": versions}
        return Record(arm, role, 0, 0, 0, "ok", "now", environment=environment)

    arms = [Arm(name, "arm", {}, {}, environment={"revision": name}) for name in "ab"]
    records = [record("a", "1" * 40), record("b", "2" * 40, mlx="0.32.2")]

    def imported(arms, records):
        cell = planted_cell()
        data = SimpleNamespace(arms=arms, judged_records=records)
        return CellReport(SimpleNamespace(cell=cell, data=data)).machine[1:]

    assert imported(arms, [*records, record("c", "3" * 40, "control")]) == [
        f"a imported mlx 0.32.4, labkit at {'1' * 12}.",
        f"b imported mlx 0.32.2, labkit at {'2' * 12}.",
    ]
    assert imported([Arm("a", "arm", {}, {})], records) == []
    assert imported(arms, records[:1]) == []


def test_a_worker_searches_folders_in_the_order_of_this_process(tmp_path, monkeypatch):
    """The author's sources precede a module of the same name in the reader's working folder."""
    author, reader = tmp_path / "author", tmp_path / "reader"
    for folder in (author, reader):
        folder.mkdir()
        (folder / "mine_maps.py").write_text(f"print({folder.name!r})\n")
    monkeypatch.chdir(reader)
    searched = list(sys.path)

    def imported(*folders, **base):
        monkeypatch.setattr(sys, "path", [*map(str, folders), *searched])
        environ = PythonEnvironment().variables({"PATH": os.environ["PATH"], **base})
        command = [sys.executable, "-m", "mine_maps"]
        return subprocess.run(command, env=environ, capture_output=True, text=True).stdout.strip()

    path = {"PYTHONPATH": str(author)}
    assert imported(author, reader, **path) == "author"
    assert imported(reader, author, **path) == "reader"
    assert imported(reader, PYTHONSAFEPATH="1") == "reader"
    plain = {"PYTHONPATH": str(author)}
    monkeypatch.setattr(sys, "path", [str(reader), str(author), *searched])
    assert PythonEnvironment().variables(plain) == plain
