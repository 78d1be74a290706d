"""Claims on simulated machines: the articles' formulas, and what a layout without a pool takes."""

import dataclasses

import pytest

from labkit import workload
from labkit.config import ConfigError, Engine
from labkit.workload import memory_claims_workload_kind

GIB = 1 << 30


@pytest.fixture
def policies(composed):
    return lambda *overrides: composed("experiment=memory_policies", *overrides).experiments


@pytest.mark.parametrize(
    ("machine", "hint"), [("sim_m1_pro_32gb", 2 / 3), ("sim_m1_max_64gb", 3 / 4)]
)
def test_each_policy_takes_its_formula_s_share(policies, machine, hint):
    shares = {
        arm: memory_claims_workload_kind.claim(experiment)
        for arm, experiment in policies(f"engine.budget.machine={machine}").items()
    }
    share = {arm: one.ceiling / one.total for arm, one in shares.items()}
    # The weights, and 0.8 of the rest of the hint: both machines have more memory available.
    assert 0.8 * hint < share.pop("free_memory") < 0.8 * hint + 0.03
    assert share == pytest.approx(
        {"auto": 0, "vllm": 0.9 * hint, "mistralrs": 0.9 * hint, "llamacpp": hint,
         "vllm_metal": 0.6}, abs=1e-6,
    )  # fmt: skip
    for arm in ("vllm", "mistralrs", "vllm_metal"):  # a pool fills what it may take
        assert shares[arm].taken == pytest.approx(share[arm] * shares[arm].total, rel=0.01), arm
        assert shares["auto"].taken < shares[arm].taken
    # llama.cpp's pool is as large as its n_ctx, not as its ceiling.
    assert shares["llamacpp"].tokens == 511 * 16


def test_auto_takes_what_its_requests_take(policies):
    arms = policies("workload.concurrency=1")
    one, sixteen = (
        memory_claims_workload_kind.claim(a) for a in (arms["auto"], policies()["auto"])
    )
    assert one.tokens % 256 == 0 and 8 * one.tokens < sixteen.tokens <= 16 * one.tokens
    row = policies("engine.scheduler.max_num_seqs=1")["auto"]
    assert memory_claims_workload_kind.claim(row).tokens == one.tokens
    per_token = 4 * 28 * 2 * 8 * 128
    assert sixteen.taken - one.taken == (sixteen.tokens - one.tokens) * per_token


def test_nothing_stops_auto_from_taking_more_than_there_is(policies):
    auto = memory_claims_workload_kind.claim(policies("engine.budget.machine=sim_m1_8gb")["auto"])
    assert auto.taken > auto.total
    (left,) = (m for m in memory_claims_workload_kind.metrics(auto) if m.name == "left_pct")
    assert left.repeats[0] < 0


def test_records_say_the_claim_and_who_made_it(policies):
    arms = policies()
    turns = workload.load(list(arms.values()), None)
    measured = dict(zip(arms, turns.measure(lambda what: None), strict=True))
    shares = {metric.name: metric.repeats[0] for metric in measured["vllm"].cases[0].metrics}
    assert list(shares) == ["taken_pct", "left_pct", "ceiling_pct", "kv_tokens"]
    assert shares["taken_pct"] + shares["left_pct"] == pytest.approx(100)
    assert "ceiling_pct" not in [m.name for m in measured["auto"].cases[0].metrics]
    assert measured["vllm"].counters["budget.vllm"] == 1


def test_window_pools_hold_more_tokens_in_the_same_memory(compose_experiment):
    options = "model=window", "workload=headroom", "engine.budget.blocks=1000"
    one_pool, pools = (
        memory_claims_workload_kind.claim(compose_experiment(*options, *pool))
        for pool in ((), ("engine.kv.window_pools=true",))
    )
    assert one_pool.tokens == 999 * 16 and pools.tokens > 2 * one_pool.tokens
    assert dataclasses.replace(pools, tokens=one_pool.tokens) == one_pool


def test_an_engine_that_plans_no_memory_is_one_line(policies):
    auto = policies()["auto"]
    own = dataclasses.replace(auto, engine=Engine(name="mlx_lm"))
    match = r"^workload\.kind=headroom: .* engine=mlx_lm .* cannot be planned"
    with pytest.raises(ConfigError, match=match):
        memory_claims_workload_kind.claim(own)


def test_options_of_serving_alone_are_refused(policies):
    first = memory_claims_workload_kind.claim(policies("workload.num_requests=1")["auto"])
    assert 0 < first.tokens < memory_claims_workload_kind.claim(policies()["auto"]).tokens
    match = r"workload\.temperature=0\.5: workload\.kind=headroom does not read it"
    with pytest.raises(ConfigError, match=match):
        policies("workload.temperature=0.5")
    for group in (["limits.ttft_ms=200"], ["arrivals.kind=poisson", "arrivals.rate=5"]):
        match = f"workload.{group[0].split('.')[0]}: workload.kind=headroom does not read it"
        with pytest.raises(ConfigError, match=match):
            policies(*(f"workload.{word}" for word in group))
