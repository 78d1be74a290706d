"""The table of results in the article's layout: ``batch | kernel | baseline | arm | delta``.

Extended by interval, p, verdict and the published delta. Several arms: one line per arm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.analysis.number_format import interval_text, p_text, percent_text, unit_name, value_text
from labkit.analysis.rendering.published_table import published_source
from labkit.analysis.rendering.tables import Column, Table
from labkit.analysis.verdict_sentences import control_name, level_text, relabellings_text
from labkit.records import Record, parse_run_name

Json = Mapping[str, Any]
KERNELS = {"decode": "per-token", "tiled": "tiled", "reference": "reference"}
WIDE, WIDER = 92, 110  # characters of a terminal below which a column is left out


@dataclass(frozen=True)
class ResultLine:
    """A line of a table of results: a row of the cell, an arm and its comparison.

    ``index``: the row's place in the cell. ``several``: whether the row has more lines.
    """

    index: int
    row: Json
    arm: str | None
    found: Json | None
    several: bool

    @property
    def verdict(self) -> str | None:
        """The verdict's word."""
        return None if self.found is None else str(self.found["verdict"])

    @property
    def brief(self) -> str:
        """The verdict as it stands beside the row's name where there is no room for columns."""
        if self.verdict is not None:
            word = verdict_text(self.verdict)
        else:
            word = "skipped" if self.arm is not None and self.row["skipped"] is not None else ""
        return f"{self.arm}: {word}" if word and self.several else word

    @property
    def comparison(self) -> Json | None:
        """The arm against the baseline; None where nothing was compared."""
        return self.found if self.row["skipped"] is None else None


def _compared(form: Callable[..., str], *keys: str) -> Callable[[ResultLine], str]:
    """Return a column's value: numbers of the comparison, written; nothing without one."""

    def value(line: ResultLine) -> str:
        found = line.comparison
        return "" if found is None else form(*(found[key] for key in keys))

    return value


def kernels(records: Sequence[Record]) -> dict[str, str]:
    """Name the kernel that ran each case, where the records say it."""
    found: dict[str, str] = {}
    for record in records:
        for case in record.cases:
            kernel = case.notes.get("kernel")
            if kernel is not None:
                found.setdefault(case.case, KERNELS.get(str(kernel), str(kernel)))
    return found


def verdict_text(word: str) -> str:
    """Write a verdict's word for people."""
    return word.replace("_", "-")


def shown_arms(cell: Json) -> list[str]:
    """Name the arms whose lines are shown: not the baseline; the control only if alone."""
    control = control_name(cell)
    arms = [a["name"] for a in cell["arms"] if a["role"] == "arm"]
    return arms or ([control] if control is not None else [])


def results_table(
    cell: Json, records: Sequence[Record], primary: bool = True, anchor: str = ""
) -> Table[ResultLine]:
    """Lay out the primary rows of a cell (or, with ``primary=False``, all the others).

    ``anchor``: of the cell on the page; numbers lead to the runs that they are made of.
    """
    rows = [(i, row) for i, row in enumerate(cell["rows"]) if row["primary"] is primary]
    arms, ran = shown_arms(cell), kernels(records)
    published = _published(cell, [row for _, row in rows], arms)
    units = {row["unit"] for _, row in rows if row["metric"] is not None}
    unit = f" ({unit_name(units.pop())})" if len(units) == 1 else ""
    columns = [_named([row for _, row in rows], unit)]
    if ran:
        columns.append(
            Column(
                "kernel",
                lambda line: ran.get(line.row["case"], ""),
                number=False,
                least_width=WIDER if len(arms) > 1 else WIDE,
                once=True,
            )
        )

    def runs(line: ResultLine) -> str:
        return f"#{anchor}r{line.index}"

    columns += _arm_columns(cell, arms, unit, runs) if arms else [_alone(cell, unit, runs)]
    if published and arms:
        columns.append(
            Column(
                "published",
                lambda line: _published_delta(published, line.row, line.arm),
                short="publ.\n%",
                least_width=WIDE,
            )
        )
    shown: list[str | None] = [*arms] or [None]
    lines = [
        ResultLine(i, row, arm, {c["arm"]: c for c in row["comparisons"]}.get(arm), len(arms) > 1)
        for i, row in rows
        for arm in shown
    ]
    notes = [*_notes(cell, published), *_states(records)]
    return Table(tuple(columns), tuple(lines), tuple(notes), wide=True)


def _named(rows: Sequence[Json], unit: str) -> Column[ResultLine]:
    """Name a row by its case, its metric, or both where there are several metrics."""
    requests = all(row["case"] == "all" for row in rows)
    mixed = not requests and len({row["metric"] for row in rows if row["metric"]}) > 1

    def name(line: ResultLine) -> str:
        row = line.row
        text = str(row["metric"] if requests and row["metric"] else row["case"])
        if mixed and row["metric"]:
            text += f": {row['metric']}"
        return f"{text} ({unit_name(row['unit'])})" if row["unit"] == "bytes" and not unit else text

    return Column("metric" if requests else "batch", name, number=False, once=True)


