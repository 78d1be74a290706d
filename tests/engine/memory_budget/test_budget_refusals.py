"""Refusals name the demand, the free memory, the parts, and a setting that works."""

import re

import pytest
from budget_cases import GIB, MIB, ask, mac
from hypothesis import given
from hypothesis import strategies as st

from labkit import config
from labkit.engine import memory_budget
from labkit.engine.memory_budget import BudgetDecision, BudgetRefusal

SIM8, SIM16, SIM32 = "sim_m1_8gb", "sim_m1_pro_16gb", "sim_m1_pro_32gb"
SIM64, SIM512 = "sim_m1_max_64gb", "sim_m3_ultra_512gb"
BAD = [
    ({"policy": "fraction"}, SIM32),
    ({"policy": "fraction", "fraction": 1.0}, SIM32),
    ({"policy": "fraction", "fraction": 0.76}, SIM32),
    ({"policy": "fraction", "fraction": 0.01}, SIM32),
    ({"policy": "fraction", "fraction": 0.15}, SIM8),
    ({"policy": "fraction", "fraction": 0.00001}, SIM512),
    ({"policy": "fraction", "fraction": 0.99}, SIM512),
    ({"policy": "fraction", "fraction": 0.7}, mac(16 * GIB, available=1400 * MIB)),
    ({"policy": "fraction", "fraction": 0.07}, mac(16 * GIB, available=1400 * MIB)),
    ({"policy": "vllm", "fraction": 1.0}, SIM8),
    ({"policy": "vllm", "fraction": 0.2}, SIM8),
    ({"policy": "vllm", "fraction": 0.001}, SIM64),
    ({"policy": "vllm"}, mac(64 * GIB, available=20 * GIB)),
    ({"policy": "mistralrs", "fraction": 0.1}, SIM8),
    ({"policy": "mistralrs", "fraction": 0.001}, SIM512),
    ({"policy": "llamacpp", "blocks": 4182}, SIM8),
    ({"policy": "llamacpp", "blocks": 1 << 30}, SIM512),
    ({"policy": "llamacpp"}, mac(5 * GIB)),
    ({"policy": "fixed", "blocks": 8192}, SIM8),
    ({"policy": "fixed", "bytes": 16 * GIB}, SIM16),
    ({"policy": "fixed", "bytes": 1 << 20}, SIM16),
    ({"policy": "tiered_reserve"}, mac(5 * GIB)),
    ({"policy": "free_memory", "fraction": 0.001}, SIM8),
]


def settings(line):
    """Parse the settings in the last part of a refusal."""
    last = line.rsplit("; ", 1)[1]
    assert last.startswith("set engine.budget.")
    assert re.fullmatch(r"set( engine\.budget\.\w+=[\w.]+)+( or more| or less)?", last), last
    settings_by_name = dict(re.findall(r"engine\.budget\.(\w+)=([\w.]+)", last))
    read = {"fraction": float, "blocks": int, "bytes": int, "policy": str}
    return {name: read[name](text) for name, text in settings_by_name.items()}, last


@pytest.mark.parametrize(("bad", "machine"), BAD)
def test_a_refusal_names_a_setting_that_works(bad, machine):
    refusal = ask(machine, **bad)
    assert isinstance(refusal, BudgetRefusal)
    line = str(refusal)
    assert "\n" not in line
    assert line.startswith("engine.budget.")
    assert " are free on " in line and "; weights 1.00 GiB; " in line and "KV blocks" in line
    better, _ = settings(line)
    answer = ask(machine, **{**bad, **better})
    assert isinstance(answer, BudgetDecision), answer


@pytest.mark.parametrize(("bad", "machine"), BAD)
def test_the_suggested_setting_is_exact(bad, machine):
    """One step further in the last digit, the setting is refused again."""
    better, last = settings(str(ask(machine, **bad)))
    name, value = list(better.items())[-1]
    if not last.endswith(("or more", "or less")):
        return
    step = 1 if last.endswith("or less") else -1
    if name == "fraction":
        decimals = max(2, len(f"{value:.9f}".rstrip("0").partition(".")[2]))
        value = round(value + step * 10.0**-decimals, 9)
        if not 0 < value <= 1:
            return
    else:
        value += step * (1 if name == "blocks" else MIB)
    assert isinstance(ask(machine, **{**bad, **better, name: value}), BudgetRefusal)


