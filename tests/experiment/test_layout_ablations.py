"""The ablations of layouts and batches, on a small model: every claim of every arm holds."""

import pytest

from labkit import workload

FEWER = {
    "kv_layout": ["workload.num_requests=2"],
    "batching": [],
    "tensor_parallel": ["workload.num_requests=3", "model.shape.num_kv_heads=2"],
}
SMALL = [
    "model.shape.hidden_size=64",
    "model.shape.num_layers=1",
    "model.shape.num_heads=2",
    "model.shape.num_kv_heads=1",
    "model.shape.intermediate_size=64",
    "model.shape.vocab_size=512",
    "workload.warmup=0",
]


def measured(cell):
    """Return the ablation, and what every arm measured of its workload, once."""
    results = {}
    for arm, experiment in cell.experiments.items():
        workload.prepare(experiment)
        results[arm] = workload.measure(experiment)
    return cell.experiment.ablation, results


@pytest.mark.parametrize("name", FEWER)
def test_every_claim_holds(name, composed):
    ablation, results = measured(
        composed(f"ablation={name}", "design.control=false", *SMALL, *FEWER[name])
    )
    assert ablation.question.endswith("?")
    assert ablation.claims.identity.value == "tokens"
    base = results[ablation.baseline_arm]
    for arm, claimed in ablation.claims.engaged.items():
        counters = results[arm].counters
        for counter in claimed:
            assert counters.get(counter, 0) > 0, (arm, counter)
        assert arm == ablation.baseline_arm or any(not base.counters.get(c) for c in claimed)
        digests = [case.outputs["digest"] for case in results[arm].cases]
        assert digests == [case.outputs["digest"] for case in base.cases], arm
    if name == "batching":
        check_waste(results)


def check_waste(results):
    """A static batch of four computes every row as long as its longest answer."""
    steps = {
        arm: [m.repeats[0] for case in r.cases[1:] for m in case.metrics if m.name == "row_steps"]
        for arm, r in results.items()
    }
    assert steps["static"] == [159] * 4 + [199] * 4
    for arm in ("continuous", "padded", "paged"):
        assert steps[arm] == [2, 159, 3, 55, 3, 199, 2, 114]
    wasted = sum(steps["static"]) - sum(steps["continuous"])
    # The prompts of a batch are padded too.
    assert results["static"].counters["tokens.padded"] > wasted
