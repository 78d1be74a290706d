"""The tests of which only some cases are run by default."""

from pathlib import Path

import pytest
from sampled_cases import SAMPLED, commit, draw

TESTS = Path(__file__).parent
NAMES = [f"case {number}" for number in range(10)]


@pytest.mark.parametrize(("file", "name"), SAMPLED)
def test_a_sampled_test_exists_and_has_cases(file, name):
    """Under another name, all of its cases would be run again."""
    lines = (TESTS / file).read_text("utf-8").splitlines()
    (place,) = [i for i, line in enumerate(lines) if line.startswith(f"def {name}(")]
    assert any("parametrize" in line for line in lines[max(0, place - 100) : place])


def test_each_commit_draws_its_share_of_the_cases():
    drawn = [draw(NAMES, 4, str(seed)) for seed in range(100)]
    assert {len(names) for names in drawn} == {3}
    assert set().union(*drawn) == set(NAMES)
    assert draw(NAMES, 4, "7") == draw(NAMES[::-1], 4, "7") != draw(NAMES, 4, "8")
    assert draw(NAMES, 1, "7") == set(NAMES) and len(draw(NAMES, 99, "7")) == 1


def test_the_seed_is_the_commit(tmp_path, monkeypatch):
    assert len(commit()) in (0, 40)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit() == ""
