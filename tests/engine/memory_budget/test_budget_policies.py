"""Pool sizes of every policy against hand-computed ones, and properties of all policies."""

import subprocess
import sys

import pytest
from budget_cases import GIB, MIB, MODEL, STEP, ask, mac
from hypothesis import assume, given
from hypothesis import strategies as st

from labkit import config
from labkit.engine.memory_budget import BudgetDecision, BudgetRefusal
from labkit.engine.memory_budget.budget_policies import POLICIES
from labkit.machine.facts.simulated_macs import simulated_mac

# By hand, in MiB, which is blocks: weights are 1024, activations 256.
#   fraction 0.5     RAM / 2 - 1280
#   vllm 0.9         0.9 * working set - 1280
#   mistralrs 0.9    0.9 * min(working set, RAM * 2/3 up to 36 GiB, else * 3/4) - 1024
#   tiered_reserve   RAM - 4096 | 6144 | 8192 | 12288 - 1280
BY_HAND = {
    # machine: fraction, vllm, mistralrs, tiered_reserve
    "sim_m1_8gb": (2816, 3635, 3891, 2816),
    "sim_m1_pro_16gb": (6912, 8550, 8806, 11008),
    "sim_m2_24gb": (11008, 13465, 13721, 17152),
    "sim_m1_pro_32gb": (15104, 18380, 18636, 25344),
    "sim_m3_pro_36gb": (17152, 23603, 21094, 29440),
    "sim_m4_pro_48gb": (23296, 31897, 32153, 41728),
    "sim_m1_max_64gb": (31488, 42956, 43212, 58112),
    "sim_m2_max_96gb": (47872, 65075, 65331, 88832),
    "sim_m4_max_128gb": (64256, 87193, 87449, 121600),
    "sim_m5_max_128gb": (64256, 97810, 87449, 121600),
    "sim_m2_ultra_192gb": (97024, 131430, 131686, 183040),
    "sim_m3_ultra_512gb": (260864, 352614, 352870, 510720),
}


@pytest.mark.parametrize("machine", BY_HAND)
def test_pool_sizes_computed_by_hand(machine):
    options = {"fraction": {"fraction": 0.5}, "vllm": {}, "mistralrs": {}, "tiered_reserve": {}}
    results = [ask(machine, policy=policy, **settings) for policy, settings in options.items()]
    assert [decision.blocks for decision in results] == list(BY_HAND[machine])
    assert results[0].pool_bytes == BY_HAND[machine][0] * MIB


@pytest.mark.parametrize("machine", BY_HAND)
def test_a_fixed_budget_is_the_users_number(machine):
    assert ask(machine, policy="fixed", blocks=100).blocks == 100
    assert ask(machine, policy="fixed", bytes=3 * GIB + 5).blocks == 3072
    # 40960 tokens of the model's context in blocks of 16, and the null block
    assert ask(machine, policy="llamacpp").blocks == 2561
    assert ask(machine, policy="llamacpp", blocks=77).blocks == 77


def test_free_memory_is_a_share_of_what_is_free_after_loading():
    """Weights are 1 GiB, and 8 GiB are left; the working set limits what is free."""
    machine = mac(16 * GIB, available=9 * GIB)
    assert ask(machine, policy="free_memory").blocks == 6553
    assert ask(machine, policy="free_memory", fraction=0.5).blocks == 4096
    small = mac(16 * GIB, available=9 * GIB, working_set=5 * GIB)
    assert ask(small, policy="free_memory", fraction=0.5).blocks == 2048


@pytest.mark.parametrize("machine", config.SIMULATED_MAC_NAMES)
def test_mistralrs_leaves_60_to_68_percent_of_ram_before_weights(machine):
    """The article: the RAM cap and the utilization stack."""
    ram = simulated_mac(machine).total
    share = ask(machine, policy="mistralrs").ceiling / ram
    assert share == pytest.approx(0.6 if ram <= 36 * GIB else 0.675, abs=1e-6)
    assert 0.60 - 1e-6 <= share <= 0.68


def test_the_default_working_set_is_66_to_75_percent_of_ram():
    """The article: "Apple typically reports a memory hint in the 66-75% range"."""
    for name in config.SIMULATED_MAC_NAMES:
        machine = simulated_mac(name)
        if name != "sim_m5_max_128gb":  # logged with 107.52 GiB under a newer macOS
            assert 0.66 < machine.working_set / machine.total <= 0.75


