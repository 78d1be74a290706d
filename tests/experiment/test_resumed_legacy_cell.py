"""Studies that earlier versions began, with 2 runs of each arm per block by default."""

import copy
import dataclasses

import pytest

from labkit.config import ConfigError, Design, Isolation, PlannedLook
from labkit.experiment.compose.cell_composer import to_cell
from labkit.experiment.compose.resumed_legacy_cell import as_begun
from labkit.experiment.schedule.cell_manifest import write_manifest
from labkit.experiment.schedule.design_change_check import refuse_changes
from labkit.records import read_cell

PROCESS, TURNS = Isolation.process, Isolation.in_process
STANDARD = Design(blocks=10, looks=[PlannedLook(8, 0.02)])


def as_begun_in(cell, design=STANDARD, auto=PROCESS, given=False):
    continued = as_begun(design, auto, cell.dir, given)
    looks = [(look.blocks, look.alpha) for look in continued.looks]
    return continued.isolation, continued.blocks, continued.runs_per_block, looks


@pytest.fixture
def begun(make_cell, replace):
    """Give a function that writes the manifest of a cell with 2 runs of each arm per block."""

    def begin(blocks=5, looks=((4, 0.02),), runs=2):
        declared = [PlannedLook(*look) for look in looks]
        cell = make_cell(blocks=blocks, runs_per_block=runs, looks=declared)
        write_manifest(cell, looks[0][0] if looks else blocks)
        return cell

    return begin


def test_a_cell_of_two_runs_per_block_ends_where_it_was_declared_to_end(begun):
    assert as_begun_in(begun()) == (PROCESS, 5, 2, [(4, 0.02), (5, 0.03)])


def test_a_cell_without_looks_too(begun):
    cell = begun(blocks=3, looks=())
    assert as_begun_in(cell, Design(blocks=4)) == (PROCESS, 3, 2, [])


def test_typed_blocks_count_the_blocks_of_the_cell(begun, replace):
    cell = begun()
    grown = as_begun(replace(STANDARD, blocks=6), PROCESS, cell.dir, blocks_given=True)
    assert (grown.blocks, grown.runs_per_block) == (6, 2)
    assert [look.blocks for look in grown.all_looks] == [4, 6]
    refuse_changes(replace(cell, design=grown))
    fewer = as_begun(replace(STANDARD, blocks=3), PROCESS, cell.dir, blocks_given=True)
    assert fewer.blocks == 3 and fewer.looks == []
    with pytest.raises(ConfigError, match=r"design\.looks was"):
        refuse_changes(replace(cell, design=fewer))


def test_an_auto_cell_of_separate_processes_stays_one(begun, replace):
    assert as_begun_in(begun(), auto=TURNS)[0] is PROCESS
    turns = as_begun_in(begun(), replace(STANDARD, isolation=TURNS))
    assert turns == (TURNS, 10, 1, [(8, 0.02)])  # which the runner refuses


def test_cells_of_this_version_and_new_cells_are_as_composed(begun, make_cell):
    composed = (PROCESS, 10, 1, [(8, 0.02)])
    assert as_begun_in(make_cell()) == composed
    assert as_begun_in(begun(blocks=8, looks=(), runs=1)) == composed


@pytest.mark.parametrize("looks", [[], [PlannedLook(8, 0.02)]])
def test_twice_the_blocks_where_arms_take_turns_are_explained(make_cell, looks):
    """Earlier versions ran design.blocks=5 as 10 blocks."""
    write_manifest(make_cell(blocks=10, isolation=TURNS, looks=looks), 10)
    with pytest.raises(ConfigError, match=r"set design\.blocks=10"):
        refuse_changes(make_cell(blocks=5, isolation=TURNS))
    with pytest.raises(ConfigError) as refusal:
        refuse_changes(make_cell(blocks=4, isolation=TURNS))
    assert "older version" not in str(refusal.value)


def test_an_option_continues_under_its_former_name_where_it_means_the_same(composed, tmp_path):
    cell = to_cell(composed("ablation=none", "workload=kernel_decode"), tmp_path / "cell")

    def named_formerly(value):
        config = copy.deepcopy(cell.arms[0].config)
        assert config["engine"]["attention"].pop("unit") == "auto"
        config["engine"]["attention"]["gqa_sharing"] = value
        config["engine"]["server"]["start_timeout_s"] = 300.0  # the former default
        return dataclasses.replace(cell.arms[0], config=config)

    for value in (True, False):
        begun = dataclasses.replace(
            cell, dir=tmp_path / str(value), arms=(named_formerly(value), *cell.arms[1:])
        )
        write_manifest(begun, 1)
        today = dataclasses.replace(cell, dir=begun.dir)
        if value:
            refuse_changes(today)
        else:
            with pytest.raises(ConfigError, match=r"attention\.gqa_sharing was False, now it is"):
                refuse_changes(today)


def test_a_cell_continues_on_several_hosts_in_its_folder_and_stays_so(composed, tmp_path):
    words = ["ablation=none", f"out={tmp_path}"]
    names = set()
    for more, hosts in (([], False), (["design.across_hosts=true"], True), ([], True)):
        cell = composed(*words, *more)
        assert list(cell.overrides)[1:] == more
        names.add(cell.name)
        ready = to_cell(cell, tmp_path / cell.name)
        write_manifest(ready, 1)
        assert ready.design.across_hosts is read_cell(ready.dir)["design"]["across_hosts"] is hosts
    assert len(names) == 1
