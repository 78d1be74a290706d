"""Published numbers: each row matches a case and a metric of its study."""

import pytest

from labkit.analysis.tables.published_vs_measured import AGREEMENT_METRICS
from labkit.cli import hydra_arguments, multirun_composition
from labkit.config import Ablation, ConfigError, Experiment, Model, ModelShape
from labkit.experiment.compose import published_rows
from labkit.experiment.compose.cell_composer import with_scale_overrides
from labkit.experiment.compose.claimed_counter_check import option_choices
from labkit.experiment.hydra.hydra_composer import hydra_quote
from labkit.records import counter_registry
from labkit.workload import memory_claims_workload_kind
from labkit.workload.memory_claims_workload_kind import Claim
from labkit.workload.requests import serving_metrics
from labkit.workload.requests.serving_metrics import ServedRequest
from labkit.workload.sources import request_datasets

ABLATIONS = sorted(path.stem for path in (hydra_arguments.CONF / "ablation").glob("*.yaml"))
EXPERIMENTS = sorted(path.stem for path in (hydra_arguments.CONF / "experiment").glob("*.yaml"))
SERVED = ServedRequest("r", 8, 0.0, [1, 2], [], [0.5, 1.0], "length", due=0.0)
LATER = ServedRequest("s", 8, 1.0, [1, 2], [], [1.5, 2.0], "length", due=1.0)
COUNTED = ("steps.total", "host_ms", "shape.repeated", "kv.slots_held", "kv.slots_filled")
HOST = {"map_us", "plan_us"}  # of a kernel's records


@pytest.fixture
def composer(composer):
    with multirun_composition.initialized():
        yield composer


def publishable_metrics(whole):
    """Return the metrics that may be published, by case of the cell's records."""
    workload = whole.workload
    if workload.times_kernels:
        return {case.name: {"dispatch_us", "single_us", *HOST} for case in workload.cases}
    if workload.kind == "video":
        return {"all": {"request_s"}} | {clip.name: {"decode_ms"} for clip in workload.made}
    if workload.kind == "headroom":
        return {
            "all": {
                metric.name for metric in memory_claims_workload_kind.metrics(Claim(1, 1, 1, 1))
            }
        }
    served = [
        *serving_metrics.serving_metrics([SERVED], 1, limits=workload.limits),
        *serving_metrics.counted_metrics(dict.fromkeys(COUNTED, 1.0)),
        *serving_metrics.sending_metrics([SERVED, LATER]),
    ]
    metrics = {"all": {metric.name for metric in served} | set(AGREEMENT_METRICS)}
    if workload.per_request:
        assert workload.prompts.source == "listed"
        own = {metric.name for metric in serving_metrics.request_metrics(SERVED)}
        metrics |= {
            text.name: own for text in request_datasets.texts(whole, workload.prompts.listed)
        }
    return metrics


def distinct_conditions(whole):
    """Return the distinct sets of overrides (``when``) of the published rows."""
    rows = (whole.ablation.published or {}).get("rows", [])
    overrides = [
        tuple(f"{k}={hydra_quote(v)}" for k, v in row.get("when", {}).items()) for row in rows
    ]
    return list(dict.fromkeys(overrides))


