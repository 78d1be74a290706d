"""Wording of effects: the phrase for an arm's difference from the baseline in a metric.

``takes 55.0 % less time per launch than separate (2.2 times as fast)``. The words of each metric
are in :mod:`labkit.records.metric_registry`. A percentage is always of the metric's own value, so a
time that fell by 55 % is 55 % less time and never "55 % faster".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.analysis.model.result_row import Row
from labkit.analysis.number_format import (
    magnitude_text,
    scaled,
    significant_text,
    unit_name,
    value_text,
)
from labkit.records.metric_registry import MetricDefinition

MIN_RATIO = 1.45  # a smaller one says no more than the percentage


def direction_word(metric: MetricDefinition, larger: bool) -> str:
    """Return the direction of a difference as a table names it: ``less time``, ``waits less``."""
    words = metric.words
    word = words.more if larger else words.less
    if words.quantity and not words.quantity.startswith("of "):
        return f"{word} {words.quantity}"
    return word if words.more == "higher" else f"{words.singular_verb} {word}"


def verdict_word(row: Row, verdict: str) -> str:
    """Return a verdict as it is printed: ``less time`` for a shorter time, which is ``better``."""
    if verdict in ("better", "worse"):
        larger = (verdict == "better") == (row.better == "higher")
        return direction_word(row.definition, larger)
    return verdict.replace("_", "-")


def amount_text(
    metric: MetricDefinition,
    effects: Sequence[float],
    places: Sequence[str] = (),
    differences: Sequence[float | None] = (),
) -> str:
    """Return how much more or less: ``4.1 to 8.0 % more``, ``1.0 % less to 2.0 % more``.

    ``places`` name the rows of the effects. They are given if directions differ. ``differences``
    has, for each infinite effect, the difference in the metric's unit.
    """
    words, order = metric.words, sorted(range(len(effects)), key=effects.__getitem__)
    low, high = (effects[order[end]] for end in (0, -1))

    def one(index: int) -> str:
        word = words.more if effects[index] > 0 else words.less
        where = f" ({places[index]})" if places else ""
        size = sizes_text(metric, effects[index : index + 1], differences[index : index + 1])
        return f"{size} {word}{where}"

    if low < 0 < high:
        return f"{one(order[0])} to {one(order[-1])}"
    size = sizes_text(metric, effects, differences)
    return f"{size} {words.more if high > 0 else words.less}"


def sizes_text(
    metric: MetricDefinition, effects: Sequence[float], differences: Sequence[float | None] = ()
) -> str:
    """Return the sizes of effects: ``4.1 to 8.0 %``, ``4.1 % and 0.2 to 0.5 req/s``."""
    known = [effect for effect in effects if math.isfinite(effect)]
    from_zero = sorted(abs(difference) for difference in differences if difference)
    only_zeros = bool(known and from_zero) and not any(known)
    texts = [f"{range_text(known)} %"] if known and not only_zeros else []
    if from_zero:
        low, high = (size_text(metric.unit, from_zero[end]) for end in (0, -1))
        text = high if low == high or only_zeros else f"{low.split()[0]} to {high}"
        texts.append(f"up to {text}" if only_zeros else text)
    return " and ".join(texts)


def range_text(effects: Sequence[float]) -> str:
    """Return the range of effects' sizes: ``4.1 to 8.0``, ``4.1``, or ``up to 8.0`` from 0."""
    sizes = sorted(abs(effect) for effect in effects)
    low, high = magnitude_text(sizes[0]), magnitude_text(sizes[-1])
    if low == high:
        return low
    return f"{low} to {high}" if sizes[0] else f"up to {high}"


@dataclass(frozen=True)
class Piece:
    """A part of a sentence, and the shorter forms of it, each with what it loses (a weight)."""

    text: str
    shorter: tuple[tuple[int, str], ...] = ()


def optional(text: str, loss: int, shorter: str = "") -> Piece:
    """Return a piece that a short text leaves out, or shortens, at a loss."""
    return Piece(text, ((loss, shorter),) if text else ())


# What a short text loses: the more, the later it is left out.
NO_INTERVAL, NO_MEDIAN, NO_RATIO, NO_DETAIL, NO_NAMES, NO_P99, NO_BASELINE, NO_OBJECT, NO_COUNT = (
    1, 2, 4, 8, 16, 40, 32, 48, 96,
)  # fmt: skip


