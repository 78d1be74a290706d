"""Exported revisions: what an arm imports of a repository comes from the commit, or is refused."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from git_command import git

from labkit import config
from labkit.config import ConfigError, Experiment, OpenAIServer
from labkit.experiment.compose import cell_composer
from labkit.experiment.launch import python_environment
from labkit.experiment.launch.exported_revision import ExportedRevision, RevisionError
from labkit.experiment.launch.python_environment import PythonEnvironment
from labkit.machine.facts import code_revision


@pytest.fixture(scope="module")
def bytecode(tmp_path_factory):
    """One cache for all tests: the bytecode of what their children import is compiled once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def repository(tmp_path, monkeypatch, bytecode):
    """An empty repository, which is the working folder.

    ``repository.write`` writes files, ``repository.commit`` commits everything.
    """
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    monkeypatch.setenv("LABKIT_CACHE", str(bytecode))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])  # as of `python -m`
    # What each of labkit's processes imports takes seconds, and no test here is about it.
    light = python_environment.IMPORT_SCRIPT.replace("import numba, numpy", "import numpy")
    light = light.replace('"mlx", "safetensors", "tokenizers"', "()")
    monkeypatch.setattr(python_environment, "IMPORT_SCRIPT", light)
    return Repository(folder)


class Repository:
    def __init__(self, folder):
        self.folder = folder

    def write(self, **files):
        """Write modules: ``mine_toy=1`` is ``mine/toy.py``, which has ``VALUE = 1``."""
        for name, value in files.items():
            file = self.folder / f"{name.replace('_', '/')}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(value if isinstance(value, str) else f"VALUE = {value}\n")

    def commit(self, **files):
        self.write(**files)
        git(self.folder, "add", ".")
        git(self.folder, "commit", "-q", "-m", "x")

    def arm(self, revision):
        plain = {"revision": revision, "repository": str(self.folder)}
        environment = PythonEnvironment.resolve(plain)
        environment.build()
        return environment


def value(environment, module="mine.toy", **inherited):
    """Return ``VALUE`` of a module as this environment's Python imports it."""
    code = f"import {module} as m; print(m.VALUE)"
    variables = environment.variables({"PATH": os.environ["PATH"], **inherited})
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True)
    return done.stdout.decode().strip() or done.stderr.decode().splitlines()[-1]


def test_a_class_that_a_revision_lacks_is_not_the_checkout_s(repository):
    repository.commit(other=1)
    repository.commit(mine_toy=2)
    base, head = repository.arm("HEAD~1"), repository.arm("HEAD")
    assert (value(base), value(head)) == ("ModuleNotFoundError: No module named 'mine'", "2")
    assert head.imports(["mine.toy"]).missing == ()
    with pytest.raises(RevisionError) as error:
        base.imports(["mine.toy"])
    line = f"environment.revision={base.revision[:12]}: no module 'mine.toy' at this revision"
    assert str(error.value) == line


def test_a_class_that_was_never_committed_does_not_run(repository):
    repository.commit(mine_other=1)
    repository.write(mine_toy=2)
    with pytest.raises(RevisionError, match=r"no module 'mine\.toy' at this revision"):
        repository.arm("HEAD").imports(["mine.toy"])


def test_the_root_is_on_the_path_beside_a_folder_src(repository, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[1:])
    (repository.folder / "src").mkdir()
    (repository.folder / "src" / "engine.cpp").touch()
    repository.commit(mine_toy=1)
    repository.commit(mine_toy=2)
    assert [value(repository.arm(r)) for r in ("HEAD~1", "HEAD")] == ["1", "2"]


def test_a_package_of_the_checkout_does_not_precede_a_namespace_package(repository):
    repository.commit(mine_toy=1)
    (repository.folder / "mine" / "__init__.py").touch()
    repository.commit(mine_toy=2)
    assert [value(repository.arm(r)) for r in ("HEAD~1", "HEAD")] == ["1", "2"]


@pytest.mark.parametrize("inherited", [True, False])
def test_folders_of_the_checkout_on_the_path_are_the_revision_s(repository, inherited, monkeypatch):
    """PYTHONPATH=python, and an editable install, which puts its folder on every path."""
    repository.commit(python_pkg_engine=1)
    repository.commit(python_pkg_engine=2)
    folder = str(repository.folder / "python")
    if not inherited:
        monkeypatch.setattr(sys, "path", [*sys.path, folder])
    more = {"PYTHONPATH": folder} if inherited else {}
    for revision, expected in ("HEAD~1", "1"), ("HEAD", "2"):
        arm = repository.arm(revision)
        assert value(arm, "pkg.engine", **more) == expected
        path = arm.variables(more)["PYTHONPATH"].split(os.pathsep)
        assert folder not in path and str(repository.folder) not in path


