"""Arrival times: their distributions, and which requests wait for which."""

import numpy as np
import pytest
from scipy import stats

from labkit.config import ArrivalKind, Arrivals, ConfigError, LengthKind, Lengths
from labkit.workload.requests import arrivals
from labkit.workload.requests.load_generator import ClientPool
from labkit.workload.tokenized_prompt import Prompt, draw_lengths

COUNT = 4000
PROMPTS = [Prompt(f"r{i}", (1,), 1) for i in range(COUNT)]


def due(kind, prompts=PROMPTS, seed=3, **options):
    return arrivals.due(Arrivals(kind=ArrivalKind(kind), **options), prompts, seed)


@pytest.mark.parametrize(
    ("kind", "shape", "law"),
    [
        ("poisson", 1.0, stats.expon(scale=1 / 5)),
        ("gamma", 0.3, stats.gamma(0.3, scale=1 / 1.5)),
        ("gamma", 4.0, stats.gamma(4.0, scale=1 / 20)),
    ],
)
def test_gaps_follow_their_law_and_no_other(kind, shape, law):
    gaps = np.diff(due(kind, rate=5.0, shape=shape))
    assert stats.kstest(gaps, law.cdf).pvalue > 0.01
    assert stats.kstest(gaps, stats.gamma(2.0, scale=1 / 10).cdf).pvalue < 1e-6
    assert abs(stats.spearmanr(gaps[:-1], gaps[1:]).statistic) < 0.05


def test_constant_gaps_are_alike_and_the_first_request_is_due_at_once():
    assert due("constant", rate=4.0)[:4] == [0, 0.25, 0.5, 0.75]
    assert due("poisson", rate=4.0)[0] == 0
    assert set(due("at_once")) == {0.0}
    assert due("closed") is None


def test_gaps_depend_on_the_seed_and_fewer_requests_are_a_prefix():
    assert due("gamma", rate=2.0, shape=0.5) != due("gamma", rate=2.0, shape=0.5, seed=4)
    assert due("poisson", PROMPTS[:50], rate=2.0) == due("poisson", rate=2.0)[:50]


def test_a_trace_arrives_by_its_timestamps_scaled():
    stamped = [Prompt("a", (1,), 1, None, 0.0), Prompt("b", (1,), 1, None, 1500.0)]
    assert due("trace", stamped, time_scale=0.5) == [0.0, 0.75]
    with pytest.raises(ConfigError, match=r"arrivals.kind=trace: request r0 has no timestamp"):
        due("trace")


def test_sessions_arrive_at_the_rate_and_later_turns_follow_their_answer():
    prompts = [Prompt(f"{s}{t}", (1,), 1, s) for s in "ab" for t in range(2)]
    assert due("constant", prompts, rate=0.5) == [0.0, 0.0, 2.0, 0.0]
    assert arrivals.rate_unit(prompts) == "sessions/s"
    assert arrivals.rate_unit(prompts[::2]) == arrivals.rate_unit(PROMPTS) == "requests/s"


def drawn(**options):
    return draw_lengths(Lengths(**options), np.random.default_rng(5), COUNT)


def test_lengths_follow_their_laws():
    even = drawn(kind=LengthKind.uniform, low=3, high=9)
    assert stats.chisquare(np.bincount(even)[3:]).pvalue > 0.01 and set(even) == set(range(3, 10))
    wide = drawn(kind=LengthKind.lognormal, median=5000, sigma=0.5)
    law = stats.lognorm(0.5, scale=5000)
    assert stats.kstest(np.array(wide) + 0.5, law.cdf).pvalue > 0.01
    cut = drawn(kind=LengthKind.lognormal, median=50, sigma=2.0, low=40, high=60)
    assert min(cut) == 40 and max(cut) == 60
    assert drawn(kind=LengthKind.fixed, tokens=7) == [7] * COUNT
    assert drawn(kind=LengthKind.listed, values=[1, 2, 3])[:5] == [1, 2, 3, 1, 2]


def sent(clients, elapsed):
    order = []
    while (one := clients.next(elapsed)) is not None:
        order.append(one.index)
    return order


def test_a_closed_loop_delays_requests_only_by_its_number_of_clients():
    clients = ClientPool([None] * 5, None, 2)
    assert sent(clients, 0.0) == [0, 1]
    clients.finished(1, 1.0)
    assert sent(clients, 1.0) == [2]


def test_a_session_s_turn_waits_for_the_answer_before_it_and_others_pass():
    clients = ClientPool(["a", "a", "b", "b"], None, 3)
    assert sent(clients, 0.0) == [0, 2]
    clients.finished(2, 1.0)
    assert sent(clients, 1.0) == [3]
    clients.finished(0, 2.0)
    assert sent(clients, 2.0) == [1]


def test_open_loop_requests_are_sent_when_due_or_when_a_slot_is_free():
    clients = ClientPool([None] * 3, [0.0, 1.0, 1.5], 1)
    first = clients.next(0.0)
    assert (first.due, first.sent) == (0.0, 0.0) and clients.next(1.2) is None
    clients.finished(0, 2.0)
    second = clients.next(2.1)
    assert (second.index, second.due, second.sent) == (1, 1.0, 2.0)
    clients.finished(1, 3.0)
    third = clients.next(3.0)
    assert (third.due, third.sent) == (1.5, 3.0)


def test_a_later_turn_of_a_trace_is_due_by_its_time_and_not_before_the_answer():
    for answered, expected in ((1.0, 4.0), (6.0, 6.0)):
        clients = ClientPool(["a", "a"], [0.0, 4.0], None)
        assert sent(clients, 9.0) == [0]
        clients.finished(0, answered)
        assert clients.next_send() == expected
