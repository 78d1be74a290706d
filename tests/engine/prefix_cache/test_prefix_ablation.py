"""The claims of the packaged prefix cache ablation, on a smaller model with fewer requests."""

from labkit import workload

SMALL = [
    "ablation=prefix_cache",
    "design.control=false",
    "workload.num_requests=4",
    "workload.warmup=1",
    "model.shape.num_layers=2",
    "model.shape.hidden_size=64",
    "model.shape.intermediate_size=96",
    "model.shape.vocab_size=512",
]


def test_the_claims_of_the_prefix_cache_ablation(composed):
    digests, hits = set(), {}
    for state in ("cold", "warm"):
        cell = composed(*SMALL, f"workload.cache_state={state}")
        claims = cell.experiment.ablation.claims
        assert claims.identity.value == "tokens"
        for name, arm in cell.experiments.items():
            if (state, name) == ("warm", "none"):
                continue  # there is nothing to warm
            workload.prepare(arm)
            measured = workload.measure(arm)
            assert measured.notes["cache_state"] == state
            assert all(measured.counters[counter] > 0 for counter in claims.engaged.get(name, ()))
            digests.add(measured.cases[0].outputs["digest"])
            hits[state, name] = measured.counters["prefix.hit_tokens"]
    assert len(digests) == 1
    queried = measured.counters["prefix.queried_tokens"]
    assert hits.pop(("cold", "none")) == 0
    assert set(hits) == {(state, name) for state in ("cold", "warm") for name in ("hash", "radix")}
    for (state, _), hit in hits.items():
        assert hit > queried * (0.95 if state == "warm" else 0.4)
