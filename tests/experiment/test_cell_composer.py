"""The cell composer: arms and their overrides, errors in one line."""

import importlib
import json
import sys
import zipfile
from dataclasses import replace

import pytest

from labkit.config import ConfigError, DType, Model, package_extras
from labkit.experiment.compose import cell_composer
from labkit.experiment.compose.cell_composer import obstacles, to_cell
from labkit.experiment.schedule.cell_manifest import write_manifest
from labkit.experiment.schedule.design_change_check import refuse_changes
from labkit.experiment.schedule.pilot_and_allocation import with_allocation


def test_an_arm_is_the_cell_with_its_overrides_appended(composed):
    cell = composed("ablation=seq_map", "engine.attention.resolver=identity")
    assert [(arm.name, arm.role) for arm in cell.arms] == [
        ("binary_search", "baseline"),
        ("seq_map", "arm"),
        ("control", "control"),
    ]
    resolvers = [arm.engine.attention.resolver for arm in cell.experiments.values()]
    assert resolvers == ["binary_search", "seq_map", "binary_search"]
    assert cell.experiment.workload.name == "kernel_seq_map"


def test_the_command_line_s_workload_wins_over_the_ablation_s(composed):
    cell = composed("ablation=seq_map", "workload=chat")
    assert {arm.workload.name for arm in cell.experiments.values()} == {"chat"}