def effect_pieces(
    metric: MetricDefinition,
    effects: Sequence[float],
    than: str = "",
    where: str = "",
    *,
    amount: str | None = None,
    base: float | None = None,
    differences: Sequence[float | None] = (),
    interval: str = "",
    verb: str | None = None,
) -> list[Piece]:
    """Return what an arm does more or less than another, with a verb, in pieces.

    ``effects``: differences in percent, in one or more rows. ``than``: the other arm; empty if the
    sentence has named it. ``where``: the rows, as ``in all 4 rows``. ``amount``: how much more or
    less, in other words than :func:`amount_text`, without further numbers. ``base``: the other
    arm's value; with it, a single effect is given in the metric's unit if its registered words ask
    for it. ``differences``: for each infinite effect, the difference in the metric's unit.
    ``interval``: the interval in words, or other notes that follow in parentheses. ``verb``: by
    default the metric's, as of one arm.
    """
    words, notes = metric.words, []
    quantity, detail = words.quantity, words.detail
    if any(differences):
        amount = amount or amount_text(metric, effects, differences=differences)
        if quantity and not quantity.startswith("of "):  # of which points are more or less
            quantity, detail = metric.short_label, ""
    elif amount is None:
        amount = amount_text(metric, effects)
        if base is not None and len(effects) == 1 and words.in_unit:
            size = size_text(metric.unit, base * effects[0] / 100)
            amount = f"{size} {words.more if effects[0] > 0 else words.less}"
            quantity = "" if quantity == "time" else quantity
            if not metric.unit.startswith("%"):
                notes.append(f"{magnitude_text(effects[0])} %")
            elif interval:  # it is in percent of the other arm's share
                interval = f"relative: {magnitude_text(effects[0])} %; {interval}"
        notes = notes or ratio_text(metric, effects)
    first = f"({notes[0]})" if notes else ""
    full = "; ".join([*notes, *filter(None, [interval])])
    return [
        Piece(f"{verb or words.singular_verb} {amount} {quantity}".rstrip()),
        optional(detail, NO_DETAIL if quantity else NO_OBJECT),
        optional(words.at, NO_MEDIAN if words.at != "at p99" else NO_P99),
        optional(f"than {than}" if than else "", NO_BASELINE),
        optional(where, NO_COUNT),
        Piece(f"({full})", ((NO_INTERVAL, first), (NO_RATIO, ""))) if full else Piece(""),
    ]


def effect_phrase(
    metric: MetricDefinition, effects: Sequence[float], *tail: str, **options: Any
) -> str:
    """Return all of :func:`effect_pieces` as text."""
    return join(piece.text for piece in effect_pieces(metric, effects, *tail, **options))


def join(texts: Iterable[str]) -> str:
    """Join the parts of a sentence; one that begins with a punctuation mark follows directly."""
    return "".join(t if t[0] in ",;.:" else f" {t}" for t in texts if t).lstrip()


def ratio_text(metric: MetricDefinition, effects: Sequence[float]) -> list[str]:
    """Return ``2.2 times as fast`` or ``7.6 times as many`` if an effect is large, else nothing."""
    ratios = [1 + effect / 100 for effect in effects]
    if not all(map(math.isfinite, ratios)):
        return []
    if metric.words.quantity == "time" and all(0 < ratio < 1 for ratio in ratios):
        ratios, word = [1 / ratio for ratio in ratios], "fast"
    elif metric.words.quantity == "time":
        word = "long"
    elif metric.words.less == "fewer":
        word = "many"
    else:
        return []
    if min(ratios) < MIN_RATIO:
        return []
    ends = [f"{x:.1f}" if x < 9.95 else f"{x:,.0f}" for x in (min(ratios), max(ratios))]
    return [f"{' to '.join(dict.fromkeys(ends))} times as {word}"]


def interval_phrase(
    metric: MetricDefinition, interval: tuple[float, float] | None, level: float | None = None
) -> str:
    """Return ``95 % interval 3.2 to 5.0 %``, with directions if they differ; empty if unknown."""
    if interval is None:
        return ""
    name = "interval" if level is None else f"{100 * level:g} % interval"
    if interval[0] < 0 < interval[1]:
        return f"{name} {amount_text(metric, interval)}"
    return f"{name} {range_text(interval)} %"


def size_text(unit: str | None, size: float) -> str:
    """Return the absolute value of a difference with its unit: ``12.0 ms``, ``50.2 points``."""
    if unit is not None and unit.startswith("%"):
        return f"{magnitude_text(size)} points"
    return f"{value_text(abs(size), unit)} {unit_name(unit)}"


def value_with_unit(value: float, unit: str | None) -> str:
    """Return a value with its unit: ``59.9 %``, ``12.0 MiB``, ``199 steps``."""
    printed = scaled(value, unit)
    if 0 < abs(printed) < 1:
        return f"{significant_text(printed, 3)} {unit_name(unit)}"
    digits = 0 if float(printed).is_integer() and not (unit or "").startswith("%") else 1
    return f"{printed:,.{digits}f} {unit_name(unit)}"
