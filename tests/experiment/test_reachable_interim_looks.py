from dataclasses import replace
from functools import partial
from itertools import product

import pytest

from labkit.analysis.statistics import permutation_test
from labkit.config import ConfigError, Design, PlannedLook
from labkit.experiment.compose.reachable_interim_looks import fewest_blocks, with_reachable_looks
from labkit.experiment.schedule.cell_manifest import write_manifest

STANDARD = Design(blocks=10, looks=[PlannedLook(8, 0.02)])
SEQUENTIAL = Design(blocks=20, looks=[PlannedLook(8, 0.01), PlannedLook(12, 0.01)])


def reachable(tmp_path, design, arms, given=False):
    result = with_reachable_looks(design, arms, tmp_path, given)
    return result.blocks, [(look.blocks, look.alpha) for look in result.looks]


@pytest.mark.parametrize(
    ("design", "arms", "expected"),
    [
        (STANDARD, 2, (10, [(8, 0.02), (10, 0.03)])),  # 2 * 2 / 2**8 is .016
        (STANDARD, 3, (10, [])),  # .023: everything is spent at the end
        (STANDARD, 25, (10, [])),  # 50 / 1024 is .049
        (STANDARD, 26, (11, [])),
        (SEQUENTIAL, 2, (20, [(12, 0.02), (20, 0.03)])),
        (Design(blocks=4), 3, (4, [])),  # a first look claims nothing anyway
        (Design(blocks=6), 1, (6, [])),
        (Design(blocks=6), 3, (7, [])),
        (Design(blocks=3, runs_per_block=2), 6, (4, [])),  # 2 * 6 / 6**3 is .056
    ],
)
def test_looks_out_of_reach_give_their_alpha_to_the_next(tmp_path, design, arms, expected):
    assert reachable(tmp_path, design, arms) == expected


def test_typed_blocks_that_decide_nothing_are_refused(tmp_path):
    assert reachable(tmp_path, Design(blocks=7), 3, given=True) == (7, [])
    message = r"design\.blocks=6: with 3 arms, .* \(smallest: 0\.094\); set design\.blocks=7"
    with pytest.raises(ConfigError, match=message):
        reachable(tmp_path, Design(blocks=6), 3, given=True)


def test_an_alpha_that_no_number_of_blocks_reaches_is_refused(tmp_path):
    """Beyond 300,000 relabellings, 100,000 are drawn, so p has a floor."""
    for runs, blocks in product((1, 2), range(1, 30)):
        of_test = permutation_test.smallest_p(blocks, runs)
        assert Design(runs_per_block=runs).smallest_p(blocks) == of_test
    design = Design(blocks=20, alpha=3e-5)
    assert fewest_blocks(design, 1) == 17 and reachable(tmp_path, design, 1) == (20, [])
    for plan, last in (
        (fewest_blocks, "the last look has 2.4e-05, and "),
        (partial(reachable, tmp_path), ""),
    ):
        floor = "with 2 arms no p of so many blocks is below 4e-05; set a larger alpha"
        with pytest.raises(ConfigError, match=f"^design.alpha=3e-05: {last}{floor}$"):
            plan(design, 2)


def test_tests_of_all_relabellings_have_no_floor(tmp_path):
    exact = Design(blocks=18, alpha=1e-5)
    assert reachable(tmp_path, exact, 1) == (18, [])
    looks = [PlannedLook(7, 1e-5)]
    assert Design(blocks=8, runs_per_block=2, alpha=5e-5, looks=looks).looks == looks
    with pytest.raises(ConfigError, match="with 1 arm no p of so many blocks is below 2e-05"):
        reachable(tmp_path, replace(exact, blocks=19), 1)


def test_a_cell_that_began_with_a_look_out_of_reach_keeps_it(make_cell):
    cell = make_cell(blocks=10, looks=[PlannedLook(8, 0.02)])
    write_manifest(cell, 8)
    assert with_reachable_looks(STANDARD, 3, cell.dir, blocks_given=False) == STANDARD
    assert with_reachable_looks(STANDARD, 3, cell.dir / "new", blocks_given=False).looks == []
