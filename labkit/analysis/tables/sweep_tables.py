"""A sweep's settings: a table of values by option, and a curve over each numeric option."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from labkit.analysis.document.chart import Chart, padded_range
from labkit.analysis.document.report_parts import (
    CellSource,
    ChartPart,
    PictureFile,
    ReportPart,
    section,
)
from labkit.analysis.document.svg_chart_renderer import page_style_of
from labkit.analysis.document.table_model import Column, Table
from labkit.analysis.model.cell_model import BestInRow, Cell
from labkit.analysis.number_format import UNKNOWN, scaled, significant_text, unit_name, value_text
from labkit.analysis.text_format import slug
from labkit.config import count_text
from labkit.config.arm_sweep import short_names
from labkit.config.option import override_text

BEST, POSSIBLY_BEST = "best", "~"
MAX_COLUMNS = 8  # an option with more values is not laid out as columns
MIN_POINTS = 3  # of a curve
MAX_CURVES = 6  # as many as there are colours
Values = tuple[Any, ...]


@dataclass(frozen=True)
class SweptOption:
    """An option that varies: its key, its short name and its values (numbers ascending)."""

    key: str
    name: str
    values: tuple[Any, ...]

    @property
    def is_number(self) -> bool:
        return all(isinstance(v, int | float) and not isinstance(v, bool) for v in self.values)


def swept_options(cell: Cell) -> list[SweptOption]:
    """Return the options of a sweep."""
    short = short_names(list(cell.sweep or ()))
    sweep = {key: tuple(map(_hashable, values)) for key, values in (cell.sweep or {}).items()}
    options = [SweptOption(key, short[key], values) for key, values in sweep.items()]
    return [replace(o, values=tuple(sorted(o.values))) if o.is_number else o for o in options]


def settings_of(cell: Cell, options: Sequence[SweptOption]) -> dict[Values, str]:
    """Return the arms of a sweep, by their values of ``options``."""
    return {
        tuple(_hashable(arm.overrides[option.key]) for option in options): arm.name
        for arm in cell.arms
        if arm.role != "control"
    }


def _hashable(value: Any) -> Any:
    """Return a value of an option; lists and maps as text."""
    return json.dumps(value) if isinstance(value, list | dict) else value


def settings_table(cell: Cell, best: BestInRow) -> Table[Values]:
    """Return a table of every setting's value in the row of ``best``.

    If the sweep varies several options, the values of one of them become columns.
    """
    options = swept_options(cell)
    across = _option_of_columns(options)
    down = [option for option in options if option is not across]
    arms = settings_of(cell, [*down, *([across] if across else [])])
    columns: list[Column[Values]] = [
        Column(option.name, itemgetter(i), override_text, numeric=option.is_number)
        for i, option in enumerate(down)
    ]
    case = f"{best.case}: " if len(cell.best or ()) > 1 and best.case != "all" else ""
    unit = f"{case}{best.metric} ({unit_name(best.unit)})"
    named: list[tuple[Values, str]] = [((), unit)]
    if across:
        named = [((v,), f"{across.name}={override_text(v)}") for v in across.values]
    for rest, heading in named:
        columns.append(Column(heading, _value(best, arms, rest), shade=_shade(best, arms, rest)))
    lines = list(dict.fromkeys(values[: len(down)] for values in _sorted(arms, down)))
    return Table(tuple(columns), tuple(lines), tuple(_notes(best, unit if across else None)))


def _option_of_columns(options: Sequence[SweptOption]) -> SweptOption | None:
    """Return the option with the fewest values, for columns; None if alone or with too many."""
    fewest = min(reversed(options), key=lambda option: len(option.values))
    return fewest if len(options) > 1 and len(fewest.values) <= MAX_COLUMNS else None


def _sorted(arms: Mapping[Values, str], down: Sequence[SweptOption]) -> list[Values]:
    places = [option.values.index for option in down]
    return sorted(arms, key=lambda values: [of(x) for of, x in zip(places, values, strict=False)])


def _value(best: BestInRow, arms: Mapping[Values, str], rest: Values) -> Callable[[Values], str]:
    def text(line: Values) -> str:
        arm = arms.get((*line, *rest))
        if arm is None or arm not in best.values:
            return UNKNOWN
        shown = value_text(best.values[arm], best.unit)
        if arm == best.best:
            return f"{shown} {BEST}"
        return f"{shown} {POSSIBLY_BEST}" if arm in best.possibly_best else shown

    return text


def _shade(
    best: BestInRow, arms: Mapping[Values, str], rest: Values
) -> Callable[[Values], float | None]:
    """Return a function that maps a line to its value, scaled from 0 (worst) to 1 (best).

    A line holds the values of the options that are not columns; ``rest`` is the column's value.
    """
    known = list(best.values.values())
    worst, top = (min(known), max(known)) if known else (0.0, 0.0)
    if best.better == "lower":
        worst, top = top, worst

    def shade(line: Values) -> float | None:
        arm = arms.get((*line, *rest))
        if arm is None or arm not in best.values or top == worst:
            return None
        return round(float(best.values[arm] - worst) / (top - worst), 2)

    return shade


def _notes(best: BestInRow, unit: str | None) -> Iterator[str]:
    if unit is not None:
        yield f"{unit}, {best.better} is better."
    if best.best is None:
        yield f"No answer: {best.withheld}."
    elif best.withheld is not None:
        yield f"Estimates only: {best.withheld}."
    elif best.is_computed:
        yield f"{BEST}: the best; {POSSIBLY_BEST}: the same value. The values are computed."
    else:
        yield (
            f"{BEST}: the best measured; {POSSIBLY_BEST}: not distinguishable from the best. With "
            f"{100 * (best.level or 0.0):g} % confidence, the true best setting is among the "
            "settings so marked. A value is the baseline's median times the setting's ratio to the "
            "baseline, estimated within blocks."
        )
    for arm, blocks in best.dropped.items():
        yield f"{arm}: dropped after {count_text(blocks, 'block')}: another setting was better."
    for arm, reason in best.excluded.items():
        yield f"{arm}: no valid result: {reason}."


@dataclass(frozen=True)
class SettingCurve:
    """A row's values over one numeric option. ``name`` gives the other options' fixed values."""

    name: str
    points: tuple[tuple[float, float], ...]


def setting_curves(cell: Cell, best: BestInRow) -> list[tuple[SweptOption, list[SettingCurve]]]:
    """Return the curves over every numeric option that has three or more values.

    An option with more than six curves is left out.
    """
    curves, options = [], swept_options(cell)
    for option in options:
        if option.is_number and len(option.values) >= MIN_POINTS:
            others = [other for other in options if other is not option]
            lines = list(_curves_over(cell, best, option, others))
            curves += [(option, lines)] if 0 < len(lines) <= MAX_CURVES else []
    return curves


def _curves_over(
    cell: Cell, best: BestInRow, option: SweptOption, others: Sequence[SweptOption]
) -> Iterator[SettingCurve]:
    arms = settings_of(cell, [*others, option])
    for fixed in dict.fromkeys(values[:-1] for values in _sorted(arms, others)):
        points = [
            (float(value), scaled(best.values[arm], best.unit))
            for value in option.values
            if (arm := arms.get((*fixed, value), "")) in best.values
        ]
        pairs = zip(others, fixed, strict=True)
        name = ", ".join(f"{other.name}={override_text(value)}" for other, value in pairs)
        if len(points) >= MIN_POINTS:
            yield SettingCurve(name, tuple(points))


def curves_chart(best: BestInRow, option: SweptOption, curves: Sequence[SettingCurve]) -> Chart:
    """Return curves as a chart. The option's values are evenly spaced."""
    place = {float(value): float(i) for i, value in enumerate(option.values)}
    texts = {float(value): override_text(value) for value in option.values}
    chart = Chart(
        title=f"{best.metric} by {option.name}",
        x=(-0.3, len(place) - 0.7),
        y=padded_range([y for curve in curves for _, y in curve.points]),
        x_label=option.name,
        y_label=f"{best.metric} ({unit_name(best.unit)})",
        x_ticks=tuple((i, texts[value]) for value, i in place.items()),
    )
    for index, curve in enumerate(curves):
        points, (style, mark) = [(place[x], y) for x, y in curve.points], page_style_of(index)
        chart.line(points, f"line {style}")
        for (x, _), (at, y) in zip(curve.points, points, strict=True):
            where = f"{curve.name}, " if curve.name else ""
            tip = f"{where}{option.name}={texts[x]}: {significant_text(y, 4)}"
            chart.dot(at, y, style, mark, tip)
    return chart


@section("Curves")
def curves_section(report: CellSource) -> Iterator[ReportPart]:
    """Show a sweep's values over each numeric option, for every primary row."""
    cell = report.cell
    for best in cell.best or ():
        name = cell.row_name(best)
        for option, curves in setting_curves(cell, best):
            title = f"{name} by {option.name}"
            keys = tuple((c.name, f"line arm{i}", "line") for i, c in enumerate(curves) if c.name)
            chart = curves_chart(best, option, curves)
            yield (part := ChartPart(chart, f"{title}, evenly spaced", keys))
            stem = cell.stem(f"{slug(name)}-by-{slug(option.name)}")
            yield PictureFile(stem, title, [part])
