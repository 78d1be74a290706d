"""The command that would answer what a cell leaves open."""

import json
import math
import re
import shlex
from dataclasses import replace

import pytest

from labkit.analysis.comparison.best_setting import is_decided
from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.findings.next_command import MAX_BLOCKS, next_command
from labkit.cli import hydra_arguments, multirun_composition

NAME = "study/ablation=seq_map,engine=paged"


def command(path):
    found = next_command(analyse(path))
    return None if found is None else (shlex.split(found.command), found.purpose)


def test_an_answered_question_needs_no_command(make_cell):
    assert command(make_cell(NAME, effects={"seq_map": 0.8})) is None


def test_missing_blocks_are_run_in_the_same_folder(make_cell):
    def lose(record):
        return None if record.block == 3 and record.position == 0 else record

    words, purpose = command(make_cell(NAME, change=lose))
    assert words == [
        "python", "-m", "labkit", "ablation=seq_map", "engine=paged", "out=THIS_FOLDER", "-m",
    ]  # fmt: skip
    assert purpose == "run the blocks that are missing"


def test_failed_blocks_are_run_again(make_cell):
    def fail(record):
        if record.block < 3:
            return record
        return replace(record, outcome="oom", detail="no room", cases=())

    words, purpose = command(make_cell(NAME, change=fail))
    assert words[-2:] == ["redo=failed", "-m"] and purpose.startswith("run failed blocks again")


def test_runs_that_ran_out_of_memory_as_claimed_are_not_run_again(make_cell):
    """Else the advice would stay the same however often it is followed."""

    def die(record):
        if record.arm != "tight":
            return record
        return replace(record, outcome="oom", detail="no room", cases=(), counters={})

    cell = make_cell(NAME, effects={"seq_map": 0.8, "tight": 1.0}, change=die)
    words, _ = command(cell)
    assert words[-2:] == ["redo=failed", "-m"]
    path = cell / "arms" / "tight.json"
    arm = json.loads(path.read_text())
    path.write_text(json.dumps(arm | {"claims": arm["claims"] | {"out_of_memory": True}}))
    (cell / "SHA256SUMS").unlink()
    assert command(cell) is None


def test_an_estimate_asks_for_the_standard_design(make_cell):
    words, purpose = command(make_cell(f"{NAME},design.blocks=1", blocks=1, runs=1))
    assert words[3:] == ["ablation=seq_map", "engine=paged", "design=standard", "-m"]
    assert purpose == "run enough blocks for a verdict"


def test_a_standard_design_keeps_the_margin_and_the_isolation(make_cell):
    """Else "equivalent" would mean something else in the new study."""
    own = "design.margin_pct=1,design.isolation=live"
    words, _ = command(make_cell(f"{NAME},{own},design.blocks=1", blocks=1, runs=1))
    assert words[5:] == ["design.margin_pct=1", "design.isolation=live", "design=standard", "-m"]


@pytest.mark.parametrize("blocks", [1, 8])
def test_more_blocks_do_not_repair_a_failed_gate(make_cell, blocks):
    def change(record):
        return replace(record, counters={}) if record.arm == "seq_map" else record

    noisy = {"effects": {"seq_map": 1.01}, "noise": 0.03, "cases": ("one",), "seed": 3}
    cell = make_cell(NAME, blocks=blocks, runs=1, change=change, **noisy)
    assert "vacuous" in analyse(cell).causes("seq_map")[0] and command(cell) is None


def test_the_command_names_the_folders_of_the_users_files(make_cell):
    cell = make_cell(f"{NAME},design.blocks=1", blocks=1, runs=1)
    manifest = json.loads((cell / "cell.json").read_text())
    (cell / "cell.json").write_text(json.dumps({**manifest, "config_dirs": ["my files", "b"]}))
    words, _ = command(cell)
    assert words[3:7] == ["--config-dir", "my files", "--config-dir", "b"]
    assert analyse(cell).cell.to_json()["config_dirs"] == ["my files", "b"]


