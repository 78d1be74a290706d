import numpy as np

from labkit.engine.sampling.sampler import logprobs


def test_logprobs_are_the_log_softmax_most_likely_first():
    p = np.array([0.1, 0.4, 0.2, 0.3])
    result = logprobs(np.log(p).astype(np.float32) + 100, 2, 3)
    np.testing.assert_allclose(np.exp(result.token), 0.2, rtol=1e-5)
    assert [token for token, _ in result.top] == [1, 3, 2]
    np.testing.assert_allclose([np.exp(v) for _, v in result.top], [0.4, 0.3, 0.2], rtol=1e-5)


def test_zero_top_logprobs_give_only_the_token():
    result = logprobs(np.zeros(4, np.float32), 1, 0)
    assert result.top == ()
    np.testing.assert_allclose(result.token, -np.log(4))


def test_top_logprobs_are_limited_by_the_vocabulary():
    assert len(logprobs(np.zeros(4, np.float32), 1, 20).top) == 4