def check(command, composer):
    """Check the published rows of a command's cells and return how many this scale has."""
    whole, row_count = composer.compose(with_scale_overrides(command, composer)), 0
    own = {f"scale={whole.scale.value}", *command}
    for when in distinct_conditions(whole):
        if any(
            override.startswith(("scale=", "model=")) and override not in own for override in when
        ):
            continue  # of the other scale, which has its own turn
        at_condition = composer.compose(with_scale_overrides([*command, *when], composer))
        published = at_condition.ablation.published
        rows = published_rows.rows_of_cell(published, at_condition)["rows"]
        assert rows, when
        known, row_count = publishable_metrics(at_condition), row_count + len(rows)
        declared = [{k: v for k, v in row.items() if k != "when"} for row in published["rows"]]
        assert all(row in declared for row in rows), "differences from another baseline"
        for row in rows:
            metric = row.get("metric", published.get("metric"))
            assert row["case"] in known, f"no case {row['case']!r} in {sorted(known)}"
            if metric not in known[row["case"]]:
                assert row["case"] == "all", f"{row['case']}: no metric {metric!r}"
                assert counter_registry.find_counter(metric, option_choices), (
                    f"no metric or counter {metric!r}"
                )
            assert any(row.get(key) for key in published_rows.NUMBER_KEYS), row
    return row_count


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_published_row_of_an_ablation_meets_a_case_and_a_metric(name, composer):
    check([f"ablation={name}"], composer)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_published_row_of_an_experiment_meets_a_case_and_a_metric(name, composer):
    whole = composer.compose(with_scale_overrides([f"experiment={name}"], composer))
    conditions = [o for when in distinct_conditions(whole) for o in when]
    models = [[], *([o] for o in dict.fromkeys(conditions) if o.startswith("model="))]
    commands = [
        [f"experiment={name}", f"scale={scale}", *model]
        for scale in whole.scales
        for model in models
    ]
    seen = [check(command, composer) for command in commands]
    assert any(seen) or not (whole.ablation.published or {}).get("rows")


def experiment_with(row, **facts):
    published = {"source": "s", "machine": "m", "metric": "total_tok_s", "rows": [row], **facts}
    ablation = Ablation(arms={"a": {}, "b": {}}, published=published)
    return Experiment(model=Model(shape=ModelShape()), ablation=ablation)


@pytest.mark.parametrize(
    ("row", "facts", "says"),
    [
        ({"case": "all", "arm": {}}, {}, r"^ablation\.published\.rows\[0\]\.arm: no such key \("),
        ({"arms": {"a": 1}}, {}, r"rows\[0\]: has no case; add case"),
        (
            {"case": "all", "arms": {"a": 1}},
            {"metric": None},
            r"rows\[0\]: has no metric; add metric",
        ),
        ({"case": "all", "when": {"workload.clients": 1}}, {}, r"workload\.clients: no such opt"),
        ("all", {}, r"rows\[0\]: must be a map of keys and values, not 'all'$"),
        (
            {"case": "all", "delta_pct": {"a": "-8.1 %"}},
            {},
            r"rows\[0\]\.delta_pct\.a: must be a number, not '-8\.1 %'$",
        ),
        ({"case": "all", "arms": {"a": True}}, {}, r"rows\[0\]\.arms\.a: must be a number"),
        ({"case": "all", "arms": 3}, {}, r"rows\[0\]\.arms: must be a map, not 3$"),
        ({}, {"rows": {"case": "all"}}, r"published\.rows: must be a list"),
        (
            {"case": "all"},
            {"tables": [{"title": "t", "columns": ["c"], "rows": [1]}]},
            r"tables\[0\]\.rows: must be a list, not 1$",
        ),
        ({"case": "all"}, {"by": "me"}, r"^ablation\.published\.by: no such key"),
        (
            {"case": "all"},
            {"tables": [{"title": "t"}]},
            r"tables\[0\]: has no columns; add columns",
        ),
    ],
)
def test_a_mistake_in_published_numbers_is_one_line(row, facts, says):
    whole = experiment_with(row, **facts)
    with pytest.raises(ConfigError, match=says):
        published_rows.rows_of_cell(whole.ablation.published, whole)


@pytest.mark.parametrize("row", [
    {"arms": {"a": 4.0, "b": 5.0}, "delta_pct": {"b": 25.0}, "p": {"b": 0.1}, "wins": {"b": 3}},
    {"arms": {"a": 4.0}, "delta_pct": {"c": 25.0}},
    {"delta_pct": {"b": 25.0}},
])  # fmt: skip
def test_differences_from_another_baseline_than_the_cell_s_are_left_out(row):
    """With ``ablation.baseline=b`` the report showed those from a."""
    whole = experiment_with({"case": "all", **row})
    published = whole.ablation.published
    (shown,) = published_rows.rows_of_cell(published, whole)["rows"]
    assert shown == {"case": "all", **row}
    whole.ablation.baseline = "b"
    shown = published_rows.rows_of_cell(published, whole)["rows"]
    assert shown == ([{"case": "all", "arms": row["arms"]}] if "arms" in row else [])
