"""The padding control on a small model: equal requests count no padding."""

from dataclasses import replace

from labkit import workload
from labkit.analysis.robustness.hit_and_acceptance_rates import hit_and_acceptance_rates
from labkit.config import LengthKind
from labkit.records import Record
from labkit.workload.requests.serving_metrics import rectangle_notes

SMALL = [
    "ablation=padding_control",
    "design.control=false",
    "model.shape.num_layers=1",
    "model.shape.hidden_size=64",
    "model.shape.intermediate_size=96",
    "workload.warmup=0",
]


def eighth(arm):
    """Return the arm with lengths of an eighth."""
    prompts = arm.workload.prompts
    shorter = {
        side: replace(lengths, **{
            name: -(-getattr(lengths, name) // 8)
            for name in (("tokens",) if lengths.kind is LengthKind.fixed else BOUNDS)
        })
        for side, lengths in (("input", prompts.input), ("output", prompts.output))
    }  # fmt: skip
    return replace(arm, workload=replace(arm.workload, prompts=replace(prompts, **shorter)))


BOUNDS = ("low", "median", "high")


def test_padding_of_three_requests_counted_by_hand():
    # 5 + 1, 2 + 3 and 1 + 0 rows are computed; each of three rows is 5 + 3 long.
    assert rectangle_notes([(5, 2), (2, 4), (1, 1)]) == {"tokens": 6 + 5 + 1, "slots": 3 * 8}
    alike = rectangle_notes([(7, 3)] * 4)
    assert alike["tokens"] == alike["slots"] == 4 * 9


def test_equal_requests_need_no_padding(composed):
    cell = composed(*SMALL)
    claims, records = cell.experiment.ablation.claims, []
    for name, whole in cell.experiments.items():
        arm = eighth(whole)
        workload.prepare(arm)
        measurement = workload.measure(arm)
        assert all(measurement.counters[counter] > 0 for counter in claims.engaged[name])
        role = "baseline" if name == "uneven" else "arm"
        shown = {"counters": measurement.counters, "notes": measurement.notes}
        records.append(Record(name, role, 0, 0, 0, "ok", "now", **shown))
    shares = {one.arm: one for one in hit_and_acceptance_rates(list(cell.experiments), records)}
    assert not [line for one in shares.values() for line in one.impossible_counts()]
    for arm in ("alike", "alike_static"):
        assert shares[arm].equal_lengths and shares[arm].padded == shares[arm].rectangle == 0
    for arm in ("uneven", "uneven_static"):
        assert not shares[arm].equal_lengths and 0 < shares[arm].padded < 1
        assert 0 < shares[arm].rectangle < 1
