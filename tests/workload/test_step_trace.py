"""``workload.step_trace``: a run's steps are traced and stored, and nothing of the run changes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from traced_steps import traced_steps

from labkit import workload
from labkit.config import ConfigError, Workload
from labkit.engine.engine_protocol import EngineError
from labkit.experiment.worker import __main__ as worker
from labkit.records import Record, read_step_trace
from labkit.workload.requests.serving_session import ServingSession

SMALL = [
    "model.shape.hidden_size=64",
    "model.shape.num_layers=1",
    "model.shape.num_heads=2",
    "model.shape.num_kv_heads=1",
    "model.shape.intermediate_size=64",
    "model.shape.vocab_size=512",
    "workload=ragged_8",
    "workload.num_requests=3",
    "workload.warmup=1",
    "design.control=false",
]


def test_the_measured_steps_are_traced_and_the_warm_up_is_not(composed):
    cell = composed("ablation=none", *SMALL)
    (experiment,) = cell.experiments.values()
    workload.prepare(experiment)
    traced = replace(experiment, workload=replace(experiment.workload, step_trace=30))
    plain_run, run = workload.measure(experiment), workload.measure(traced)
    assert plain_run.step_trace is None and "step_trace" not in plain_run.notes
    assert run.cases[0].outputs["digest"] == plain_run.cases[0].outputs["digest"]
    # Turns with clocks follow the trace and are not in it.
    assert {"plan", "attention"} <= run.notes["step_parts"]["parts_us"]["decode"].keys()
    trace = run.step_trace
    assert trace["steps_total"] == run.counters["steps.total"] > len(trace["steps"]) == 30
    assert [request["id"] for request in trace["requests"]] == ["r000", "r001", "r002"]
    # The arm's clock: parts of a step never overlap in a synchronous engine.
    ends = [sum(step["times_us"]["update"]) for step in trace["steps"]]
    starts = [step["times_us"]["schedule"][0] for step in trace["steps"]]
    assert starts[0] == 0 and all(a <= b for a, b in zip(ends, starts[1:], strict=False))


def test_an_engine_that_cannot_trace_is_refused_in_one_line():
    engine = SimpleNamespace(name="stub")
    options = Workload(kind="requests", step_trace=5)
    session = ServingSession(engine, [], options, seed=5, vocab_size=50)
    with pytest.raises(EngineError, match=r"engine\.name=stub has no method trace_steps; set "):
        session.measure(lambda text: None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["engine=mlx_lm"], "workload.step_trace=9: engine=mlx_lm runs its steps in another"),
        (["engine.parallel.size=2"], "workload.step_trace=9: engine.parallel.size=2 runs its"),
        (["workload=kernel_decode"], "workload.step_trace"),
    ],
)
def test_steps_that_cannot_be_traced_are_refused(words, message, composed):
    with pytest.raises(ConfigError) as refused:
        composed("ablation=none", *words, "workload.step_trace=9")
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_the_steps_of_the_first_block_are_stored(tmp_path, capsys):
    record = Record("base", "baseline", 0, 0, 0, "ok", "2026-11-20T20:00:00Z")
    trace = traced_steps(limit=4)
    stored = worker._with_step_trace(record, trace, tmp_path)
    note = stored.notes["step_trace"]
    assert read_step_trace(tmp_path, note)["steps"] == trace["steps"]
    # A later block has no folder: its runs were traced alike, but only the counts are noted.
    later = worker._with_step_trace(record, trace, None)
    assert later.notes["step_trace"] == {"steps": 4, "steps_total": trace["steps_total"]}
    assert worker._with_step_trace(record, None, tmp_path) is record
    full = worker._with_step_trace(record, trace, tmp_path / "no" / "such" / "folder")
    assert full.notes == later.notes and "no trace is stored" in capsys.readouterr().err
