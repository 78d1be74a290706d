"""The files of conf/experiment: each composes at its scales, and runs when made tiny."""

import dataclasses
import importlib.util
import tempfile
import time
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from labkit import app, workload
from labkit.config import Budget, Identity, LengthKind, ModelShape
from labkit.experiment.cell_composer import _with_arm, compose_cell, with_scale_overrides
from labkit.experiment.run_draft import RunDraft, StageTimer
from labkit.records import Record, read_cell
from labkit.study_runner import Study

EXPERIMENTS = sorted(path.stem for path in (app.CONF / "experiment").glob("*.yaml"))
# Experiments that are not run here: name and why, such as a server that must be there.
ELSEWHERE: dict[str, str] = {}
# Experiments that show what they are about only with more of something: name and overrides.
ASKED: dict[str, list[str]] = {
    # Only what computes more than there is room for is bounded, and what is small is not.
    "prefill_room": [
        "ablation.arms.p0016_floor={engine.scheduler.max_num_seqs:32,"
        "engine.scheduler.max_num_batched_tokens:40,engine.scheduler.prefill_floor:40}",
    ],
    "chunked_prefill": ["workload.prompts.input.values=[32,32,32,32,32,1200]"],
    # Two sessions, and a pool that holds one.
    "burst_collapse": [
        *(f"workload.prompts.{key}" for key in ("requests=6", "turns=3", "prefix_groups=2")),
        "ablation.arms.calm={engine.prefix_cache:hash,engine.budget.blocks:60,"
        "workload.concurrency:1}",
        "ablation.arms.burst={engine.prefix_cache:hash,engine.budget.blocks:60,"
        "workload.concurrency:2}",
    ],
    # The control says what the noise floor is.
    **{name: ["design.control=true"] for name in ("decode_burst", "noise_floor", "waste_demo")},
    "padding_picture": ["engine.scheduler.max_num_batched_tokens=128"],
}
if importlib.util.find_spec("gguf") is None or importlib.util.find_spec("xllamacpp") is None:
    ASKED["serving_overhead"] = ["~ablation.arms.llama_cpp_server"]  # the extra llamacpp
# By what lengths are divided, where it is not PART.
LESS = {
    "padding_picture": 4,
    "kv_layouts": 1,
    "burst_collapse": 1,
    "chunked_prefill": 1,
    "prefill_room": 1,
}
ONCE = [
    "design.blocks=1",
    "design.runs_per_block=1",
    "design.looks=[]",
    "design.confirm=0",
    "design.control=false",
]
SHAPE = ModelShape(
    hidden_size=64, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=64, vocab_size=512
)
FEW, PART = 6, 16  # requests at most; and of a length
POOL = 64 << 20  # bytes, where an experiment leaves it at the default


@pytest.fixture(scope="module")
def composer(composer):
    with app.initialized():
        yield composer


def source(name):
    return Path(app.CONF, "experiment", f"{name}.yaml").read_text("utf-8")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_file_begins_with_its_command_and_says_its_scales(name):
    package, command, *rest = source(name).splitlines()
    assert package == "# @package _global_"
    assert command.startswith(f"# python -m labkit experiment={name}") and command.endswith(" -m")
    assert rest[0].startswith("# ")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_arm_composes_at_every_scale(name, composer):
    """At full too, which this machine may not be able to run."""
    whole = composer.compose(with_scale_overrides([f"experiment={name}"], composer))
    assert set(whole.scales) == {"cpu", "full"}, "an experiment says what it is at both scales"
    for scale in whole.scales:
        cell = with_scale_overrides([f"experiment={name}", f"scale={scale}"], composer)
        composed = composer.compose(cell)
        assert composed.ablation.question.endswith("?")
        for arm, overrides in composed.ablation.arms.items():
            composer.compose(_with_arm(cell, overrides), f"arm {arm}: ")


