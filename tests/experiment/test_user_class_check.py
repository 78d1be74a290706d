"""plan=true imports the users' classes in a child process."""

import sys
from types import SimpleNamespace

import pytest

from labkit.config import Attention, ConfigError, Engine
from labkit.experiment.user_class_check import check_imports

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


def test_a_class_of_another_environment_is_not_imported_here(folder):
    check_imports(cells("absent:Map", environment={"python": "other"}))
