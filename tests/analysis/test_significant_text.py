"""Numbers have significant digits and never an exponent."""

import random

import pytest

from labkit.analysis.number_format import significant_text, value_text


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
