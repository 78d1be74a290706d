"""Number format: the same digits in every table, sentence and plot."""

from __future__ import annotations

import math

MINUS = "−"
UNIT_NAMES = {"us": "µs", "bytes": "MiB"}
UNKNOWN = "–"


def round_digits(value: float) -> float:
    """Round to 10 significant digits.

    Logarithms and sums differ in their last bits between CPUs with different vector units, but a
    study rebuilt on another machine must be the same byte for byte.
    """
    return float(f"{value:.10g}")


def round_significant(value: float | None) -> float | None:
    """Round to 10 significant digits; None stays None."""
    return None if value is None else round_digits(value)


def unit_name(unit: str | None) -> str:
    """Return a unit as it is printed: ``µs`` for ``us``, ``MiB`` for ``bytes``."""
    return UNIT_NAMES.get(unit or "", unit or "")


def scaled(value: float, unit: str | None) -> float:
    """Convert a value to its printed unit (bytes become MiB)."""
    return value / 2**20 if unit == "bytes" else value


def value_text(value: float | None, unit: str | None = None) -> str:
    """Write a measured value: one decimal from 100 on, two from 1 on, else 3 significant digits."""
    if value is None:
        return UNKNOWN
    printed = scaled(value, unit)
    if abs(printed) >= 100 or printed == 0:
        return f"{printed:,.1f}"
    return f"{printed:,.2f}" if abs(printed) >= 1 else significant_text(printed, 3)


def significant_text(value: float, digits: int) -> str:
    """Write a number with ``digits`` significant digits and never an exponent.

    Digits before the decimal point are all written, zeros at the end are not: ``0.000012``,
    ``1,024``, ``0.5``.
    """
    rounded = float(f"{value:.{digits}g}")
    if rounded == 0 or not math.isfinite(rounded):
        return f"{rounded:g}"
    decimals = digits - 1 - math.floor(math.log10(abs(rounded)))
    if decimals <= 0:
        return f"{value:,.0f}"
    return f"{rounded:,.{decimals}f}".rstrip("0").removesuffix(".")


def percent_text(value: float | None) -> str:
    """Write a signed difference in percent: ``+0.9%``."""
    if value is None:
        return UNKNOWN
    return f"{signed_text(value)}%"


def signed_text(value: float, digits: int | None = None) -> str:
    """Write a number with its sign (a true minus); by default one decimal, or two below 0.1."""
    if digits is None:
        digits = 1 if abs(value) >= 0.095 or value == 0 else 2
    text = f"{value:+,.{digits}f}"
    if float(text.replace(",", "")) == 0:
        text = text[1:]
    return text.replace("-", MINUS)


def interval_text(low: float | None, high: float | None) -> str:
    """Write an interval of differences in percent: ``−1.2 to +0.4``."""
    if low is None or high is None:
        return UNKNOWN
    return f"{signed_text(low)} to {signed_text(high)}"


def p_text(p: float | None) -> str:
    """Write a p-value: two significant digits, one below 0.0001, never 0."""
    if p is None:
        return UNKNOWN
    if p >= 0.0995:
        return f"{p:.2f}"
    return f"{p:.2g}" if p >= 1e-4 else f"{p:.0e}".replace("e-0", "e-")


def magnitude_text(value: float) -> str:
    """Write an absolute value: one decimal, but two below 0.1 and none from 100 on."""
    if math.isinf(value):
        return "∞"
    if abs(value) >= 100:
        return f"{abs(value):,.0f}"
    return f"{abs(value):,.1f}" if abs(value) >= 0.095 or value == 0 else f"{abs(value):.2f}"


def bound_text(bound: float) -> str:
    """Write an upper bound: like :func:`magnitude_text`, but rounded up."""
    scale = 1 if bound >= 100 else 10 if bound >= 0.095 else 100
    return magnitude_text(math.ceil(round_digits(bound * scale)) / scale)


def share_pct_text(share: float, digits: int) -> str:
    """Write a share in percent, rounded down: a share below 1 is never 100, or a limit not kept."""
    scale = 10**digits
    return f"{math.floor(round_digits(100 * scale * share)) / scale:.{digits}f}"
