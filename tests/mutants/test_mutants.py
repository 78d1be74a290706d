"""Mutation testing of a toy module, and a list of survivors that names existing mutants."""

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import run
from mutation import mutants

SOURCE = '''"""A text is never changed: 1 < 2."""

def grow(x: int = 1) -> int:
    if x < 3 and x:
        return x + 1
    return f"{x + 2}"
'''
PYPROJECT = """
[tool.pytest.ini_options]
markers = ["slow", "metal"]
addopts = "-p no:schemathesis -p no:hydra_pytest -p no:anyio"
"""
TEST = """
from labkit.toy import grow, unused

def test_it_grows():
    assert grow(1) == 2
"""


def test_rules_make_one_small_change_each():
    all_mutants = mutants("labkit/toy.py", SOURCE)
    assert [mutant.what for mutant in all_mutants] == [
        "def grow(x: int = 1) -> int: | 1 -> 2",
        "if x < 3 and x: | x < 3 and x -> (x < 3 or x)",
        "if x < 3 and x: | x < 3 -> (x <= 3)",
        "if x < 3 and x: | 3 -> 4",
        "return x + 1 -> return None",
        "return x + 1 | x + 1 -> (x - 1)",
        "return x + 1 | 1 -> 2",
        'return f"{x + 2}" -> return None',
    ]
    assert {mutant.function for mutant in all_mutants} == {"grow"}
    third = all_mutants[2]
    assert third.text == SOURCE.replace("x < 3", "(x <= 3)")
    assert len({mutant.name for mutant in all_mutants}) == len(all_mutants)


def test_a_draw_does_not_depend_on_other_files():
    all_mutants = mutants("labkit/toy.py", SOURCE)
    drawn = run.sample(all_mutants, 3, seed=1)
    assert (
        run.sample([m for m in all_mutants if m in drawn or m == all_mutants[0]], 3, seed=1)[:2]
        == drawn[:2]
    )
    assert run.sample(all_mutants, 3, seed=2) != drawn


def test_a_mutant_that_a_test_detects_is_killed_and_others_survive(tmp_path):
    source = tmp_path / "toy"
    for name, text in {
        "labkit/__init__.py": "",
        "labkit/toy.py": SOURCE + "\n\ndef unused():\n    return 5\n",
        "tests/toy/test_toy.py": TEST,
        "pyproject.toml": PYPROJECT,
        "tests/mutants/calls/sitecustomize.py": (
            Path(__file__).with_name("calls") / "sitecustomize.py"
        ).read_text(),
    }.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=source, check=True)
    tree = run.WorkingCopy(source, tmp_path / "work")
    tests = run.map_calls(tree, ["tests/toy"])
    assert tests.failed == [] and list(tests.seconds) == ["tests/toy/test_toy.py::test_it_grows"]
    wanted = {
        "return x + 1 | x + 1 -> (x - 1)": run.KILLED,
        "if x < 3 and x: | x < 3 -> (x <= 3)": run.SURVIVES,
        "return 5 -> return None": run.UNREACHED,
    }
    known = run.ResultCache(tree)
    for mutant in run.all_mutants(tree.source, ["labkit"]):
        if mutant.what in wanted:
            assert known.test_mutant(mutant, tests.calling(mutant)) == wanted.pop(mutant.what)
            assert (tree.path / mutant.path).read_text() != mutant.text
    assert not wanted
    assert len(run.ResultCache(tree)._results) == 3


def test_the_list_of_survivors_is_current():
    names = {mutant.name for mutant in run.all_mutants(run.ROOT, run.PACKAGES)}
    assert set(run.known_survivors()) <= names
    assert all(run.known_survivors().values())
