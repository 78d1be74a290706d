"""The registry of metrics: complete, and as the workloads record them."""

from pathlib import Path

import pytest

from docs.generators import metrics as metrics_page
from labkit.config import LatencySLO
from labkit.records import Metric
from labkit.records.metric_registry import (
    DEFINITIONS,
    METRICS,
    measured,
    metric_definition,
    metric_names,
)
from labkit.workload.memory_claims_workload_kind import Claim
from labkit.workload.memory_claims_workload_kind import metrics as headroom_metrics
from labkit.workload.requests.serving_metrics import (
    ServedRequest,
    counted_metrics,
    request_metrics,
    sending_metrics,
    serving_metrics,
)

ROOT = Path(__file__).parents[2]


def served(due=0.0):
    return ServedRequest("a", 4, due, [1, 2], chunk_times=[due + 1.0, due + 2.0], finish="length",
                         due=due)  # fmt: skip


def test_a_workload_records_metrics_as_they_are_registered():
    counters = {
        "steps.total": 2.0, "host_ms": 1.0, "shape.repeated": 1.0, "kv.slots_held": 2.0,
        "kv.slots_filled": 1.0,
    }  # fmt: skip
    requests = (
        *serving_metrics([served()], 8.0, limits=LatencySLO(e2e_ms=1.0)),
        *sending_metrics([served(), served(1.0)]),
        *counted_metrics(counters),
        *request_metrics(served()),
    )
    assert {metric.name for metric in requests} == set(metric_names("requests"))
    headroom = headroom_metrics(Claim(8, 4, 2, 1))
    assert {metric.name for metric in headroom} == set(metric_names("headroom"))
    for metric in (*requests, *headroom):
        known = METRICS[metric.name]
        assert (known.unit, known.better) == (metric.unit, metric.better), metric.name


def test_every_metric_is_registered_once_with_label_and_meaning():
    assert len(METRICS) == len(DEFINITIONS)
    assert all(d.label and d.meaning.endswith(".") and d.kinds for d in DEFINITIONS)


def test_an_arm_with_shorter_launches_is_faster_and_one_with_less_memory_is_not():
    for name in ("dispatch_us", "single_us", "total_tok_s"):
        assert METRICS[name].is_speed, name
    assert not METRICS["peak_kv_bytes"].is_speed


def test_a_metric_of_a_users_own_follows_from_its_unit():
    assert metric_definition("answers", "req/s").is_speed
    assert not metric_definition("errors", "%").is_speed
    assert metric_definition("cache", "bytes").words.quantity == "memory"
    assert (
        metric_definition("total_tok_s", "answers").unit == "answers"
    )  # another metric of that name


def test_the_docs_page_is_current():
    assert (ROOT / "docs" / "metrics.md").read_text() == metrics_page.page(), (
        "python -m docs.generators.metrics > docs/metrics.md"
    )


def test_a_measured_metric_has_the_unit_and_direction_of_the_registry():
    metric = measured("total_tok_s", [1.0, 2.0], primary=True)
    assert metric == Metric("total_tok_s", "tok/s", "higher", True, (1.0, 2.0))
    with pytest.raises(KeyError):
        measured("no_such_metric", [1.0])