def _alone(cell: Json, unit: str, link: Callable[[ResultLine], str]) -> Column[ResultLine]:
    """Show the baseline where nothing is compared with it."""
    baseline = cell["arms"][0]["name"]

    def value(line: ResultLine) -> str:
        row = line.row
        return row["skipped"] or value_text(row["arms"][baseline]["median"], row["unit"])

    return Column(f"{baseline}{unit}", value, once=True, link=link)


def _arm_columns(
    cell: Json, arms: Sequence[str], unit: str, link: Callable[[ResultLine], str]
) -> Iterator[Column[ResultLine]]:
    baseline, level, died = cell["arms"][0]["name"], level_text(cell), failure_outcomes(cell)

    def measured(line: ResultLine, arm: str | None) -> str:
        if line.row["skipped"] is not None:
            return ""
        middle = line.row["arms"][arm]["median"]
        return (
            died[str(arm)]
            if middle is None and arm in died
            else value_text(middle, line.row["unit"])
        )

    def decided(line: ResultLine) -> str:
        if line.row["skipped"] is not None:
            return f"skipped: {line.row['skipped']}"
        return "" if line.verdict is None else verdict_text(line.verdict)

    if len(arms) > 1:
        yield Column("arm", lambda line: line.arm, number=False)
    yield Column(f"{baseline}{unit}", lambda line: measured(line, baseline), once=True, link=link)
    own = arms[0] if len(arms) == 1 else "arm"
    yield Column(f"{own}{unit}", lambda line: measured(line, line.arm), link=link)
    yield Column("delta", _compared(percent_text, "effect_pct"), short="delta\n%", link=link)
    yield Column(
        f"adjusted {level} CI (%)",
        _compared(interval_text, "ci_low_pct", "ci_high_pct"),
        short=f"adjusted\n{level} CI, %",
        link=link,
    )
    yield Column(
        "adjusted p",
        _compared(p_text, "p_adjusted"),
        short="adjusted\np",
        least_width=WIDE,
        link=link,
    )
    yield Column("verdict", decided, number=False, verdict=True)


def _states(records: Sequence[Record]) -> list[str]:
    """Say what the caches held when a launch was timed, where the records know it."""
    found = {case.notes.get("state") for record in records for case in record.cases}
    said_of = {
        "hot": "hot caches: every launch follows one of the same arm on the same input",
        "cold": "cold caches: more memory than they hold is read before every launch",
    }
    known = [text for state, text in said_of.items() if state in found]
    return [f"Timed on {'; '.join(known)}."] if known else []


def failure_outcomes(cell: Json) -> dict[str, str]:
    """Map every arm with failed runs to the names of their outcomes."""
    found: dict[str, list[str]] = {}
    for failure in cell["failures"]:
        _, _, arm = parse_run_name(failure["run"])
        found.setdefault(arm, []).append(str(failure["outcome"]))
    return {arm: ", ".join(dict.fromkeys(outcomes)) for arm, outcomes in found.items()}


def _published(
    cell: Json, shown: Sequence[Json], arms: Sequence[str]
) -> dict[tuple[str, str], Json]:
    """Index by case and metric what was published of the rows and arms that are shown."""
    published = cell["published"]
    if not isinstance(published, Mapping):
        return {}
    rows = published.get("rows") or []
    index = {(str(r["case"]), str(r.get("metric", published.get("metric")))): r for r in rows}
    ours = {(row["case"], row["metric"]) for row in shown}
    return {
        key: row
        for key, row in index.items()
        if key in ours
        and any(arm in (row.get(k) or {}) for k in ("delta_pct", "p") for arm in arms)
    }


def _published_delta(published: Mapping[tuple[str, str], Json], row: Json, arm: str | None) -> str:
    found = published.get((row["case"], row["metric"]))
    if found is None:
        return ""
    delta = (found.get("delta_pct") or {}).get(arm)
    p, wins = ((found.get(key) or {}).get(arm) for key in ("p", "wins"))
    text = percent_text(float(delta)) if delta is not None else ""
    more = [f"p = {p}"] * (p is not None) + [f"{wins} wins"] * (wins is not None)
    return f"{text} ({', '.join(more)})" if more else text


def _notes(cell: Json, published: Any) -> list[str]:
    line = published_source(cell) if published else None
    notes, shown = [line] if line else [], shown_arms(cell)
    floors = {
        c["p_floor"]
        for row in cell["rows"]
        if row["primary"]
        for c in row["comparisons"]
        if c["p_floor"] and c["arm"] in shown
    }
    if floors:
        notes.append(
            f"Interval and p: one permutation test within blocks "
            f"({relabellings_text(cell)}), adjusted "
            f"over all rows and arms; smallest reachable p {p_text(min(floors))}. "
            "Delta: Hodges-Lehmann, above 0 where the metric is larger."
        )
    return notes
