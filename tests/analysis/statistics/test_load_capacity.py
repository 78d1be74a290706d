"""The capacity of a load: known answers, and coverage in simulated queues."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from labkit.analysis.document.chart import Dots
from labkit.analysis.pages.study_overview import capacity_chart, capacity_table
from labkit.analysis.statistics.load_capacity import Capacity, LoadCounts, load_capacity
from labkit.analysis.studies.increasing_load import ServingCapacity

FILE = Path(__file__).parents[3] / "benchmarks" / "capacity_coverage.py"


def load(rate, *good, requests=50):
    return LoadCounts(rate, np.array(good, np.float64), np.full(len(good), float(requests)))


@pytest.fixture
def coverage(monkeypatch):
    """The benchmark that simulates queues, with few runs for the true shares."""
    spec = importlib.util.spec_from_file_location("capacity_coverage", FILE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "TRUE_RUNS", 4000)
    return module


@pytest.mark.parametrize(("target", "runs"), [(0.9, 6), (0.95, 10)])
def test_intervals_cover_in_simulated_queues(coverage, target, runs):
    covers, lower, upper = coverage.rates_of_claims((0.3, 0.5, 0.8, 1.2), target, runs, 64, 150)
    assert covers >= 0.93
    assert lower >= 0.9 and upper >= 0.4


def test_equal_requests_of_independent_runs_have_clopper_and_pearson_s_interval():
    """If runs vary as independent requests would, their number counts, but for the t factor."""
    rng = np.random.default_rng(1)
    one = LoadCounts(1.0, rng.binomial(100, 0.9, 400).astype(float), np.full(400, 100.0))
    low, high = one.share_interval(0.05)
    exact = stats.binomtest(int(one.good.sum()), 40_000).proportion_ci(0.95, "exact")
    assert (low, high) == (pytest.approx(exact.low, abs=4e-4), pytest.approx(exact.high, abs=4e-4))


def test_runs_that_differ_widen_the_interval():
    even, uneven = load(1.0, *[45] * 10), load(1.0, *[50, 40] * 5)
    assert even.share == uneven.share == 0.9
    widths = [high - low for low, high in (x.share_interval(0.05) for x in (even, uneven))]
    assert widths[1] > 1.2 * widths[0]


def test_runs_that_differ_less_than_chance_are_no_more_than_their_requests():
    exact = stats.binomtest(451, 500).proportion_ci(0.95, "exact")
    alike = load(1.0, *[45] * 9, 46).share_interval(0.05)
    assert alike == (pytest.approx(exact.low), pytest.approx(exact.high))


def test_a_rate_that_ended_at_a_look_is_judged_with_its_part_of_alpha():
    whole, looked = load(1, 49, 50, 49, 50), replace(load(1, 49, 50, 49, 50), spent=0.2)
    assert looked.share_interval(0.05) == whole.share_interval(0.01)
    assert whole.is_decided(0.9, 0.05) and not whole.is_decided(0.98, 0.05)
    limit = whole.share_interval(0.03)[0]
    assert whole.is_decided(limit, 0.05) and not looked.is_decided(limit, 0.05)
    assert load_capacity([whole], limit, 0.05).at_least == 1
    assert load_capacity([looked], limit, 0.05).at_least is None


def test_two_runs_say_nothing():
    assert load(1.0, 50, 50).share_interval(0.05) == (0.0, 1.0)


def test_capacity_lies_between_the_last_confirmed_and_the_first_refuted_rate():
    loads = [
        load(8.0, *[10, 20, 15] * 3), load(1.0, *[50] * 9), load(2.0, *[50, 50, 49] * 3),
        load(4.0, *[47, 48, 46] * 3),
    ]  # fmt: skip
    found = load_capacity(loads, 0.95, 0.05)
    assert (found.at_least, found.below) == (2.0, 8.0)
    assert 2.0 < found.estimate < 4.0


def test_a_confirmed_rate_above_an_unconfirmed_one_does_not_count():
    """A fixed sequence of tests ends at its first failure, so it needs no correction."""
    loads = [load(1.0, *[44] * 9), load(2.0, *[50] * 9)]
    assert load_capacity(loads, 0.95, 0.05) == Capacity(None, None, None)


def test_rates_that_are_all_kept_or_all_missed_have_one_limit():
    kept = load_capacity([load(1.0, *[50] * 9), load(2.0, *[50] * 9)], 0.95, 0.05)
    assert kept == Capacity(None, 2.0, None)
    missed = load_capacity([load(1.0, *[10] * 9), load(2.0, *[5] * 9)], 0.95, 0.05)
    assert missed == Capacity(None, None, 1.0)


def test_the_estimate_pools_shares_that_rise():
    loads = [load(1.0, *[50] * 4), load(2.0, *[44] * 4), load(4.0, *[46] * 4)]
    both = load_capacity([*loads, load(8.0, *[20] * 4)], 0.9, 0.05).estimate
    assert both == pytest.approx(4.0, rel=1e-6)


@pytest.mark.parametrize(("good", "requests"), [([3.0], [2.0]), ([], []), ([1.0], [1.0, 1.0])])
def test_counts_are_checked(good, requests):
    with pytest.raises(ValueError, match="good"):
        LoadCounts(1.0, np.array(good), np.array(requests))


@pytest.mark.parametrize(
    ("capacity", "text"),
    [
        (Capacity(None, None, None), "Not decided: at which of these rates a keeps 95 % of"),
        (Capacity(None, None, 4.0), "a does not keep 95 % of requests within TTFT 9 ms at 4 requ"),
        (Capacity(None, 2.0, None), "a keeps 95 % of requests within TTFT 9 ms at 2 requests/s ("),
        (Capacity(3.0, 2.0, 4.0), "at 2 requests/s, but not at 4 (95 % confidence); estimated "),
    ],
)
def test_a_capacity_is_a_sentence(capacity, text):
    assert text in ServingCapacity("a", 0.95, "TTFT 9 ms", 0.05, (), capacity).sentence


@pytest.mark.parametrize(("numbers", "said"), [((32, 64), True), ((64, 64), False)])
def test_a_capacity_says_that_its_rates_had_other_requests(numbers, said):
    loads = (LoadCounts(1.0, np.ones(6), np.full(6, float(number))) for number in numbers)
    capacity = Capacity(None, 2.0, None)
    one = ServingCapacity("a", 0.95, "TTFT 9 ms", 0.05, tuple(loads), capacity)
    assert ("a run had 32, 64 (in the order of the loads)" in one.sentence) == said


def test_a_share_is_never_rounded_up_to_its_target():
    """99.96 % of requests were "100.0 %", beside a target of 99.99 %."""
    loads = load(1.0, 9996, 9996, requests=10_000), load(2.0, 9496, 9496, requests=10_000)
    capacity = Capacity(None, None, None)
    one = ServingCapacity("a", 0.9999, "TTFT 9 ms", 0.05, loads, capacity)
    table = capacity_table([one])
    assert [table.cells(line)[4] for line in table.lines] == ["99.96 %", "94.9 %"]
    dots = [mark for mark in capacity_chart(one).chart.marks if isinstance(mark, Dots)]
    tips = [tip for mark in dots for tip in mark.tips]
    assert [tip.partition(": ")[2] for tip in tips] == [
        "99.96 % within the limits", "94.9 % within the limits"
    ]  # fmt: skip