@pytest.fixture
def editable(repository, tmp_path, monkeypatch):
    """Let every Python find the modules of the checkout's folder ``python``, after all others."""
    (tmp_path / "site").mkdir()
    folder = repository.folder / "python"
    text = f"import sys\nsys.path.append({str(folder)!r})\n"
    (tmp_path / "site" / "sitecustomize.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    return tmp_path / "site"


def test_a_module_of_the_checkout_is_refused_by_its_name_and_file(repository, editable):
    repository.commit(python_pkg_engine=1, mine_toy="import pkg.engine\n")
    arm = repository.arm("HEAD")
    file = repository.folder / "python" / "pkg" / "engine.py"
    for modules, program, name in (
        (["pkg.engine"], None, "pkg.engine"),
        (["mine.toy"], None, "a module"),  # which the class imports
        ([], "pkg.engine", "pkg.engine"),
    ):
        with pytest.raises(RevisionError) as error:
            arm.imports(modules, program)
        assert f": {name} would come from {file}, not from the revision; " in str(error.value)
        assert "\n" not in str(error.value)


def test_an_installed_copy_of_a_module_of_the_checkout_is_refused(repository, editable):
    repository.commit(python_pkg_engine=1)
    (editable / "pkg").mkdir()
    (editable / "pkg" / "engine.py").touch()
    with pytest.raises(RevisionError, match=r"pkg\.engine would come from .*site/pkg/engine\.py"):
        repository.arm("HEAD").imports(["pkg.engine"])


def test_a_script_of_the_checkout_is_refused(repository):
    repository.commit(mine_server="x = 1\n")
    arm = repository.arm("HEAD")
    with pytest.raises(
        RevisionError, match=r": mine/server\.py would come from /.*; start it as a m"
    ):
        arm.imports([], "mine/server.py")
    arm.imports([], "mine.server")


def test_a_link_out_of_the_revision_is_refused(repository, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "toy.py").touch()
    (repository.folder / "mine").symlink_to(tmp_path / "elsewhere")
    repository.commit(other=1)
    with pytest.raises(RevisionError, match=r"mine\.toy would come from"):
        repository.arm("HEAD").imports(["mine.toy"])


def test_a_class_outside_of_the_repository_is_the_same_in_both_arms(
    repository, tmp_path, monkeypatch
):
    """An adapter in the working folder imports the engine, which is the revision's."""
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter.py").write_text("from mine.toy import VALUE\n")
    monkeypatch.chdir(tmp_path / "adapters")
    for number in 1, 2:
        repository.commit(mine_toy=number)
    for revision, expected in ("HEAD~1", "1"), ("HEAD", "2"):
        arm = repository.arm(revision)
        assert value(arm, "adapter") == expected and not arm.imports(["adapter"]).missing


def test_packages_installed_inside_the_checkout_stay_on_the_path(repository, monkeypatch):
    repository.commit(mine_toy=1)
    site = repository.folder / ".venv" / "lib" / "site-packages"
    (site / "served").mkdir(parents=True)
    (site / "served" / "__init__.py").write_text("VALUE = 3\n")
    (repository.folder / ".gitignore").write_text(".venv\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    arm = repository.arm("HEAD")
    assert value(arm, "served", PYTHONPATH=str(site)) == "3"
    arm.imports(["mine.toy"], "served")


def test_a_class_that_does_not_import_at_a_revision_does_not_run(repository):
    repository.commit(mine_toy="import threading\nthreading.Timer(600, print).start()\n")
    repository.commit(mine_toy="1 / 0\n")
    repository.arm("HEAD~1").imports(["mine.toy"])
    with pytest.raises(RevisionError, match=r"does not start: ZeroDivisionError: division by zero"):
        repository.arm("HEAD").imports(["mine.toy"])


def test_labkit_s_own_clone_is_exported_in_part_and_as_a_whole(repository, monkeypatch):
    monkeypatch.setattr(code_revision, "CHECKOUT", repository.folder)
    repository.commit(mine_toy=1, labkit_x=1, conf_y=1)
    commit = git(repository.folder, "rev-parse", "HEAD")
    trees = []
    for own in None, str(repository.folder):
        exported = ExportedRevision(commit, own)
        exported.export()
        trees.append(sorted(p.name for p in exported.tree.iterdir() if p.name[0] != "."))
        assert code_revision.commit(exported.tree) == commit
    assert trees == [["conf", "labkit"], ["conf", "labkit", "mine"]]


def test_a_module_of_labkit_that_a_revision_lacks_is_the_revision_s_fault(repository):
    lacks = {"labkit.x": None}
    with pytest.raises(RevisionError, match=r"no module 'labkit\.x' at this revision"):
        ExportedRevision("1" * 40, None).check_imports(lacks, [])
    ExportedRevision("1" * 40, None).check_imports({"mine.toy": None}, ["/elsewhere/m.py"])


def test_an_export_has_every_file_and_runs_no_hook(repository):
    (repository.folder / ".gitattributes").write_text("kept.py export-ignore\n")
    repository.commit(kept=1, sub_other=2)
    hook = repository.folder / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\ntouch hooked\n")
    hook.chmod(0o755)
    git(repository.folder, "sparse-checkout", "set", "another")
    files = sorted(repository.folder.rglob("*"))
    tree = repository.arm("HEAD")._exported.tree
    assert {"kept.py", "sub"} <= set(os.listdir(tree)) and "hooked" not in os.listdir(tree)
    assert sorted(repository.folder.rglob("*")) == files  # nor is the checkout's index touched


def test_an_export_leaves_the_checkout_s_submodules_where_they_are(repository, tmp_path):
    repository.commit(mine_toy=1)
    git(tmp_path, "clone", "-q", repository.folder, "other")
    added = ("submodule", "--quiet", "add", str(tmp_path / "other"), "sub")
    git(repository.folder, "-c", "protocol.file.allow=always", *added)
    repository.commit(mine_toy=2)
    git(repository.folder, "config", "submodule.recurse", "true")
    settings = repository.folder / ".git" / "modules" / "sub" / "config"
    before = settings.read_text()
    tree = repository.arm("HEAD")._exported.tree
    assert settings.read_text() == before and os.listdir(tree / "sub") == []


def test_a_revision_that_git_cannot_export_does_not_run(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    repository.commit(mine_toy=1)
    blob = git(repository.folder, "rev-parse", "HEAD:mine/toy.py")
    (repository.folder / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    with pytest.raises(RevisionError, match=r"^environment\.revision=[0-9a-f]{12}: .*") as error:
        repository.arm("HEAD")
    assert "\n" not in str(error.value)
    assert os.listdir(tmp_path / "cache" / "environments") == []


def test_git_has_minutes_to_export_and_too_few_are_the_revision_s(
    repository, tmp_path, monkeypatch
):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("labkit.experiment.launch.exported_revision.EXPORT_TIMEOUT_S", 1e-6)
    repository.commit(mine_toy=1)
    with pytest.raises(RevisionError, match="no answer within"):
        repository.arm("HEAD")


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("{python} -m mine.server {port}", "mine.server"),
        ("env A=1 {python} -X utf8 -m mine.server --port {port} -m x", "mine.server"),
        ("{python} mine/server.py {port} -m x", "mine/server.py"),
        ("{python} -c 'print({port})'", None),
        ("llama-server -m {gguf} --port {port}", None),
    ],
)
def test_the_program_of_a_server_s_command(command, program):
    assert OpenAIServer(preset="other", command=command).python_program == program


def test_another_interpreter_runs_programs_that_labkit_s_need_not_have():
    command = "{python} -m mine.server {port}"
    for more in {"python": "python3"}, {"requirements": ["a"]}:
        assert OpenAIServer(preset="other", command=command, **more).python_program is None


def test_an_arm_s_own_modules_are_its_classes_its_kind_of_workload_and_its_program(
    repository, monkeypatch
):
    asked = []

    def imports_of(*arguments):
        asked.append(arguments[1:])
        raise ConfigError("enough")

    monkeypatch.setattr(cell_composer.python_environment, "imports_of", imports_of)
    repository.commit(mine_toy=1)
    environment = {"revision": "HEAD", "repository": str(repository.folder)}
    server = {"preset": "other", "command": "{python} -m mine.server {port}"}
    for engine in {"name": "mine.toy:Toy"}, {"name": "openai", "server": server}:
        plain = {"engine": engine, **python_environment.SMALLEST_EXPERIMENT}
        experiment = config.from_plain(Experiment, plain)
        experiment.workload.kind = "mine.load:Load"
        arm = cell_composer._arm("base", experiment.ablation, experiment)
        with pytest.raises(ConfigError, match=r"^arm base: enough$"):
            cell_composer._with_environment(arm, experiment, environment)
    assert asked == [(("mine.load", "mine.toy"), None), (("mine.load",), "mine.server")]
