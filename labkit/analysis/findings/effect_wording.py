"""Wording of effects: the word for a metric's change, and the size of the change in its unit.

Only a speed is called faster or slower. A latency is lower by milliseconds, a share by percentage
points, and an arm takes more or less memory.
"""

from __future__ import annotations

from labkit.analysis.number_format import magnitude_text, scaled, unit_name, value_text
from labkit.records.metric_registry import define_metric

SECONDS = ("us", "ms", "s")


def change_word(metric: str | None, unit: str | None, better: str | None, larger: bool) -> str:
    """Return ``faster``, ``slower``, ``more``, ``less``, ``higher`` or ``lower``.

    ``larger`` is whether the value is larger than the baseline's.
    """
    definition = define_metric(metric, unit)
    if definition.is_speed:
        return "faster" if larger == (better == "higher") else "slower"
    if definition.is_mass_noun:
        return "more" if larger else "less"
    return "higher" if larger else "lower"


def verdict_word(verdict: str, metric: str | None, unit: str | None, better: str | None) -> str:
    """Return a verdict as it is printed: ``lower`` for a latency that is ``faster``."""
    if verdict in ("faster", "slower"):
        return change_word(metric, unit, better, (verdict == "faster") == (better == "higher"))
    return verdict.replace("_", "-")


def size_text(unit: str | None, size: float) -> str:
    """Return the absolute value of a difference with its unit: ``12.0 ms``, ``50.2 points``."""
    if unit is not None and unit.startswith("%"):
        return f"{magnitude_text(size)} points"
    return f"{value_text(abs(size), unit)} {unit_name(unit)}"


def has_own_size(metric: str | None, unit: str | None) -> bool:
    """Return whether sentences give an effect in the metric's unit besides percent."""
    times = unit in SECONDS and not define_metric(metric, unit).is_speed
    return times or unit == "bytes" or (unit or "").startswith("%")


def effect_text(
    metric: str | None, unit: str | None, better: str | None, effect_pct: float,
    baseline: float | None = None,
) -> str:  # fmt: skip
    """Return an effect as text: ``2.1 % faster``, ``12.0 ms (5.1 %) lower``.

    ``baseline``: the baseline's median, from which the size in the metric's unit follows.
    """
    word = change_word(metric, unit, better, effect_pct > 0)
    percent = f"{magnitude_text(effect_pct)} %"
    if baseline is None or not has_own_size(metric, unit):
        return f"{percent} {word}"
    size = size_text(unit, baseline * effect_pct / 100)
    return f"{size} {word}" if size.endswith(" points") else f"{size} ({percent}) {word}"


def value_with_unit(value: float, unit: str | None) -> str:
    """Return a value with its unit: ``59.9 %``, ``12.0 MiB``, ``199 steps``."""
    printed = scaled(value, unit)
    digits = 0 if float(printed).is_integer() and not (unit or "").startswith("%") else 1
    return f"{printed:,.{digits}f} {unit_name(unit)}"
