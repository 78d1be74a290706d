"""plan=true imports the users' classes in a child process."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from labkit import app
from labkit.config import Attention, ConfigError, Engine
from labkit.experiment.compose.user_class_import_check import check_imports, check_workload_class

GOOD = "print('hello')\nprint('[1]')\nclass Map:\n    pass\n"


def cells(path, **arm):
    """Return a cell whose arm ``mine`` names a resolver."""
    experiment = SimpleNamespace(engine=Engine(attention=Attention(resolver=path)))
    plain = SimpleNamespace(engine=Engine())
    ablation = SimpleNamespace(arms={"base": {}, "mine": arm})
    return [
        SimpleNamespace(
            experiments={"base": plain, "mine": experiment, "control": plain},
            experiment=SimpleNamespace(ablation=ablation),
        )
    ]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(filter(None, sys.path))}")
    return tmp_path


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (GOOD, None),
        (
            "x = {}['gone']\nclass Map: pass\n",
            r"KeyError: 'gone' \(.*planned.py:1, in <module>: x =",
        ),
        ("class Mop:\n    pass\n", "AttributeError: module 'planned' has no attribute 'Map'"),
        ("import os\nos._exit(3)\n", "importing it ended the process"),
    ],
)
def test_a_class_that_cannot_be_imported_is_refused_in_the_plan(folder, source, reason):
    (folder / "planned.py").write_text(source)
    if reason is None:
        check_imports(cells("planned:Map"))
    else:
        with pytest.raises(
            ConfigError, match=rf"^arm mine: engine.attention.resolver=planned:Map: .*{reason}"
        ):
            check_imports(cells("planned:Map"))
    assert "planned" not in sys.modules


def test_the_class_whose_import_hangs_is_named_and_not_one_before_it(monkeypatch):
    def run(arguments, **options):
        printed = json.dumps([arguments[-2], None]).encode()  # the first class was imported
        raise subprocess.TimeoutExpired(arguments, options["timeout"], output=printed)

    monkeypatch.setattr(subprocess, "run", run)
    (first,), (second,) = cells("good:Map"), cells("hangs:Map")
    with pytest.raises(ConfigError, match=r"resolver=hangs:Map: importing it .* took too long"):
        check_imports([first, second])


def test_a_class_of_another_environment_is_not_imported_here(folder):
    check_imports(cells("absent:Map", environment={"python": "other"}))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import os\nos._exit(3)\n", "importing it ended the process, or took too long"),
        ("x = {}['gone']\n", r"KeyError: 'gone' \(.*:1, in <module>: x = "),
        ("class Mop:\n    pass\n", "AttributeError: module .* has no attribute 'Kind'"),
    ],
)
def test_a_workload_class_is_imported_in_a_child_before_this_process_needs_it(
    folder, source, reason
):
    module = f"kind_{abs(hash(source))}"
    (folder / f"{module}.py").write_text(source)
    experiment = SimpleNamespace(workload=SimpleNamespace(kind=f"{module}:Kind"))
    with pytest.raises(ConfigError, match=rf"^workload.kind={module}:Kind: {reason}"):
        check_workload_class(experiment)
    assert module not in sys.modules


def test_one_child_imports_a_workload_class_and_none_a_kind_of_labkit(folder):
    (folder / "kind_counted.py").write_text(
        f"open({str(folder / 'count')!r}, 'a').write('x')\nclass Kind:\n    pass\n"
    )
    experiment = SimpleNamespace(workload=SimpleNamespace(kind="kind_counted:Kind"))
    for _ in range(3):
        check_workload_class(experiment)
    assert (folder / "count").read_text() == "x"
    check_workload_class(SimpleNamespace(workload=SimpleNamespace(kind="requests")))


def test_a_class_of_that_name_elsewhere_is_another_class(folder, monkeypatch):
    (folder / "kind_twice.py").write_text("class Kind:\n    pass\n")
    (folder / "other").mkdir()
    (folder / "other" / "kind_twice.py").write_text("class Mop:\n    pass\n")
    experiment = SimpleNamespace(workload=SimpleNamespace(kind="kind_twice:Kind"))
    check_workload_class(experiment)
    monkeypatch.syspath_prepend(str(folder / "other"))
    with pytest.raises(ConfigError, match="has no attribute 'Kind'"):
        check_workload_class(experiment)


def test_a_plan_names_the_arm_whose_workload_class_ends_its_process(folder, monkeypatch, capfd):
    (folder / "kind_dies.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    words = ["plan=true", "ablation=none", "workload.kind=kind_dies:Kind", "out=never"]
    with pytest.raises(SystemExit, match="2"):
        app.main(words)
    assert "arm base: workload.kind=kind_dies:Kind: importing it ended" in capfd.readouterr().err
    assert not (folder / "never").exists()


def test_the_child_searches_the_folders_that_this_process_searches_first(tmp_path, monkeypatch):
    """A module of the working folder has the name of one that this process finds before it."""
    for place, source in (("author", GOOD), ("reader", "")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "shadowed.py").write_text(source)
    monkeypatch.chdir(tmp_path / "reader")
    monkeypatch.syspath_prepend(str(tmp_path / "author"))
    check_imports(cells("shadowed:Map"))
