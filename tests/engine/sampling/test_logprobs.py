import numpy as np

from labkit.engine.sampler import logprobs


def test_they_are_the_logs_of_the_softmax_likeliest_first():
    p = np.array([0.1, 0.4, 0.2, 0.3])
    told = logprobs(np.log(p).astype(np.float32) + 100, 2, 3)
    np.testing.assert_allclose(np.exp(told.token), 0.2, rtol=1e-5)
    assert [token for token, _ in told.top] == [1, 3, 2]
    np.testing.assert_allclose([np.exp(v) for _, v in told.top], [0.4, 0.3, 0.2], rtol=1e-5)


def test_none_of_the_likeliest_is_asked_for():
    told = logprobs(np.zeros(4, np.float32), 1, 0)
    assert told.top == ()
    np.testing.assert_allclose(told.token, -np.log(4))


def test_more_than_the_vocabulary_is_all_of_it():
    assert len(logprobs(np.zeros(4, np.float32), 1, 20).top) == 4
