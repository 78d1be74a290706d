"""The histogram of a window's KL divergences: its bound, its extremes and its size."""

import base64
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.records.kl_histogram import RELATIVE_ERROR, decode_histogram, encode_histogram

NORMAL = 2.0**-126  # the smallest normal float32
SHARES = (0.0, 0.5, 0.9, 0.99, 0.999, 1.0)
DIVERGENCES = st.one_of(
    st.just(0.0),
    st.sampled_from([1.0, 0.25, NORMAL, 2.0**-140, 27.6, 1e30]),
    st.floats(0, 700),
    st.floats(-40, 3).map(lambda power: 10.0**power),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(DIVERGENCES, min_size=1, max_size=12), min_size=1, max_size=3))
def test_quantiles_over_windows_are_within_the_bound_of_numpy_s(windows):
    exact = np.concatenate(windows)
    rounded = np.concatenate(
        [decode_histogram(encode_histogram(np.array(w)), len(w)) for w in windows]
    )
    assert len(rounded) == len(exact)
    bound = RELATIVE_ERROR * (1 + 1e-4)  # float64 is rounded to float32 first
    for share in SHARES:
        truth, got = np.quantile(exact, share), np.quantile(rounded, share)
        assert abs(got - truth) <= bound * truth + 2.0**-136


@pytest.mark.parametrize("shape", [0.3, 1.0, 3.0])
def test_quantiles_of_many_skewed_divergences_are_within_the_bound(shape):
    exact = np.random.default_rng(0).lognormal(-6, shape, 20_000)
    rounded = decode_histogram(encode_histogram(exact), len(exact))
    for share in SHARES:
        assert np.quantile(rounded, share) == pytest.approx(
            np.quantile(exact, share), rel=RELATIVE_ERROR * (1 + 1e-4)
        )
    assert (np.diff(rounded) >= 0).all()


def test_bins_are_as_wide_as_stated():
    """The neighbour of a bin's number is .05 to .1 % away, and no number between them is stored."""
    for low, high in ((1.0, 1 + 2**-10), (2 - 2**-10, 2.0)):
        found = set(decode_histogram(encode_histogram(np.linspace(low, high, 1001)), 1001))
        assert found == {low, high} and 0.0004 < high / low - 1 < 0.001


def test_zeros_stay_zero_and_take_almost_no_space():
    text = encode_histogram(np.zeros(5000))
    assert len(text) < 60
    assert decode_histogram(text, 5000).tolist() == [0.0] * 5000
    assert decode_histogram(encode_histogram(np.array([-0.0, 1.0])), 2).tolist() == [0.0, 1.0]
    assert decode_histogram(encode_histogram(np.zeros(0)), 0).tolist() == []


def test_a_position_takes_few_bytes():
    """A divergence written with four digits takes 8 to 11 bytes of JSON."""
    rng = np.random.default_rng(0)
    short, long = (encode_histogram(rng.lognormal(-6, 2, n)) for n in (255, 8191))
    assert len(short) < 2 * 255 and len(long) < 1.2 * 8191


@pytest.mark.parametrize("wrong", [-1e-3, np.nan, np.inf, 1e39])
def test_what_is_no_divergence_is_refused(wrong):
    with pytest.raises(ValueError, match="finite and not negative"):
        encode_histogram(np.array([0.5, wrong]))


WHOLE = encode_histogram(np.array([0.5, 1.0]))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "é",
        "AAAA",
        base64.b64encode(zlib.compress(b"abc")).decode(),
        f" {WHOLE}",
        f"{WHOLE}\n",
    ],
)
def test_what_is_no_histogram_is_refused(text):
    with pytest.raises(ValueError, match=r"not a histogram of (2 )?KL divergences"):
        decode_histogram(text, 2)


def test_only_the_window_s_divergences_are_unpacked():
    """The text of a record from outside may unpack to far more."""
    bomb = base64.b64encode(zlib.compress(bytes(1 << 28))).decode()
    tracemalloc.start()
    for count in (255, -1, 1 << 70):
        with pytest.raises(ValueError, match="not a histogram"):
            decode_histogram(bomb, count)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 24