@given(
    total=st.integers(2 * GIB, 600 * GIB),
    free=st.floats(0, 1),
    policy=st.sampled_from([member.value for member in config.BudgetPolicy]),
    fraction=st.floats(1e-5, 1),
    blocks=st.integers(2, 1 << 20),
)
def test_any_suggested_setting_works(total, free, policy, fraction, blocks):
    machine = mac(total, available=int(total * free))
    bad = {"policy": policy}
    if policy in ("fraction", "vllm", "mistralrs", "free_memory"):
        bad["fraction"] = fraction
    elif policy in ("fixed", "llamacpp"):
        bad["blocks"] = blocks
    answer = ask(machine, **bad)
    if isinstance(answer, BudgetRefusal) and answer.settings:
        better, _ = settings(str(answer))
        assert isinstance(ask(machine, **{**bad, **better}), BudgetDecision)


def test_the_smallest_fraction_is_not_a_block_too_small():
    """Two decimals would suffice if one block less were needed."""
    need = GIB + 256 * MIB + 16 * MIB
    machine = mac(10 * need - 5 * MIB)  # a tenth of it is half a MiB short
    line = str(ask(machine, policy="fraction", fraction=0.01))
    assert line.endswith("set engine.budget.fraction=0.11 or more")


def test_advice_leaves_a_margin_for_changes_in_free_memory():
    still = mac(32 * GIB, available=16 * GIB)
    moving = type(still)(**{**vars(still), "slack": GIB})
    assert settings(str(ask(still, policy="fraction")))[0] == {"fraction": 0.5}
    assert settings(str(ask(moving, policy="fraction")))[0] == {"fraction": 0.46}


@pytest.mark.parametrize(
    ("policy", "machine"),
    [
        ("fraction", mac(16 * GIB, available=GIB)),
        ("vllm", mac(16 * GIB, available=GIB)),
        ("mistralrs", mac(2 * GIB, working_set=1100 * MIB)),
        ("llamacpp", mac(2 * GIB, working_set=1100 * MIB)),
        ("fixed", mac(GIB)),
        ("tiered_reserve", mac(GIB)),
        ("free_memory", mac(GIB)),
    ],
)
def test_a_refusal_names_the_missing_bytes_if_no_setting_fits(policy, machine):
    line = str(ask(machine, policy=policy))
    assert re.search(r"no setting fits, because [\d.]+ [KMG]iB are missing; .*smaller model$", line)


def test_a_refusal_lists_the_parts_of_the_demand():
    refusal = ask(SIM32, policy="fraction", fraction=0.9)
    assert str(refusal) == (
        "engine.budget.fraction=0.9: policy fraction asks for 28.80 GiB of 32.00 GiB RAM; "
        "24.00 GiB are free on sim_m1_pro_32gb; weights 1.00 GiB; activations 256.0 MiB; 28211 KV "
        "blocks 27.55 GiB; set engine.budget.fraction=0.75 or less"
    )


def experiment(**engine):
    return config.Experiment(
        engine=config.Engine(**engine),
        model=config.Model(shape=config.ModelShape()),
        ablation=config.Ablation(arms={"base": {}}),
    )


def test_check_refuses_an_arm_before_anything_runs():
    tight = config.Budget(policy=config.BudgetPolicy.fraction, fraction=0.001, machine="sim_m1_8gb")
    with pytest.raises(config.ConfigError, match=r"set engine\.budget\.fraction=0\.01 or more$"):
        memory_budget.plan_for_arm(experiment(budget=tight))
    tight.fraction = 0.01
    decision = memory_budget.plan_for_arm(experiment(budget=tight))
    # 0.01 x 8 GiB less 24,128,512 bytes of weights and 6.5 MiB of activations
    assert decision.blocks == (int((8 << 30) * 0.01) - 24_128_512 - 6_815_744) // 131_072


def test_check_ignores_kernel_workloads():
    alone = experiment(budget=config.Budget(machine="sim_m1_8gb", blocks=1 << 40))
    with pytest.raises(config.ConfigError):
        memory_budget.plan_for_arm(alone)
    alone.workload = config.Workload(
        kind="kernel",
        concurrency=16,
        cases=[config.Case(name="a", decode=1, context=16)],
    )
    assert memory_budget.plan_for_arm(alone) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fraction": 0.5}, r"read by fraction, vllm, mistralrs, free_memory\)"),
        ({"policy": "fraction", "blocks": 9}, "read by fixed, llamacpp"),
        ({"policy": "vllm", "bytes": 1 << 20}, "read by fixed"),
        ({"policy": "fraction", "fraction": 0.0}, "must be above 0 and at most 1"),
        ({"policy": "fraction", "fraction": 1.5}, "must be above 0 and at most 1"),
        ({"policy": "fixed", "machine": "sim_toaster"}, "must be sim_m1_8gb, "),
    ],
)
def test_options_of_other_policies_are_refused(options, message):
    with pytest.raises(config.ConfigError, match=message):
        ask(**options)
