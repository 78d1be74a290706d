import dataclasses

import numpy as np
import pytest

from labkit.engine.engine_protocol import NO_TOKEN, InvalidLogitsError
from labkit.engine.request import Request, RequestState
from labkit.engine.sampling.sampler import Sampled, sample_rows
from labkit.engine.sampling.sampling_params import SamplingError, SamplingParams
from labkit.engine.sampling.step_logits import DeviceLogits


def state(request_id, **params):
    return RequestState(Request(request_id, (1, 2, 3), SamplingParams(**params)))


def test_greedy_takes_the_best_and_reports_its_lead():
    logits = np.array([[0.0, 3.0, 2.5], [1.0, 1.0, -2.0]], np.float32)
    before = logits.copy()
    out = sample_rows(logits, [state("a"), state("b")])
    assert (out[0].token, out[0].margin) == (1, 0.5)
    assert (out[1].token, out[1].margin) == (0, 0.0)
    np.testing.assert_array_equal(logits, before)


def test_logits_that_are_not_numbers_name_their_request():
    logits = np.zeros((2, 5), np.float32)
    logits[1, 3] = np.nan
    with pytest.raises(InvalidLogitsError, match="request bad"):
        sample_rows(logits, [state("good"), state("bad")])


def test_rows_of_padding_are_neither_sampled_nor_named():
    import mlx.core as mx

    nan, plain = [0.0, mx.nan], [0.0, 1.0]
    (sampled,) = sample_rows(DeviceLogits(mx.array([plain, nan])), [state("good")])
    assert sampled.token == 1
    with pytest.raises(InvalidLogitsError, match=r"\(request bad\)"):
        sample_rows(DeviceLogits(mx.array([nan, nan])), [state("bad")])


class Broken:
    """A constraint that raises, or allows nothing."""

    def __init__(self, error=None):
        self.error = error

    def allowed(self, output, vocab_size):
        if self.error is not None:
            raise self.error
        return np.zeros(vocab_size, bool)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"constraint": Broken(SamplingError("too\ncomplex"))}, "too complex"),
        ({"constraint": Broken(KeyError("a"))}, "KeyError: 'a'"),
        ({"constraint": Broken()}, "no token can be sampled"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty makes a logit infinite"),
        ({"logit_bias": {1: 1e300}}, "repetition_penalty makes a logit infinite"),
    ],
)
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:overflow")
def test_a_request_that_cannot_be_sampled_gets_an_error_and_the_others_a_token(
    params, message, temperature
):
    logits = np.array([[0.0, 3.0, 2.5, 1.0], [1.0, 1.0, -2.0, 0.5]], np.float32)
    failed, fine = sample_rows(logits, [state("a", temperature=temperature, **params), state("b")])
    assert failed.token == NO_TOKEN and message in failed.error and "\n" not in failed.error
    assert fine == Sampled(0, 0.0)


def test_greedy_is_over_the_adjusted_logits_and_so_is_its_lead():
    logits = np.array([[0.0, 3.0, 2.5]], np.float32)
    biased = state("a", logit_bias={0: 4.5})
    assert sample_rows(logits, [biased])[0] == Sampled(0, 1.5)
    penalised = state("a", frequency_penalty=1)
    penalised.token_ids.append(1)
    assert sample_rows(logits, [penalised])[0] == Sampled(2, 0.5)
    np.testing.assert_array_equal(logits, np.array([[0.0, 3.0, 2.5]], np.float32))


def test_logprobs_are_of_the_logits_before_bias_and_temperature():
    logits = np.log(np.array([[0.1, 0.6, 0.3]], np.float32))
    for params in ({"logit_bias": {0: 50}}, {"logit_bias": {0: 50}, "temperature": 3.0}):
        out = sample_rows(logits, [state("a", logprobs=2, **params)])[0]
        assert out.token == 0
        np.testing.assert_allclose(np.exp(out.logprobs.token), 0.1, rtol=1e-5)
        assert [token for token, _ in out.logprobs.top] == [1, 2]


def test_logprobs_are_the_log_softmax_of_the_likeliest_tokens_equal_ones_by_id():
    def logprobs(logits, token, count):
        biased = state("a", logit_bias={token: 100}, logprobs=count)
        (sampled,) = sample_rows(np.array([logits], np.float32), [biased])
        assert sampled.token == token
        return sampled.logprobs

    result = logprobs(np.log([0.1, 0.4, 0.2, 0.3]) + 400, 2, 3)  # exp(2 * 400) would overflow
    np.testing.assert_allclose(np.exp(result.token), 0.2, rtol=1e-4)
    assert [token for token, _ in result.top] == [1, 3, 2]
    np.testing.assert_allclose([np.exp(v) for _, v in result.top], [0.4, 0.3, 0.2], rtol=1e-4)
    alone = logprobs(np.zeros(4), 1, 0)
    assert alone.top == () and alone.token == pytest.approx(-np.log(4))
    for count, ids in ((2, [1, 2]), (4, [1, 2, 4, 0]), (9, [1, 2, 4, 0, 3])):
        assert [token for token, _ in logprobs([1, 3, 3, 0, 3], 0, count).top] == ids