def test_vllm_checks_free_memory_and_llamacpp_does_not():
    crowded = mac(32 * GIB, available=4 * GIB)
    assert isinstance(ask(crowded, policy="llamacpp"), BudgetDecision)
    assert isinstance(ask(crowded, policy="mistralrs"), BudgetDecision)
    for policy in ("vllm", "fraction"):
        refusal = ask(crowded, policy=policy)
        assert isinstance(refusal, BudgetRefusal)
        assert "; 4.00 GiB are free on " in str(refusal)


def test_mistralrs_keeps_headroom_for_the_weights():
    """Headroom is 2 % of what is left, at least 512 MiB."""
    large = mac(200 * GIB, working_set=100 * GIB)  # 2 %: 2 GiB
    small = mac(20 * GIB, working_set=10 * GIB)  # 512 MiB
    for machine, most in ((large, 98 * GIB), (small, 10 * GIB - 512 * MIB)):
        heavy = MODEL.__class__(**{**vars(MODEL), "weight_bytes": most + 1})
        assert "headroom" in str(ask(machine, policy="mistralrs", model=heavy))
        fits = MODEL.__class__(**{**vars(MODEL), "weight_bytes": most})
        assert "headroom" not in str(ask(machine, policy="mistralrs", model=fits))


def test_every_policy_is_registered_under_its_own_name():
    assert {word: policy.__name__ for word, policy in POLICIES.items()} == {
        word: word.value for word in config.BudgetPolicy
    }


def test_planning_imports_neither_mlx_nor_numba_nor_numpy():
    code = (
        "import sys\n"
        "from labkit import config\n"
        "from labkit.engine import memory_budget\n"
        "from labkit.engine.memory_budget import model_footprint\n"
        "model = model_footprint.from_model(config.Model(shape=config.ModelShape()))\n"
        "memory_budget.plan(config.Engine(), model)\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'mlx', 'numba', 'numpy'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --------------------------------------------------------------------------- properties

BYTES = st.integers(GIB, 1024 * GIB)
FRACTIONS = st.floats(0.001, 1.0)
SHARED = ("fraction", "vllm", "mistralrs", "free_memory")


@st.composite
def machines(draw):
    total = draw(BYTES)
    working_set = draw(st.integers(total // 2, total))
    return mac(total, working_set=working_set, available=draw(st.integers(0, total)))


@given(machines(), st.sampled_from([p.value for p in config.BudgetPolicy]), FRACTIONS)
def test_a_pool_is_never_empty_and_never_above_the_ceiling(machine, policy, fraction):
    options = {"fraction": fraction} if policy in SHARED else {}
    answer = ask(machine, policy=policy, **options)
    if isinstance(answer, BudgetRefusal):
        assert "\n" not in str(answer)
        return
    assert answer.blocks >= 2
    used = MODEL.weight_bytes + (0 if policy in ("mistralrs", "free_memory") else STEP)
    assert used + answer.pool_bytes <= answer.ceiling <= machine.total
    assert sum(part.bytes for part in answer.parts) == used + answer.pool_bytes
    if policy in ("fraction", "vllm"):
        assert answer.ceiling <= machine.available
    if policy in ("llamacpp", "mistralrs", "vllm", "free_memory"):
        assert answer.ceiling <= machine.working_set


@given(BYTES, st.sampled_from(SHARED), FRACTIONS, FRACTIONS)
def test_a_larger_fraction_never_gives_a_smaller_pool(total, policy, a, b):
    small, large = (ask(mac(total), policy=policy, fraction=f) for f in sorted((a, b)))
    assume(isinstance(small, BudgetDecision))
    if policy == "mistralrs":
        assert large.blocks >= small.blocks
    else:
        assert isinstance(large, BudgetRefusal) or large.blocks >= small.blocks


@given(BYTES, BYTES, st.sampled_from((*SHARED, "llamacpp", "fixed")))
def test_a_larger_machine_never_gives_a_smaller_pool(a, b, policy):
    small, large = (ask(mac(total), policy=policy) for total in sorted((a, b)))
    assume(isinstance(small, BudgetDecision))
    assert isinstance(large, BudgetDecision) and large.blocks >= small.blocks


def test_the_tiers_are_monotone_over_the_sizes_that_macs_have():
    """Between sizes they are not: the reserve jumps at 16, 64 and 128 GiB."""
    sizes = (8, 16, 18, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)
    blocks = [ask(mac(size * GIB), policy="tiered_reserve").blocks for size in sizes]
    assert blocks == sorted(blocks)
