"""The kernel ablations, an eighth the size: every claim of every arm holds."""

import dataclasses

import pytest

from labkit import workload
from labkit.config import ConfigError
from labkit.metal.emulator import EmulatorUnavailable
from labkit.metal.emulator.cpp_compilation import find_compiler
from labkit.records import counter_registry

ABLATIONS = (
    "seq_map",
    "resolver",
    "split_kv",
    "grid",
    "gqa_sharing",
    "window_skip",
    "block_size",
    "tile_threshold",
)


def eighth(number):
    return max(1, number // 8) if number else number


def small(case):
    sizes = {n: eighth(getattr(case, n)) for n in ("decode", "context", "prefill", "chunk", "past")}
    return dataclasses.replace(case, **sizes, factor=1)


@pytest.fixture
def measured(composed):
    """Return what gives an ablation, and what every arm measured of its workload, smaller."""

    def measure(name, *overrides):
        cell = composed(f"ablation={name}", "design.control=false", *overrides)
        results = {}
        for arm, experiment in cell.experiments.items():
            configured = experiment.workload
            configured = dataclasses.replace(
                configured,
                cases=[small(case) for case in configured.cases],
                window=configured.window and eighth(configured.window),
                head_dim=32,
                warmup=0,
                repeats=1,
            )
            results[arm] = workload.measure(dataclasses.replace(experiment, workload=configured))
        return cell.experiment.ablation, results

    return measure


def digests(result):
    return [case.outputs["digest"] for case in result.cases]


@pytest.mark.parametrize("name", ABLATIONS)
def test_every_claim_holds(measured, name):
    ablation, results = measured(name)
    assert ablation.question.endswith("?")
    for arm, claimed in ablation.claims.engaged.items():
        for counter in claimed:
            assert results[arm].counters.get(counter, 0) > 0, (arm, counter)
        # What the baseline claims too proves nothing about an arm.
        plain = results[ablation.baseline_arm].counters
        own = [counter for counter in claimed if not plain.get(counter, 0)]
        assert own or arm == ablation.baseline_arm, arm
    base = digests(results[ablation.baseline_arm])
    same = {arm: digests(result) == base for arm, result in results.items()}
    if ablation.claims.identity.value == "bitwise":
        assert all(same.values()), same
    else:
        assert not all(same.values()), "the arms are bit-identical: claim it"


@pytest.fixture
def compiler():
    try:
        find_compiler()
    except EmulatorUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("device", ["cpu", pytest.param("emulated", marks=pytest.mark.slow)])
def test_ragged_tails_and_verification_are_bit_identical(measured, device, request):
    """The article's correctness check: decode, mixed, ragged-tail and verification batches."""
    if device == "emulated":
        request.getfixturevalue("compiler")
    _, results = measured(
        "seq_map",
        "workload=kernel_ragged",
        f"engine.attention.device={device}",
        "workload.num_heads=2",
        "workload.num_kv_heads=1",
    )
    names = [case.case for case in results["seq_map"].cases]
    assert sum("verification" in name for name in names) == 2
    assert sum("ragged tails" in name for name in names) == 2
    assert digests(results["binary_search"]) == digests(results["seq_map"])
    kernels = {case.notes["kernel"] for case in results["seq_map"].cases}
    assert kernels == {"decode", "tiled"}


def test_an_ablation_may_run_on_the_emulated_kernels(measured, compiler):
    _, results = measured(
        "seq_map",
        "engine.attention.device=emulated",
        "workload.cases=[{name: d, decode: 16, context: 128}, {name: p, prefill: 8, chunk: 48}]",
        "workload.num_heads=2",
        "workload.num_kv_heads=1",
    )
    assert digests(results["binary_search"]) == digests(results["seq_map"])
    for result in results.values():
        assert result.counters["device.emulated"] > 0
    assert results["binary_search"].counters["attention.search_iterations"] > 0
    assert results["seq_map"].counters["attention.search_iterations"] == 0


def test_claims_on_an_engine_s_steps_are_refused_for_kernel_workloads(composed):
    with pytest.raises(
        ConfigError, match=r"engaged\.sync: pipeline\.sync would stay 0, because worklo"
    ):
        composed("ablation=overlap", "workload=kernel_decode")
    claim = "ablation.claims.engaged.seq_map=[resolver.seq_map,own.maps]"
    composed("ablation=seq_map", claim, "workload=kernel_decode")


def search_steps(requests):
    """Return the steps of the article's search, summed over the tokens of a pure decode batch."""
    steps = 0
    for token in range(requests):
        low, high = 0, requests
        while low < high:
            middle, steps = (low + high + 1) // 2, steps + 1
            low, high = (middle, high) if middle <= token else (low, middle - 1)
    return steps


def test_the_first_command_has_the_article_s_grid(measured):
    """Each head of a token searches: a unit that served two would halve columns and steps."""
    assert 16 * search_steps(64) == 6160  # 64 requests and 16 heads, as in the article
    _, results = measured("seq_map")
    for arm, result in results.items():
        assert all(name.startswith(counter_registry.LAUNCH_PREFIXES) for name in result.counters)
        kernels = [case.notes["kernel"] for case in result.cases]
        assert {"decode", "tiled"} == set(kernels)
        for case in result.cases:
            notes = case.notes
            assert notes["grid"][0] == 16 and notes["counters"]["unit.head"] == 1
            if notes["kernel"] == "decode":
                assert notes["grid"] == [16, notes["total_q"]]
                searched = 16 * search_steps(notes["total_q"]) if arm == "binary_search" else 0
                assert notes["counters"]["attention.search_iterations"] == searched


@pytest.mark.parametrize(
    "name",
    ["ablation=resolver", "experiment=seq_map_kernel", "experiment=seq_map_concurrency_64"],
)
def test_the_article_s_questions_ask_for_its_grid(composed, name):
    arms = composed(name).experiments
    assert {experiment.engine.attention.unit for experiment in arms.values()} == {"head"}
    serving = composed("ablation=none").experiments["base"]
    assert serving.engine.attention.unit == "auto"
