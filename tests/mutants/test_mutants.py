"""Mutation testing of a toy tree: the draw, the tests of a module, and the verdict on packages."""

import subprocess
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import run
from mutation import mutants
from selection import (
    MAX_TEST_FILES,
    NearestTests,
    _imports_of_test,
    allot,
    by_package,
    draw,
    files_to_run,
    package_of,
)

SOURCE = '''"""A text is never changed: 1 < 2."""

def grow(x: int = 1) -> int:
    if x < 3 and x:
        return x + 1
    return f"{x + 2}"
'''
PYPROJECT = """
[tool.pytest.ini_options]
markers = ["slow", "metal"]
"""
TEST = """
from labkit.toy import grow

def test_it_fails_on_the_original():
    assert grow(5) == 0

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
    third = all_mutants[2]
    assert third.text == SOURCE.replace("x < 3", "(x <= 3)")
    assert third.diff.splitlines()[-3:] == [
        "-    if x < 3 and x:",
        "+    if (x <= 3) and x:",
        "         return x + 1",
    ]
    assert len({mutant.name for mutant in all_mutants}) == len(all_mutants)


def test_a_draw_is_stratified_by_package_and_repeatable():
    candidates = [
        mutant
        for path in ("labkit/toy.py", "labkit/a/b/deep.py", "labkit/a/x.py", "labkit/c/y.py")
        for mutant in mutants(path, SOURCE)
    ]
    sizes = {package: len(group) for package, group in by_package(candidates).items()}
    assert sizes == {"labkit": 8, "labkit/a": 16, "labkit/c": 8}
    drawn = draw(candidates, 7, seed=1)
    parts = {package: len(group) for package, group in by_package(drawn).items()}
    assert parts == allot(sizes, 7) == {"labkit": 2, "labkit/a": 3, "labkit/c": 2}
    assert draw(candidates[::-1], 7, seed=1) == drawn != draw(candidates, 7, seed=2)
    assert sorted(m.name for m in draw(candidates, None, seed=1)) == sorted(
        mutant.name for mutant in candidates
    )
    # Another package's mutants do not change which ones are drawn.
    toys = [mutant for mutant in candidates if mutant.path == "labkit/toy.py"]
    assert draw(toys, 2, seed=1) == [m for m in drawn if m.path == "labkit/toy.py"]


@pytest.mark.parametrize("number", range(3, 25))
def test_every_package_is_drawn_and_none_beyond_its_mutants(number):
    sizes = {"large": 20, "small": 1, "medium": 2}
    parts = allot(sizes, number)
    assert sum(parts.values()) == min(number, 23)
    assert all(1 <= parts[name] <= size for name, size in sizes.items())


def test_a_sample_below_one_of_each_package_is_refused():
    with pytest.raises(ValueError, match="a sample of 1 is too small for 2 packages"):
        allot({"a": 5, "b": 5}, 1)


def test_the_tests_of_a_module_are_its_mirror_then_the_nearest(tmp_path):
    for name, text in {
        "labkit/__init__.py": "",
        "labkit/a/__init__.py": "",
        "labkit/a/long_name.py": "",
        "labkit/a/user.py": "from labkit.a import long_name",
        "labkit/a/far.py": "import labkit.a.user",
        "labkit/a/alone.py": "",
        "tests/a/test_long_name.py": "def f():\n    from labkit.a.long_name import x",
        "tests/test_a.py": "import labkit.a.far",
        "tests/a/c/test_of_a_name.py": "from labkit.a.far import x",
        "tests/b/test_long_and_far.py": "from labkit.a.far import x",
        "tests/b/test_direct.py": "from labkit.a.long_name import x",
        "tests/b/test_user.py": "COMMAND = ['-m', 'labkit.a.user']",
        "tests/b/test_other.py": "from labkit.a.alone import x",
        "tests/conftest.py": "from labkit.a import alone",
        "tests/c/conftest.py": "from labkit.a import alone",
        "tests/c/test_served.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    files = NearestTests(tmp_path)
    expected = ["tests/a/test_long_name.py", "tests/test_a.py", "tests/a/c/test_of_a_name.py"]
    assert files.nearest("labkit/a/long_name.py")[:3] == expected
    (tmp_path / "tests/a/test_long_name.py").unlink()
    (tmp_path / "tests/a/c/test_of_a_name.py").unlink()
    expected = ["tests/test_a.py", "tests/b/test_direct.py", "tests/b/test_user.py"]
    assert NearestTests(tmp_path).nearest("labkit/a/long_name.py")[:3] == expected
    # The package's own file, then one that imports it and one whose fixtures do.
    expected = ["tests/test_a.py", "tests/b/test_other.py", "tests/c/test_served.py"]
    assert files.nearest("labkit/a/alone.py") == expected
    assert files.nearest("labkit/__init__.py") == []


def test_fixtures_and_helpers_of_the_folders_above_a_test_count(tmp_path):
    for name, text in {
        "conftest.py": "from labkit.a import everywhere",
        "c/conftest.py": "from labkit.a import alone",
        "c/helper.py": "from labkit import b",
        "c/deep/test_below.py": "from helper import x",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    modules = ("labkit.a", "labkit.a.alone", "labkit.a.everywhere", "labkit.b")
    file, origins = tmp_path / "c/deep/test_below.py", {module: {} for module in modules}
    found = _imports_of_test(file, tmp_path, origins)
    assert found == {"labkit.a", "labkit.a.alone", "labkit.b"}  # not the fixtures of all tests


def test_tests_that_mention_a_modules_terms_run_on_it_without_an_import(tmp_path):
    module = (
        '"""Not a term: prose."""\n'
        "class Option:\n    scale: str\n    depth: int\n_hidden = rare = 1\n"
        'fail("too steep", {"slope": 1})\n'
    )
    for name, text in {
        "labkit/b/option.py": module,
        "tests/a/test_scale.py": "COMMAND = ['scale=large']",  # titled: as good as two of its kind
        "tests/a/test_rare.py": "COMMAND = ['rare=1']",
        "tests/a/test_common.py": "Option, depth, scale",
        "tests/a/test_private.py": "_hidden, prose",
        "tests/a/test_far.py": "depth",
        "tests/b/test_beside.py": "depth",
        "tests/a/test_messages.py": "match='too steep', slope",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    order = ["a/test_messages", "a/test_common", "a/test_rare", "a/test_scale", "b/test_beside",
             "a/test_far"]  # fmt: skip
    nearest = NearestTests(tmp_path).nearest("labkit/b/option.py")
    assert nearest == [f"tests/{name}.py" for name in order] and len(order) < MAX_TEST_FILES


def test_the_page_of_options_is_compared_after_a_change_of_a_default(tmp_path):
    for name, text in {
        "labkit/config/server.py": "",
        "labkit/engine/server.py": "",
        "tests/test_config.py": "import labkit.config.server",
        "tests/test_options.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    files = NearestTests(tmp_path)
    assert files.nearest("labkit/config/server.py") == [
        "tests/test_config.py",
        "tests/test_options.py",
    ]
    assert files.nearest("labkit/engine/server.py") == []


def test_names_that_a_package_passes_on_and_helpers_of_tests_lead_to_a_module(tmp_path):
    for name, text in {
        "labkit/a/__init__.py": "from labkit.a.deep import Deep\nfrom labkit.a.wide import Wide",
        "labkit/a/deep.py": "class Deep: ...",
        "labkit/a/wide.py": "class Wide: ...",
        "tests/b/test_a_wide.py": "from labkit.a import Wide",
        "tests/b/test_deep.py": "from labkit.a import Deep",
        "tests/b/test_helped.py": "from helper import x",
        "tests/b/helper.py": "import launcher",
        "tests/launcher.py": "from labkit.a import Deep\nimport helper",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    order = [f"tests/b/test_{name}.py" for name in ("deep", "helped", "a_wide")]
    assert NearestTests(tmp_path).nearest("labkit/a/deep.py") == order


def test_a_package_over_its_budget_fails_and_listed_survivors_do_not_count():
    forty = [m for name in "vwxyz" for m in mutants(f"labkit/a/{name}.py", SOURCE)]
    killed, alive = [(m, run.KILLED) for m in forty[4:]], [(m, run.SURVIVES) for m in forty[:4]]
    listed = {forty[0].name: "the same"}
    for pct, exceeded in ((7.5, False), (7.4, True), (0, True)):
        one, total = run.package_results(killed + alive, listed, {"labkit/a": pct, "all": 50})
        assert (one.drawn, one.killed, one.listed) == (40, 36, 1)
        assert one.survivors == total.survivors == tuple(forty[1:4])
        assert one.exceeded is exceeded and not total.exceeded
    text = run.report([one, total], "40 mutants of labkit, seed 5")
    assert text.startswith("40 mutants of labkit, seed 5\n\n--- labkit/a/v.py\n")
    assert text.count(forty[1].diff) == 1 and forty[0].diff not in text
    assert text.splitlines()[-5:] == [
        "package   drawn  killed  listed  survived   rate  budget",
        "labkit/a     40      36       1         3    8 %     0 %  exceeded",
        "all          40      36       1         3    8 %    50 %",
        "",
        "Survivors exceed the budget: labkit/a.",
    ]


def test_a_budget_applies_to_a_package_of_few_drawn_mutants_only_in_the_total():
    few = [
        (mutant, run.SURVIVES)
        for package in "abc"
        for mutant in mutants(f"labkit/{package}/x.py", SOURCE)
    ]
    budgets = {"labkit/a": 0, "labkit/b": 0, "labkit/c": 0, "all": 99}
    results = run.package_results(few, [], budgets)
    assert [one.drawn for one in results] == [8, 8, 8, 24] and run.MIN_DRAWN == 20
    assert [one.exceeded for one in results] == [False, False, False, True]
    assert run.report(results, "24").endswith(
        "Survivors exceed the budget: all. No budget applies to fewer than 20 drawn mutants (-).\n"
    )
    assert not any(one.exceeded for one in run.package_results(few[:19], [], budgets))


def repository(folder, texts):
    """Write files, by name, into a new git repository."""
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder


def test_a_mutant_that_a_test_detects_is_killed_and_others_survive(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer than the tests
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p xdist.plugin")
    texts = {
        "labkit/__init__.py": "",
        "labkit/toy.py": SOURCE,
        "tests/toy/test_toy.py": TEST,
        "tests/toy/test_without_tests_of_toy.py": "from labkit.toy import grow",
        "pyproject.toml": PYPROJECT,
    }
    source = repository(tmp_path / "toy", texts)
    copies = [run.WorkingCopy(source, tmp_path / f"work/{number}") for number in range(2)]
    file = tmp_path / "results.jsonl"
    wanted = {
        "return x + 1 | x + 1 -> (x - 1)": run.KILLED,
        'return f"{x + 2}" -> return None': run.SURVIVES,  # seen by a test that always fails
    }
    drawn = [m for m in run.all_mutants(source, ["labkit"]) if m.what in wanted]
    results = run.run_sample(copies, drawn, file)
    assert {mutant.what: result for mutant, result in results} == wanted
    assert "test_it_fails_on_the_original" in capsys.readouterr().out
    for copy in copies:
        assert (copy.path / "labkit/toy.py").read_text() == SOURCE
    monkeypatch.delattr(run.WorkingCopy, "failures")  # what is known is not tested again
    assert run.run_sample(copies, drawn, file) == results


def test_stopping_ends_the_running_tests_and_starts_no_more(tmp_path):
    waiting = "import time\ndef test_it_waits():\n    time.sleep(600)"
    texts = {"tests/test_slow.py": waiting, "pyproject.toml": PYPROJECT}
    source = repository(tmp_path / "toy", texts)
    copy = run.WorkingCopy(source, tmp_path / "work")
    threading.Timer(0.5, copy.stop).start()
    for _ in range(2):
        with pytest.raises(run.Stopped):
            copy.failures(["tests/test_slow.py"])


class FakeTree:
    """A tree in which pytest has a known outcome on the original and on a mutant."""

    def __init__(self, on_original, on_mutant):
        self._outcomes, self._mutant = {None: on_original, "mutant": on_mutant}, None

    def write(self, mutant):
        self._mutant = "mutant"

    def restore(self, path):
        self._mutant = None

    def failures(self, arguments):
        outcome = self._outcomes[self._mutant]
        return outcome and {name for name in outcome if f"--deselect={name}" not in arguments}


@pytest.mark.parametrize(
    ("on_original", "on_mutant", "killed"),
    [
        (set(), {"a.py::t"}, True),
        ({"a.py::t"}, {"a.py::t"}, False),
        (set(), None, True),  # hangs
        (None, None, False),
        (set(), {"a.py"}, True),  # cannot be imported
        ({"a.py::t"}, {"a.py"}, True),
        (set(), {""}, True),  # pytest cannot start
        ({""}, {""}, False),
    ],
)
def test_what_fails_on_the_original_too_does_not_kill_a_mutant(on_original, on_mutant, killed):
    tests = run.MutantTests(FakeTree(on_original, on_mutant))
    mutant = mutants("labkit/toy.py", SOURCE)[0]
    assert tests.kill(mutant, ["a.py"]) is tests.kill(mutant, ["a.py"]) is killed
    assert not tests.kill(mutant, [])


@pytest.mark.parametrize(
    ("name", "listed"),
    [
        ("labkit/a.py | x = y.reshape(-1, 3, 1) | 1 -> 2", True),
        ("labkit/a.py | x = y.reshape(-1, 3, 1) | 1 -> 2 | 2", False),  # the other one
        ("labkit/a.py | x = f(1).reshape(-1) | 1 -> 2", False),
        ("labkit/a.py | x = y.reshape(-1) | -1 -> (1)", False),
        ("labkit/a.py | prefetch(code, at, 64) -> pass", True),
        ("labkit/a.py | prefetch(code, at, 64) | 64 -> 65", False),
        ("labkit/analysis/pages/a.py | plot(x, 7.5, fontsize=7.5) | 7.5 -> 11.25", True),
        ("labkit/analysis/pages/a.py | plot(x, 7.5, fontsize=8) | 7.5 -> 11.25", False),
        ("labkit/a.py | POLL_S = 0.01  # why | 0.01 -> 0.015", True),
        ("labkit/a.py | POLLS = 10 | 10 -> 11", False),
        ("labkit/a.py | time.sleep(0.02) | 0.02 -> 0.03", True),
        ("labkit/a.py | time.sleep(2 * 0.02) | 2 -> 3", False),
    ],
)
def test_a_mutant_is_listed_by_its_kind(name, listed):
    assert (run.listed_of([name]) == {name}) is listed


def test_the_list_of_survivors_is_current_and_every_package_has_a_budget():
    listed = run.listed_survivors()
    files = {name.split(" | ")[0] for name in listed}
    assert listed.keys() <= {mutant.name for mutant in run.all_mutants(run.ROOT, files)}
    assert all({**listed, **run.listed_kinds()}.values())
    modules = (f.relative_to(run.ROOT) for f in run.ROOT.glob("labkit/**/*.py"))
    packages = {package_of(str(path)) for path in modules}
    assert run.survivor_budgets().keys() == packages | {run.TOTAL}


def test_a_change_runs_the_tests_near_it(tmp_path):
    for name, text in {
        "labkit/toy.py": "def grow(): ...",
        "tests/test_toy.py": "from labkit.toy import grow",
        "tests/fields/conftest.py": "",
        "tests/fields/test_field.py": "",
        "tests/test_readme.py": "",
        "README.md": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for changed, expected in {
        "labkit/toy.py": ["tests/test_toy.py"],
        "tests/test_toy.py": ["tests/test_toy.py"],
        "tests/fields/conftest.py": ["tests/fields/test_field.py"],
        "README.md": ["tests/test_readme.py"],
        "LICENSE": [],
        "tests/test_deleted.py": [],
        "labkit/deleted.py": [],
    }.items():
        assert files_to_run([changed], tmp_path) == expected, changed