def test_arms_can_be_added_and_dropped_and_may_change_a_group(composed):
    cell = composed(
        "ablation=seq_map",
        "~ablation.arms.seq_map",
        "+ablation.arms.own={engine:paged,engine.kv.block_size:32,engine.scheduler.chunk:null}",
        "design.control=false",
        "engine=paged",
    )
    assert [arm.name for arm in cell.arms] == ["binary_search", "own"]
    assert list(cell.experiments.values())[1].engine.kv.block_size == 32
    assert list(cell.experiments.values())[1].engine.scheduler.chunk is None


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["+ablation.arms.x={engine.kv.block_size:7}"], r"arm x: engine\.kv\.block_size=7"),
        (["+ablation.arms.x={engine.kv.bloc:7}"], r"arm x: engine\.kv\.bloc=7: no option 'bloc'"),
        (["+ablation.arms.x={engine:nope}"], r"arm x: engine=nope: no such engine"),
        (
            ["+ablation.arms.x={design.blocks:7}"],
            r"arm x: design\.blocks must be the same for every arm",
        ),
        (["+ablation.arms.x={seed:7}"], r"arm x: seed must be the same for every arm"),
        (["+engine.foo=1"], r"engine\.foo: no such option"),
        (["engine.attention.resolver=no_such_pkg.mod:Thing"], r"no module 'no_such_pkg\.mod'"),
        (["engine.attention.backend=no_such_pkg:Thing"], r"backend=no_such_pkg:Thing: no module"),
        (["engine.name=no_such_pkg:Thing"], r"engine\.name=no_such_pkg:Thing: no module"),
        (["model=local", "model.path=/nowhere"], r"model\.path=/nowhere"),
    ],
)
def test_an_error_in_an_arm_is_one_line_that_names_the_arm(composed, overrides, line):
    with pytest.raises(ConfigError, match=line) as caught:
        composed(*overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("package", ["def broken(", "import no_such_module"])
def test_composing_imports_no_package_of_the_user_s(composed, tmp_path, monkeypatch, package):
    """The import in a process of its own names the mistake."""
    name = f"mine_{abs(hash(package))}"
    (tmp_path / name / "deep").mkdir(parents=True)
    (tmp_path / name / "__init__.py").write_text(package)
    for module in ("maps.py", "deep/maps.py"):
        (tmp_path / name / module).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in (f"{name}.maps", f"{name}.deep.maps"):
        composed(f"engine.attention.resolver={module}:Maps")
    for module in (f"{name}.mops", f"{name}.dep.maps", f"{name}.maps.deep"):
        with pytest.raises(ConfigError, match=f"no module '{module}'"):
            composed(f"engine.attention.resolver={module}:Maps")
    assert name not in sys.modules


def test_an_arm_on_a_missing_device_is_refused_when_composed(composed, monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    with pytest.raises(ConfigError, match=r"^arm x: engine\.attention\.device=metal: there is no"):
        composed("+ablation.arms.x={engine.attention.device:metal}")
    with pytest.raises(ConfigError, match=r"^arm x: engine\.mlx\.tf32 .* leave it null"):
        composed("+ablation.arms.x={engine.mlx.tf32:false}")
    composed("+ablation.arms.x={engine.mlx.bfs_max_width:4}")


def test_packages_are_asked_for_before_a_model_is_read(composed, monkeypatch):
    monkeypatch.setattr(package_extras, "find_spec", lambda name: None)
    needed = r"^arm base: workload=chat: not installed: mlx, .* 'mlx-labkit\[mlx\]'$"
    for model in (["model=smollm2"], ["model=local", "model.path=org/name"]):
        with pytest.raises(ConfigError, match=needed):
            composed(*model)


def test_what_a_model_is_read_for_is_not_checked_without_it(composed):
    arm = composed("ablation=none").experiments["base"]
    (error,) = obstacles(replace(arm, model=Model(name="local", path="/gone")))
    assert str(error).startswith("model.path=/gone: no such directory")


def test_an_arm_may_set_a_dtype(composed):
    cell = composed("+ablation.arms.x={engine:mlx_lm,engine.dtype:bfloat16}")
    assert cell.experiments["x"].engine.dtype is DType.bfloat16


def test_an_arm_may_set_a_size(composed):
    cell = composed("+ablation.arms.x={engine.memory_limit:2GiB}")
    assert cell.experiments["x"].engine.memory_limit == 2 << 30


def test_arms_in_which_nothing_differs_are_refused(composed):
    with pytest.raises(
        ConfigError, match=r"^arm two: every option has the same value as in arm one"
    ):
        composed("+ablation.arms.one={engine.threads:1}", "+ablation.arms.two={engine.threads:1}")


@pytest.mark.parametrize(
    ("arm", "says"),
    [
        ("padedd", r"no such arm \(did you mean 'padded'\?\); the arms are static"),
        ("static", "it is the baseline"),
    ],
)
def test_a_claim_to_run_out_of_memory_names_an_arm(arm, says, composed):
    claim = "ablation.claims.out_of_memory"
    with pytest.raises(ConfigError, match=rf"^ablation\.claims\.out_of_memory={arm}: {says}"):
        composed("ablation=batching", f"{claim}=[{arm}]")
    cell = composed("ablation=batching", f"{claim}=[padded]")
    assert [one.name for one in cell.arms if one.out_of_memory] == ["padded"]


def test_options_that_every_arm_reads_need_no_base_that_reads_them(composed):
    """The base, ``engine=paged``, is not an arm."""
    servers = [f"+ablation.arms.{a}={{engine:openai,engine.server.preset:{p}}}" for a, p in SERVERS]
    words = ["engine.server.api=chat", *servers]
    cell = composed(*words, "~ablation.arms.base")
    assert {one.engine.server.api.value for one in cell.experiments.values()} == {"chat"}
    for others in (words, words[:1]):
        with pytest.raises(ConfigError, match=r"engine.server.api=chat: engine.name=paged"):
            composed(*others)


SERVERS = [("a", "null_server"), ("b", "labkit")]


@pytest.mark.parametrize(
    ("overrides", "question"),
    [
        ((), "How fast is it, and how noisy is this machine?"),
        (("+ablation.arms.mlx_lm={engine: mlx_lm}",), "How does mlx_lm compare with base?"),
        (
            (
                "+ablation.arms.mlx_lm={engine: mlx_lm}",
                "+ablation.arms.big={engine.kv.block_size: 64}",
            ),
            "How do mlx_lm and big compare with base?",
        ),
        (("ablation.question='And now?'",), "And now?"),
    ],
)
def test_the_question_is_about_the_arms(composed, tmp_path, overrides, question):
    """``ablation=none`` asks about noise only while nothing is compared."""
    cell = to_cell(composed("ablation=none", "workload=ragged", *overrides), tmp_path)
    assert cell.question == question


@pytest.mark.parametrize(
    ("row", "shown_with"),
    [
        ("delta_pct:{identity:25}", ["binary_search"]),
        ("arms:{binary_search:4,seq_map:4,identity:5},delta_pct:{identity:25}", ["binary_search"]),
        ("arms:{seq_map:4,identity:5},delta_pct:{identity:25}", ["seq_map"]),
    ],
)
def test_a_command_s_baseline_hides_differences_that_may_be_from_another_arm(
    composed, tmp_path, row, shown_with
):
    """Published differences from ``binary_search`` were shown as those from ``seq_map``."""

    def is_shown(*baseline):
        rows = f"ablation.published.rows=[{{case:c,{row}}}]"
        cell = to_cell(composed("engine=paged", "ablation=resolver", rows, *baseline), tmp_path)
        return any("delta_pct" in row for row in cell.published["rows"])

    given = {"binary_search": (), "seq_map": ("ablation.baseline=seq_map",)}
    assert [name for name, overrides in given.items() if is_shown(*overrides)] == shown_with


@pytest.mark.parametrize("sign", ["", "++"])
def test_blocks_that_are_added_serve_as_many_requests_as_the_first_ones(composed, tmp_path, sign):
    cell = composed("ablation=none", "workload=chat", f"{sign}design.blocks=20")
    assert not to_cell(cell, tmp_path).follows_time  # a new study serves all of them
    share = {"case": "all", "blocks": 8, "rounds": 34, "p_decided": 0.9, "needed_s": 0.0}
    found = {"time_s": 120, "blocks": 8, "looks": [], "seconds": 99, "cases": [share]}
    (tmp_path / "allocation.json").write_text(json.dumps({**found, "pilot": None}))
    added = with_allocation(to_cell(cell, tmp_path))
    assert (added.units, added.design.blocks) == (34, 20)


def looks_of(cell):
    return [(look.blocks, look.alpha) for look in cell.design.looks]


@pytest.mark.parametrize(
    "workload", [["workload=kernel_decode"], ["workload=chat", "workload.num_requests=null"]]
)
def test_blocks_that_are_added_move_the_last_look_that_followed_from_the_time(
    composed, tmp_path, workload
):
    def cell(*more):
        return with_allocation(to_cell(composed("ablation=none", *workload, *more), tmp_path))

    looks = [{"blocks": 15, "alpha": 0.01}, {"blocks": 24, "alpha": 0.04}]
    found = {"time_s": 120, "blocks": 24, "looks": looks, "seconds": 99, "cases": []}
    (tmp_path / "allocation.json").write_text(json.dumps({**found, "pilot": None}))
    write_manifest(cell(), 15)
    assert looks_of(cell()) == [(15, 0.01), (24, 0.04)]
    for blocks in (40, 48):
        added = cell(f"design.blocks={blocks}")
        refuse_changes(added)
        assert looks_of(added) == [(15, 0.01), (blocks, 0.04)]
        write_manifest(added, blocks)
    message = r"blocks was 48, now 24: blocks can only be added \(set design\.blocks=48 to continue"
    with pytest.raises(ConfigError, match=message):
        refuse_changes(cell())


def test_the_last_look_of_a_sequential_design_follows_its_blocks(composed, tmp_path):
    early = [(8, 0.01), (12, 0.01), (20, 0.01)]
    for more, blocks in (((), 30), (("design.blocks=40",), 40)):
        cell = to_cell(composed("ablation=seq_map", "design=sequential", *more), tmp_path)
        assert looks_of(cell) == [*early, (blocks, 0.02)]


def test_a_class_may_lie_in_a_zip_file_or_where_its_package_says(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "mine.zip", "w") as file:
        for name in ("__init__.py", "maps.py"):
            file.writestr(f"mine_zipped/{name}", "")
    for name in ("mine_moved", "elsewhere", "mine_plain"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / "elsewhere" / "maps.py").write_text("")
    path = f"__path__ = [{str(tmp_path / 'elsewhere')!r}]\n"
    (tmp_path / "mine_moved" / "__init__.py").write_text(path)
    for entry in (tmp_path, tmp_path / "mine.zip"):
        monkeypatch.syspath_prepend(str(entry))
    for module in ("mine_zipped.maps", "mine_moved.maps"):
        assert importlib.import_module(module)
        assert cell_composer._is_importable(module)
    assert not cell_composer._is_importable("mine_plain.maps")