@pytest.mark.parametrize(
    ("params", "plain"),
    [
        ({}, True),
        ({"max_tokens": 3, "seed": 1}, True),
        ({"logprobs": 0}, False),
        ({"min_p": 0.1, "temperature": 1}, False),
        ({"presence_penalty": 1}, False),
    ],
)
def test_a_plain_greedy_row_runs_nothing_but_the_argmax(params, plain):
    class Read(RequestState):
        """A request whose tokens are looked at."""

        def __getattribute__(self, name):
            if name == "token_ids":
                reads.append(name)
            return super().__getattribute__(name)

    reads = []
    watched = Read(Request("a", (1, 2, 3), SamplingParams(**params)))
    reads.clear()
    sample_rows(np.zeros((1, 9), np.float32), [watched])
    assert (reads == []) is plain


def test_every_token_is_drawn_anew():
    logits, drawn = np.zeros((1, 1000), np.float32), set()
    sequence = state("a", temperature=1.0, seed=3)
    for _ in range(10):
        token = sample_rows(logits, [sequence])[0].token
        sequence.token_ids.append(token)
        drawn.add(token)
    assert len(drawn) > 7
    fresh = state("b", temperature=1.0, seed=3)
    assert sample_rows(logits, [fresh])[0].token == sequence.token_ids[3]
    other = {sample_rows(logits, [state("b", temperature=1.0, seed=n)])[0].token for n in range(10)}
    assert len(other) > 7


HETEROGENEOUS = [
    {},
    {"temperature": 0.7, "seed": 5},
    {"temperature": 1.0, "top_k": 4, "seed": 6, "logprobs": 3},
    {"temperature": 2.0, "top_p": 0.6, "seed": 7, "repetition_penalty": 1.5},
    {"repetition_penalty": 1.3, "logprobs": 1},
    {"temperature": 1.5, "min_p": 0.2, "frequency_penalty": 0.8},
    {"temperature": 1.0, "presence_penalty": -0.5, "logit_bias": {3: 2.0, 7: -4.0}},
    {"logit_bias": {11: 30.0}, "frequency_penalty": 1.9, "logprobs": 20},
    {"temperature": 1e-4, "seed": 8},
]


def history_logits(states):
    """Logits that depend on a request's own tokens only."""
    rows = [np.random.default_rng(s.token_ids).standard_normal(50) for s in states]
    return 3 * np.array(rows, np.float32)


def run(arrivals, length=12):
    """Serve requests, number ``i`` from step ``arrivals[i]`` on; return what each got."""
    results, step = {}, 0
    states = {i: state(f"r{i}", **HETEROGENEOUS[i]) for i in arrivals}
    while len(results) < len(states) or any(len(tokens) < length for tokens in results.values()):
        live = [
            s
            for i, s in states.items()
            if arrivals[i] <= step and len(results.get(s.request_id, ())) < length
        ]
        step += 1
        if not live:
            continue
        for s, sampled in zip(live, sample_rows(history_logits(live), live), strict=True):
            results.setdefault(s.request_id, []).append(sampled)
        for s in live:
            s.token_ids.append(results[s.request_id][-1].token)
    return results


def test_requests_in_a_changing_batch_get_the_tokens_they_get_alone():
    everyone = range(len(HETEROGENEOUS))
    together = run({i: 5 * i % 7 for i in everyone})
    backwards = run({i: 2 * i for i in reversed(everyone)})
    for i in everyone:
        alone = run({i: 0})[f"r{i}"]
        assert alone == together[f"r{i}"] == backwards[f"r{i}"]
    assert len({tuple(s.token for s in samples) for samples in together.values()}) > 5


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0},
        {"repetition_penalty": float("nan")},
        {"presence_penalty": 2.5},
        {"frequency_penalty": -2.5},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: float("inf")}},
        {"logprobs": -1},
        {"logprobs": 21},
        {"stop": ["a", ""]},
        {"stop": [3]},
        {"stop": ""},
        {"max_tokens": 0},
        {"seed": -1},
        {"temperature": "hot"},
        {"temperature": float("inf")},
        {"top_p": None},
        {"max_tokens": 2.5},
        {"max_tokens": float("inf")},
        {"max_tokens": None},
        {"top_k": 2.5},
        {"logprobs": 2.5},
        {"prompt_logprobs": 2.5},
        {"seed": 2.5},
        {"stop_token_ids": (2.5,)},
        {"logit_bias": {2.5: 1.0}},
        {"logit_bias": {1: "much"}},
    ],
)
def test_illegal_parameters_raise_at_construction_in_one_line(bad):
    with pytest.raises(ValueError, match=next(iter(bad))) as caught:
        SamplingParams(**bad)
    assert "\n" not in str(caught.value)


def test_integers_of_numpy_are_integers_and_parts_of_tokens_are_none():
    params = SamplingParams(max_tokens=np.int64(3), stop_token_ids=np.arange(2), seed=np.uint8(1))
    assert params == SamplingParams(max_tokens=3, stop_token_ids=(0, 1), seed=1)
    assert Request("a", np.arange(2)).prompt_token_ids == (0, 1)
    with pytest.raises(ValueError, match=r"^prompt_token_ids: 2\.5 is not an integer$"):
        Request("a", (1, 2.5))


def test_parameters_are_frozen_copies_that_compare_and_hash():
    bias, stop = {3: 1}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stop)
    bias[3], stop[0] = 9, "b"
    assert (params.logit_bias, params.stop) == ({3: 1.0}, ("a",))
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert len({params, SamplingParams(logit_bias={3: 1}, stop=("a",))}) == 1
    assert dataclasses.replace(params, temperature=1.0).logit_bias == {3: 1.0}