def test_undecided_rows_ask_for_more_blocks_in_a_new_study(make_cell):
    cell = make_cell(NAME, effects={"seq_map": 1.01}, noise=0.03, cases=("one",), seed=3)
    words, purpose = command(cell)
    (blocks,) = (int(w.partition("=")[2]) for w in words if w.startswith("design.blocks="))
    assert 4 < blocks <= MAX_BLOCKS and "design.looks=[]" in words
    assert not any(word.startswith("out=") for word in words)
    assert purpose == "decide 1 undecided row in a new study"
    (one,) = [one for one in analyse(cell).cell.comparisons if one.arm == "seq_map"]
    assert f"a new study of about {blocks} blocks would detect" in one.reason


@pytest.mark.parametrize("units", [None, 16])
@pytest.mark.parametrize("design", ["standard", "sequential"])
def test_a_study_that_takes_its_time_asks_for_the_blocks_that_it_needs_too(
    make_cell, design, units
):
    """More time gave design=sequential no more blocks, and kernels at most 24."""
    name = f"{NAME},design={design}"
    cell = make_cell(name, effects={"seq_map": 1.01}, noise=0.03, cases=("one",), seed=3)
    manifest = json.loads((cell / "cell.json").read_text())
    manifest["design"] |= {"time_s": 120.0, "units": units}
    (cell / "cell.json").write_text(json.dumps(manifest))
    words, _ = command(cell)
    (one,) = [one for one in analyse(cell).cell.comparisons if one.arm == "seq_map"]
    need = int(re.search(r"study of about (\d+) blocks", one.reason)[1])
    multirun_composition.register()
    (composed,) = multirun_composition.compose_cells(hydra_arguments.parse(words[3:]))
    found = composed.experiment.design
    assert found.time == 60 * math.ceil(2 * need / 4) and found.looks == []
    assert (found.name, found.blocks) == (design, need if units is None else 0)


def test_how_many_blocks_leave_one_setting_of_a_sweep_is_not_known(make_cell):
    """A sweep asked for the blocks that a comparison with its baseline would need."""
    cell = make_cell(NAME, effects={"seq_map": 1.01}, noise=0.03, cases=("one",), seed=3)
    manifest = json.loads((cell / "cell.json").read_text())
    manifest["sweep"] = {"engine.attention.resolver": ["binary_search", "seq_map"]}
    (cell / "cell.json").write_text(json.dumps(manifest))
    assert not is_decided(analyse(cell).best) and command(cell) is None


def test_estimates_ask_for_the_time_that_they_would_take(make_cell):
    cell = make_cell(NAME, effects={"seq_map": 1.0}, noise=0.001, cases=("one", "two"), seed=3)
    manifest = json.loads((cell / "cell.json").read_text())
    manifest["design"] |= {"time_s": 120.0, "estimates": {"two": 130.0}}
    (cell / "cell.json").write_text(json.dumps(manifest))
    words, purpose = command(cell)
    assert "design.time=5m" in words and purpose == "decide 1 estimate in a new study"
    manifest["design"]["estimates"]["two"] = 7000.0  # nobody wants to be told two hours
    (cell / "cell.json").write_text(json.dumps(manifest))
    assert command(cell) is None


@pytest.mark.parametrize("name", ["study/my cell", "study/ablation=x__y", "study/+new=1"])
def test_overrides_that_a_name_does_not_give_are_not_guessed(make_cell, name):
    assert command(make_cell(name, blocks=1, runs=1)) is None


def test_without_an_arm_there_is_nothing_to_decide(make_cell):
    assert command(make_cell(NAME, effects={}, noise=0.2)) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("study/engine=paged", ["engine=paged", "ablation.claims.identity=none", "-m"]),
        (NAME, None),  # the ablation claims it
        ("study/ablation.claims.identity=bitwise,engine=paged", None),
    ],
)
def test_an_identity_that_nobody_asked_for_is_named(make_cell, make_array, name, words):
    """Arms of the command line that change the precision failed ``ablation=none``'s claim."""

    def change(record):
        if record.arm != "seq_map":
            return record
        cases = tuple(replace(c, outputs=make_array([9] * 64, [9] * 16)) for c in record.cases)
        return replace(record, cases=cases)

    found = command(make_cell(name, change=change))
    assert (found and found[0][3:]) == words
