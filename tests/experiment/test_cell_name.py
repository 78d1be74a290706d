"""Names of cell folders: readable, unique, and those of a study that exists already."""

import hashlib
import json
from pathlib import Path

import pytest

from labkit.experiment.compose.cell_name import cell_name

NUMPY = "+ablation.arms.numpy={engine.attention.backend:'mine.attention:OneByOne'}"
NUMPY_NAME = "+ablation.arms.numpy=_engine.attention.backend__mine.attention_OneByOne__"
CLAIM = "ablation.claims.engaged.numpy=[kernel.one_by_one]"


def digest(overrides):
    return hashlib.sha256(",".join(sorted(overrides)).encode()).hexdigest()


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
        (["workload.texts=д/文1.txt"], "workload.texts=___1.txt"),
        (["ablation=seq_map", NUMPY], f"{NUMPY_NAME},ablation=seq_map"),
        ([CLAIM], "ablation.claims.engaged.numpy=_kernel.one_by_one_"),
        (["++ablation.sweep={engine.threads:[1,2]}", "seed=1"], "engine.threads=1,2,seed=1"),
    ],
)
def test_cell_folders_are_named_by_their_overrides(overrides, name):
    assert cell_name(overrides) == name


def test_long_names_end_in_a_hash_and_stay_distinct():
    long = ("x" * 200, "д" * 200, "д" * 100)
    names = {cell_name([f"model.path={text}{i}"]) for i in range(3) for text in long}
    assert len(names) == 9
    assert all(len(name.encode()) <= 120 for name in names)


def test_a_study_with_letters_of_any_script_in_its_name_keeps_it(tmp_path):
    (tmp_path / "model.path=да").mkdir()
    assert cell_name(["model.path=да", f"out={tmp_path}"]) == "model.path=да"
    assert cell_name(["model.path=дом", f"out={tmp_path}"]) == "model.path=___"
    (tmp_path / "Ann's" / "model.path=да").mkdir(parents=True)
    assert cell_name(["model.path=да", rf"out='{tmp_path}/Ann\'s'"]) == "model.path=да"


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
def test_a_study_whose_name_has_a_word_for_an_arm_keeps_it(overrides, name, tmp_path):
    begun = f"{name}-{digest(overrides)[:8]}"
    (tmp_path / begun).mkdir()
    for order in (1, -1):
        assert cell_name([*overrides[::order], f"out='{tmp_path}'"]) == begun
    assert cell_name([*overrides, "seed=2", f"out={tmp_path}"]) != begun


def test_another_definition_of_an_arm_is_another_cell():
    others = [NUMPY.replace("OneByOne", "Two"), NUMPY.replace("numpy=", "numpty=")]
    cells = [[NUMPY], *([other] for other in others), [NUMPY, CLAIM], [NUMPY, "seed=1"]]
    assert len({cell_name(overrides) for overrides in cells}) == len(cells)


def test_a_long_name_with_arms_is_cut_and_stays_distinct():
    long = f"model.path={'x' * 200}"
    names = {cell_name([long, arm]) for arm in (NUMPY, NUMPY.replace("OneByOne", "Two"))}
    assert len(names) == 2 and all(len(name) == 120 for name in names)


def test_a_cell_is_continued_with_an_option_that_may_change(tmp_path):
    """A longer time-out, or another host, began another cell."""
    overrides = ["workload=chat", "design.timeout_s=9", NUMPY, f"out={tmp_path}"]
    begun = cell_name([overrides[0], *overrides[2:]])
    assert cell_name(overrides) != begun
    (tmp_path / begun).mkdir()
    assert cell_name(overrides) == begun
    assert cell_name(["workload=agent", *overrides[1:]]) != begun


@pytest.mark.parametrize("more", [[], ["workload=chat", NUMPY]])
def test_a_cell_is_continued_with_another_value_of_an_option_that_may_change(tmp_path, more):
    """The folder's name holds the first value; what began the cell is in its manifest."""
    began = [*more, "design.timeout_s=60"]
    begun = cell_name([*began, f"out={tmp_path}"])
    others = {f"{begun}~processes": began, "design.timeout_s=broken": None}
    for name, overrides in {begun: began, **others}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cell.json").write_text(json.dumps({"overrides": overrides}))
    for now in ([], ["design.timeout_s=900"], ["design.across_hosts=true", "design.blocks=9"]):
        assert cell_name([*now, *more, f"out={tmp_path}"]) == begun
    assert cell_name([*more, "seed=2", "design.timeout_s=60", f"out={tmp_path}"]) != begun


def test_a_command_of_many_cells_reads_each_manifest_once(tmp_path, monkeypatch):
    """Each cell read those of all others."""
    for seed in range(20):
        cell = tmp_path / f"design.timeout_s=60,seed={seed}"
        cell.mkdir()
        overrides = ["design.timeout_s=60", f"seed={seed}"]
        (cell / "cell.json").write_text(json.dumps({"overrides": overrides}))
    reads, read_text = [], Path.read_text

    def read_and_note(path, encoding):
        reads.append(path)
        return read_text(path, encoding)

    monkeypatch.setattr(Path, "read_text", read_and_note)
    for seed in range(20):
        name = cell_name([f"seed={seed}", "design.timeout_s=9", f"out={tmp_path}"])
        assert name == f"design.timeout_s=60,seed={seed}"
    assert len(reads) == len(set(reads)) == 20


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
