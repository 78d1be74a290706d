"""The tests of which only every n-th case is run by default."""

from pathlib import Path

import pytest
from sampled_cases import SAMPLED

TESTS = Path(__file__).parent


@pytest.mark.parametrize(("file", "name"), SAMPLED)
def test_a_sampled_test_exists_and_has_cases(file, name):
    """Under another name, all of its cases would be run again."""
    lines = (TESTS / file).read_text("utf-8").splitlines()
    (place,) = [i for i, line in enumerate(lines) if line.startswith(f"def {name}(")]
    assert any("parametrize" in line for line in lines[max(0, place - 40) : place])
