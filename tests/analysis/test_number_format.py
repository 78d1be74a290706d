"""Numbers have significant digits and never an exponent."""

import random

import pytest

from labkit.analysis.number_format import (
    bound_text,
    interval_text,
    magnitude_text,
    p_text,
    percent_text,
    round_significant,
    share_pct_text,
    signed_text,
    significant_text,
    unit_name,
    value_text,
)


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (1024.0, 3, "1,024"),
        (1_234_567.8, 6, "1,234,568"),
        (999.96, 3, "1,000"),
        (0.0000123456, 3, "0.0000123"),
        (-0.5, 4, "-0.5"),
        (12.30, 4, "12.3"),
        (100.0, 4, "100"),
        (120.0, 2, "120"),
        (0.0, 3, "0"),
    ],
)
def test_known_texts(value, digits, text):
    assert significant_text(value, digits) == text


def test_it_is_the_g_format_where_that_has_no_exponent():
    draw = random.Random(0)
    for _ in range(2000):
        value, digits = draw.uniform(-1, 1) * 10 ** draw.randint(-12, 12), draw.randint(2, 6)
        text, plain = significant_text(value, digits), f"{value:.{digits}g}"
        assert "e" not in text
        if "e" not in plain:
            assert text.replace(",", "") == plain
        assert float(text.replace(",", "")) == pytest.approx(value, rel=0.6 * 10.0 ** (1 - digits))


def test_tiny_values_have_no_exponent():
    assert value_text(1.5e-7) == "0.00000015"
    assert value_text(1024 * 2**20, "bytes") == "1,024.0"


@pytest.mark.parametrize(
    ("write", "texts"),
    [
        (value_text, {None: "–", 0.0: "0.0", 99.994: "99.99", 100.0: "100.0", 1234.56: "1,234.6",
                      1.0: "1.00", 0.9994: "0.999", -100.04: "-100.0", -0.5: "-0.5"}),
        (lambda v: value_text(v, "bytes"), {1 << 20: "1.00", 150 << 20: "150.0", 1 << 19: "0.5"}),
        (percent_text, {None: "–", 0.0: "0.0%", 0.94: "+0.9%", -0.94: "−0.9%", 0.0949: "+0.09%",
                        0.095: "+0.1%", 1234.5: "+1,234.5%", 0.001: "0.00%", -0.001: "0.00%"}),
        (signed_text, {1.44: "+1.4", -1.66: "−1.7", 0.0: "0.0", -0.001: "0.00"}),
        (p_text, {None: "–", 0.0995: "0.10", 0.0994: "0.099", 0.25: "0.25", 1.0: "1.00",
                  1e-4: "0.0001", 9.9e-5: "1e-4", 2e-12: "2e-12"}),
        (magnitude_text, {-100.0: "100", 1234.5: "1,234", 99.94: "99.9", -0.0949: "0.09",
                          0.095: "0.1", 0.0: "0.0", -5.0: "5.0"}),
        (bound_text, {0.0: "0.0", 1.136: "1.2", 1.7136: "1.8", 1.1: "1.1", 1.1 + 1e-12: "1.1",
                      0.0801: "0.09", 0.091: "0.1", 0.0951: "0.1", 0.004: "0.01", 99.96: "100",
                      100.3: "101", 1234.0: "1,234"}),
        (lambda s: share_pct_text(s, 1), {1.0: "100.0", 0.9996: "99.9", 0.9496: "94.9", 0.0: "0.0",
                                          0.991: "99.1", 1 - 1e-9: "99.9"}),
        (lambda s: share_pct_text(s, 2), {0.991: "99.10", 0.99996: "99.99", 1.0: "100.00"}),
        (round_significant, {None: None, 1 / 3: 0.3333333333, 12345678901.0: 12345678900.0}),
        (unit_name, {"us": "µs", "bytes": "MiB", "tok/s": "tok/s", None: ""}),
    ],
)  # fmt: skip
def test_a_number_is_written_with_these_digits(write, texts):
    assert {value: write(value) for value in texts} == texts


def test_intervals():
    assert interval_text(-1.23, 0.04) == "−1.2 to +0.04"
    assert interval_text(None, 1.0) == interval_text(1.0, None) == "–"
