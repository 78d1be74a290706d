"""The claims of the packaged prefix cache ablation, on a smaller model with fewer requests."""

import pytest

from labkit import workload

SMALL = [
    "ablation=prefix_cache",
    "design.control=false",
    "workload.num_requests=5",
    "workload.warmup=1",
    "model.shape.num_layers=2",
    "model.shape.hidden_size=64",
    "model.shape.intermediate_size=96",
    "model.shape.vocab_size=512",
]


@pytest.mark.parametrize("state", ["cold", "warm"])
def test_the_claims_of_the_prefix_cache_ablation(state, composed):
    cell = composed(*SMALL, f"workload.cache_state={state}")
    claims = cell.experiment.ablation.claims
    digests, hits = set(), {}
    for name, arm in cell.experiments.items():
        workload.prepare(arm)
        measured = workload.measure(arm)
        assert measured.notes["cache_state"] == state
        assert all(measured.counters[counter] > 0 for counter in claims.engaged.get(name, ()))
        digests.add(measured.cases[0].outputs["digest"])
        hits[name] = measured.counters["prefix.hit_tokens"]
    assert list(hits) == ["none", "hash", "radix"]
    assert claims.identity.value == "tokens" and len(digests) == 1
    queried = measured.counters["prefix.queried_tokens"]
    assert hits["none"] == 0 and hits["hash"] > queried * (0.95 if state == "warm" else 0.4)