@pytest.fixture
def pictures(monkeypatch):
    """Names of a report's pictures, without drawing them (other tests draw every kind)."""
    made = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: made.append(figure))
    return made


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_it_runs_tiny(name, composer, tmp_path, monkeypatch, pictures, capsys):
    """In this process, without what a process has one of; it is reported, and nothing failed.

    What an arm claims may not happen at this size (``vacuous``).
    """
    if name in ELSEWHERE:
        pytest.skip(ELSEWHERE[name])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cell = compose_cell([], [f"experiment={name}", *ONCE, *ASKED.get(name, [])], composer)
    part = LESS.get(name, PART)
    arms = {arm: tiny(experiment, part) for arm, experiment in cell.experiments.items()}
    study = Study(
        tmp_path / "study", [dataclasses.replace(cell, experiments=arms)], InProcessLauncher(arms)
    )
    study.run(cell.name, study.out / cell.name)
    study.finish()
    cell_json, shown = read_cell(study.out / cell.name), capsys.readouterr().out
    failed = [run for run in cell_json["failures"] if run["outcome"] != "vacuous"]
    assert cell_json["rows"] and not failed, shown
    # The noise floor is a control's, and there is none here.
    apart = cell.experiment.ablation.claims.identity is Identity.noise_floor
    vacuous = bool(cell_json["failures"])
    assert apart or vacuous or cell_json["gates"]["identical"]["status"] != "fail", shown
    assert vacuous or cell_json["gates"]["engaged"]["status"] != "fail", shown
    assert not [line for line in shown.splitlines() if "rows are padding" in line], shown
    report = (study.out / "report.md").read_text("utf-8")
    assert f"## {cell.experiment.ablation.question} (scale=cpu)" in report
    assert all(figure.axes for figure in pictures) and pictures


class InProcessLauncher:
    """A run launcher in this process."""

    def __init__(self, arms):
        self._arms = arms

    def prepare(self, cell):
        """Nothing to build."""

    def launch(self, runs, cell):
        return [self._run(run, cell) for run in runs]

    def _run(self, run, cell):
        arm = cell.arm(run.arm)
        place = run.block, run.position, cell.seed
        record = Record(arm.name, arm.role, *place, "ok", "2026-11-22T20:00:00Z")
        draft = RunDraft(record, StageTimer(time.monotonic_ns()))
        with draft.catch_failures():
            draft.add_measurement(workload.measure(self._arms[run.arm]), arm)
        return draft.record


def tiny(experiment, part):
    workload, model = experiment.workload, experiment.model
    if not workload.has_engine:
        return dataclasses.replace(experiment, workload=clips(workload))
    kernel = workload.times_kernels
    smaller = launches(workload) if kernel else requests(workload, part)
    workload = dataclasses.replace(workload, warmup=1, **smaller)
    if not kernel:
        model = dataclasses.replace(model, shape=SHAPE, packaged=None, path=None)
    engine = experiment.engine
    if engine.budget == Budget() and engine.name not in ("mlx_lm", "openai"):
        engine = dataclasses.replace(engine, budget=Budget(bytes=POOL))
    return dataclasses.replace(experiment, workload=workload, model=model, engine=engine)


def clips(workload):
    """Return a workload of the same clips, short and small."""
    short = {"seconds": 2.0, "width": 96, "height": 64, "events": 1}
    made = [dataclasses.replace(c, gop=c.gop and min(c.gop, 12), **short) for c in workload.made]
    return dataclasses.replace(workload, made=made)


def launches(workload):
    return {"cases": list(map(small, workload.cases)), "repeats": 1, "head_dim": 32}


def small(case):
    names = ("decode", "context", "prefill", "chunk", "past")
    sizes = {name: -(-getattr(case, name) // 8) for name in names}
    return dataclasses.replace(case, **sizes, factor=1)


def requests(workload, part):
    prompts = workload.prompts
    if prompts.source == "synthetic":
        lengths = {name: shorter(getattr(prompts, name), part) for name in ("input", "output")}
        prefix = -(-prompts.prefix_tokens // part)
        prompts = dataclasses.replace(prompts, **lengths, prefix_tokens=prefix)
        known = prompts.requests
    elif prompts.source == "listed":
        prompts = dataclasses.replace(
            prompts, listed=[briefer(one, part) for one in prompts.listed]
        )
        known = len(prompts.listed)
    else:
        known = FEW
    few = min(FEW, known, workload.num_requests or FEW)
    return {"prompts": prompts, "num_requests": few}


def briefer(one, part):
    most = one.max_tokens
    return one if most is None else dataclasses.replace(one, max_tokens=-(-most // part))


def shorter(lengths, part):
    """Return lengths divided; only those that this law reads, as the others must stay."""
    read = {LengthKind.fixed: ("tokens",), LengthKind.listed: ("values",)}
    overrides = {}
    for name in read.get(lengths.kind, ("low", "high", "median")):
        value = getattr(lengths, name)
        if value is not None:
            many = isinstance(value, list)
            overrides[name] = [-(-n // part) for n in value] if many else -(-value // part)
    return dataclasses.replace(lengths, **overrides)
