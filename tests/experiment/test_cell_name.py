"""Names of cell folders: readable, unique, and those of a study that exists already."""

import re

import pytest

from labkit.experiment.compose.cell_name import cell_name

NUMPY = "+ablation.arms.numpy={engine.attention.backend:'mine.attention:OneByOne'}"
CLAIM = "ablation.claims.engaged.numpy=[kernel.one_by_one]"


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "default"),
        (["workload=chat", "ablation=seq_map"], "ablation=seq_map,workload=chat"),
        (
            ["out=outputs/x", "plan=true", "redo=failed", "design.blocks=8"],
            "default",
        ),
        (["design=quick", "out=x"], "design=quick"),
        (["seed=1", "design.timeout_s=9"], "design.timeout_s=9,seed=1"),
        (["model.path=/a b/c"], "model.path=_a_b_c"),
        (["~ablation.arms.base"], "~ablation.arms.base"),
        (["workload.texts=данные/文本.txt"], "workload.texts=данные_文本.txt"),
    ],
)
def test_cell_folders_are_named_by_their_overrides(overrides, name):
    assert cell_name(overrides) == name


def test_long_names_end_in_a_hash_and_stay_distinct():
    long = ("x" * 200, "д" * 200, "д" * 100)
    names = {cell_name([f"model.path={text}{i}"]) for i in range(3) for text in long}
    assert len(names) == 9
    assert all(len(name.encode()) <= 120 for name in names)


def test_a_study_with_an_earlier_name_without_its_letters_keeps_it(tmp_path):
    (tmp_path / "model.path=__").mkdir()
    assert cell_name(["model.path=да", f"out={tmp_path}"]) == "model.path=__"
    assert cell_name(["model.path=дом", f"out={tmp_path}"]) == "model.path=дом"


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["ablation=seq_map", NUMPY, CLAIM], "ablation=seq_map+numpy"),
        ([NUMPY, "workload=ragged", "ablation=seq_map"], "ablation=seq_map+numpy,workload=ragged"),
        ([NUMPY, "workload=ragged"], "+numpy,workload=ragged"),
        ([NUMPY.replace("arms.numpy", "arms.a"), NUMPY, "ablation=none"], "ablation=none+a+numpy"),
        ([NUMPY, "~ablation.arms.base"], "+numpy,~ablation.arms.base"),
        ([CLAIM, "ablation=seq_map"], "ablation=seq_map"),
        ([CLAIM], "default"),
    ],
)
def test_an_arm_of_the_command_line_is_named_in_a_word(overrides, name):
    named = cell_name([*overrides, "out=elsewhere"])
    assert re.fullmatch(re.escape(name) + "-[0-9a-f]{8}", named)
    assert cell_name(overrides[::-1]) == named


def test_another_definition_of_an_arm_is_another_cell():
    others = [NUMPY.replace("OneByOne", "Two"), NUMPY.replace("numpy=", "numpty=")]
    cells = [[NUMPY], *([other] for other in others), [NUMPY, CLAIM], [NUMPY, "seed=1"]]
    assert len({cell_name(overrides) for overrides in cells}) == len(cells)


def test_a_long_name_with_arms_is_cut_and_stays_distinct():
    long = f"model.path={'x' * 200}"
    names = {cell_name([long, arm]) for arm in (NUMPY, NUMPY.replace("OneByOne", "Two"))}
    assert len(names) == 2 and all(len(name) == 120 for name in names)


def test_a_study_that_has_the_cell_under_its_written_out_name_keeps_it(tmp_path):
    overrides = ["ablation=none", "+ablation.arms.b={seed:1}"]
    written_out = "+ablation.arms.b=_seed_1_,ablation=none"
    assert cell_name([*overrides, f"out={tmp_path}"]).startswith("ablation=none+b-")
    (tmp_path / written_out).mkdir()
    assert cell_name([*overrides, f"out='{tmp_path}'"]) == written_out
    assert cell_name([*overrides, "seed=2", f"out={tmp_path}"]) != written_out


def test_a_cell_is_continued_with_an_option_that_may_change(tmp_path):
    """A longer time-out, or another host, began another cell."""
    overrides = ["workload=chat", "design.timeout_s=9", NUMPY, f"out={tmp_path}"]
    begun = cell_name([overrides[0], *overrides[2:]])
    assert cell_name(overrides) != begun
    (tmp_path / begun).mkdir()
    assert cell_name(overrides) == begun
    assert cell_name(["workload=agent", *overrides[1:]]) != begun


def test_a_cell_from_before_its_experiment_swept_models_keeps_its_name(tmp_path):
    def name(model, out=tmp_path):
        return cell_name(["experiment=e", f"model={model}", "workload=chat", f"out={out}"])

    assert name("tiny") == "experiment=e,model=tiny,workload=chat"
    arms = tmp_path / "experiment=e,workload=chat" / "arms"
    arms.mkdir(parents=True)
    (arms / "base.json").write_text('{"config": {"model": {"name": "tiny"}}}')
    assert name("tiny") == "experiment=e,workload=chat"
    assert name("hybrid") == "experiment=e,model=hybrid,workload=chat"
    assert name("tiny", tmp_path / "other") == "experiment=e,model=tiny,workload=chat"
