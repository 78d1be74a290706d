"""The table of a cell in the article's layout, as text cells that every form prints.

One arm besides the baseline: ``batch | kernel | baseline | arm | delta``, extended by
interval, p, verdict and the published delta. Several arms: one line per arm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from labkit.analysis.identity import IdentityReport
from labkit.analysis.numbers import (
    interval_text,
    p_text,
    percent_text,
    unit_name,
    value_text,
)
from labkit.analysis.sentences import control_name, level_text, relabelled
from labkit.experiment.record import Record, parse_run_name

Json = Mapping[str, Any]
KERNELS = {"decode": "per-token", "tiled": "tiled", "reference": "reference"}


@dataclass(frozen=True)
class Column:
    """A column: its heading and whether it holds numbers.

    ``extra``: a narrow terminal does without. ``row``: the same in all lines of a row.
    """

    name: str
    number: bool = True
    extra: bool = False
    row: bool = False


@dataclass(frozen=True)
class Line:
    """A line of text cells; ``row`` and ``arm`` say whose it is, ``verdict`` its word."""

    cells: tuple[str, ...]
    row: int
    arm: str | None
    verdict: str | None

    @property
    def brief(self) -> str:
        """The verdict as it stands beside the row's name where there is no room for columns."""
        if self.verdict is None:
            return "skipped" if any(c.startswith("skipped") for c in self.cells) else ""
        return verdict_text(self.verdict)


@dataclass(frozen=True)
class Table:
    """Columns, lines and notes below (the source of published numbers, units)."""

    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    notes: tuple[str, ...]


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


def cell_table(cell: Json, records: Sequence[Record], primary: bool = True) -> Table:
    """Lay out the primary rows of a cell (or, with ``primary=False``, all the others)."""
    rows = [(i, row) for i, row in enumerate(cell["rows"]) if row["primary"] is primary]
    arms, ran = shown_arms(cell), kernels(records)
    published = _published(cell, [row for _, row in rows], arms)
    requests = all(row["case"] == "all" for _, row in rows)
    mixed = not requests and len({row["metric"] for _, row in rows if row["metric"]}) > 1
    units = {row["unit"] for _, row in rows if row["metric"] is not None}
    unit = f" ({unit_name(units.pop())})" if len(units) == 1 else ""
    columns = [Column("metric" if requests else "batch", number=False, row=True)]
    columns += [Column("kernel", number=False, extra=True, row=True)] if ran else []
    columns += _arm_columns(cell, arms, unit, bool(published))
    lines, died = [], deaths(cell)
    for index, row in rows:
        by_arm = {c["arm"]: c for c in row["comparisons"]}
        name = row["metric"] if requests and row["metric"] else row["case"]
        if mixed and row["metric"]:
            name += f": {row['metric']}"
        if row["unit"] == "bytes" and not unit:
            name += f" ({unit_name(row['unit'])})"
        start = (name, ran.get(row["case"], "")) if ran else (name,)
        for arm in arms:
            cells = [arm] if len(arms) > 1 else []
            cells += _numbers(row, cell["arms"][0]["name"], arm, by_arm.get(arm), died)
            cells += [_published_delta(published, row, arm)] if published else []
            word = by_arm[arm]["verdict"] if arm in by_arm else None
            lines.append(Line((*start, *cells), index, arm, word))
        if not arms:
            median = row["arms"][cell["arms"][0]["name"]]["median"]
            text = row["skipped"] or value_text(median, row["unit"])
            lines.append(Line((*start, text), index, None, None))
    notes = [*_notes(cell, published), *_states(records)]
    return Table(tuple(columns), tuple(lines), tuple(notes))


def _states(records: Sequence[Record]) -> list[str]:
    """Say what the caches held when a launch was timed, where the records know it."""
    found = {case.notes.get("state") for record in records for case in record.cases}
    said = {
        "hot": "hot caches: every launch follows one of the same arm on the same input",
        "cold": "cold caches: more memory than they hold is read before every launch",
    }
    known = [text for state, text in said.items() if state in found]
    return [f"Timed on {'; '.join(known)}."] if known else []


def _arm_columns(cell: Json, arms: Sequence[str], unit: str, published: bool) -> list[Column]:
    baseline = Column(f"{cell['arms'][0]['name']}{unit}", row=True)
    if not arms:
        return [baseline]
    return [
        *([] if len(arms) == 1 else [Column("arm", number=False)]),
        baseline,
        Column(f"{arms[0] if len(arms) == 1 else 'arm'}{unit}"),
        Column("delta"),
        Column(f"adjusted {level_text(cell)} CI (%)"),
        Column("adjusted p", extra=True),
        Column("verdict", number=False),
        *([Column("published", extra=True)] if published else []),
    ]


def deaths(cell: Json) -> dict[str, str]:
    """Map every arm with failed runs to the names of their outcomes."""
    found: dict[str, list[str]] = {}
    for failure in cell["failures"]:
        _, _, arm = parse_run_name(failure["run"])
        found.setdefault(arm, []).append(str(failure["outcome"]))
    return {arm: ", ".join(dict.fromkeys(outcomes)) for arm, outcomes in found.items()}


def _numbers(
    row: Json, baseline: str, arm: str, found: Json | None, died: Mapping[str, str]
) -> list[str]:
    if row["skipped"] is not None:
        return ["", "", "", "", "", f"skipped: {row['skipped']}"]
    values = [(name, row["arms"][name]["median"]) for name in (baseline, arm)]
    medians = [
        died[name] if median is None and name in died else value_text(median, row["unit"])
        for name, median in values
    ]
    if found is None:
        return [*medians, "", "", "", ""]
    return [
        *medians,
        percent_text(found["effect_pct"]),
        interval_text(found["ci_low_pct"], found["ci_high_pct"]),
        p_text(found["p_adjusted"]),
        verdict_text(found["verdict"]),
    ]


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


def _published_delta(published: Mapping[tuple[str, str], Json], row: Json, arm: str) -> str:
    found = published.get((row["case"], row["metric"]))
    if found is None:
        return ""
    delta = (found.get("delta_pct") or {}).get(arm)
    p = (found.get("p") or {}).get(arm)
    text = percent_text(float(delta)) if delta is not None else ""
    return f"{text} (p = {p})" if p is not None else text


def published_table(cell: Json) -> Table | None:
    """Lay out the published numbers as they were published; None where there are none.

    Of cases that this cell has, whatever was measured of them.
    """
    published, cases = cell["published"], {row["case"] for row in cell["rows"]}
    given_rows = published.get("rows") or [] if isinstance(published, Mapping) else []
    rows = [row for row in given_rows if row["case"] in cases]
    arms = list(dict.fromkeys(arm for row in rows for arm in row.get("arms") or {}))
    if not rows or not arms:
        return None
    units = [unit_name(row.get("unit", published.get("unit"))) for row in rows]
    unit = f" ({units[0]})" if units[0] and len(set(units)) == 1 else ""
    columns = [Column("batch", number=False), *(Column(f"{arm}{unit}") for arm in arms)]
    deltas = list(dict.fromkeys(arm for row in rows for arm in row.get("delta_pct") or {}))
    columns += [Column("delta" if len(deltas) == 1 else f"delta, {arm}") for arm in deltas]
    lines = []
    for index, (row, own) in enumerate(zip(rows, units, strict=True)):
        given, delta = row.get("arms") or {}, row.get("delta_pct") or {}
        name = str(row["case"])
        if not unit:
            name += f": {row.get('metric', published.get('metric'))} ({own})"
        values = [f"{given[arm]:,}" if arm in given else "" for arm in arms]
        values += [percent_text(float(delta[arm])) if arm in delta else "" for arm in deltas]
        lines.append(Line((name, *values), index, None, None))
    return Table(tuple(columns), tuple(lines), (published_line(cell) or "",))


def host_table(cell: Json, records: Sequence[Record]) -> Table | None:
    """Lay out the host's time to build the maps of a step, median per arm (us), if noted.

    Records that note what the whole plan of a step takes have a column for that, too.
    """
    found: dict[str, dict[tuple[str, str], list[float]]] = {}
    for record in records:
        for case in record.cases:
            for name in ("map_us", "plan_us"):
                if isinstance(case.notes.get(name), int | float):
                    times = found.setdefault(case.case, {}).setdefault((record.arm, name), [])
                    times.append(float(case.notes[name]))
    if not found:
        return None
    planned = any(name == "plan_us" for times in found.values() for _, name in times)
    words = {"map_us": " maps", "plan_us": " plan"} if planned else {"map_us": ""}
    shown = [(arm["name"], name) for arm in cell["arms"] for name in words]
    columns = [Column("batch", number=False)]
    columns += [Column(f"{arm}{words[name]} (µs)") for arm, name in shown]
    lines = [
        Line((case, *(value_text(median(t)) if (t := times.get(key)) else "" for key in shown)),
             index, None, None)
        for index, (case, times) in enumerate(found.items())
    ]  # fmt: skip
    notes = ["Once per step, before the first dispatch; not part of the dispatch times above."]
    if planned:
        notes.append(
            "Plan: all that the layers of a step share, its maps included: the batch is checked, "
            "its lengths, slots and tables are derived, and what a device reads is put there."
        )
    return Table(tuple(columns), tuple(lines), tuple(notes))


def output_unit(cell: Json) -> str:
    """Name what agreement is counted in: requests, or token rows of kernel cases."""
    return "requests" if all(row["case"] == "all" for row in cell["rows"]) else "token rows"


def agreement_table(report: IdentityReport, unit: str) -> Table | None:
    """Lay out how much of every arm's outputs agrees with the reference run's.

    ``unit``: what is counted, in the plural. None where nothing was compared.
    """
    found = [a for a in report.agreement if a.total]
    if not found:
        return None
    columns = (
        Column("arm", number=False),
        Column(f"{unit} that agree in every run"),
        Column("agreeing prefix"),
        Column("first difference", number=False),
    )
    lines = []
    for index, a in enumerate(found):
        first = report.first(a.arm)
        said = "none" if first is None else f"{first.case}: {first.where}; {first.run}"
        cells = (a.arm, f"{a.agree:,} of {a.total:,}", f"{a.prefix:.1%}", said)
        lines.append(Line(cells, index, a.arm, None))
    return Table(columns, tuple(lines), (f"Compared with run {report.reference}.",))


def published_line(cell: Json) -> str | None:
    """Say whose numbers stand in the published column."""
    published = cell["published"]
    if not isinstance(published, Mapping):
        return None
    return (
        f"published: {published.get('machine', 'machine not stated')}; "
        f"{published.get('source', 'source not stated')}. Theirs, never mixed with ours."
    )


def _notes(cell: Json, published: Any) -> list[str]:
    line = published_line(cell) if published else None
    primary = [row for row in cell["rows"] if row["primary"] and row["comparisons"]]
    notes = [line] if line else []
    shown = shown_arms(cell)
    floors = {
        c["p_floor"]
        for row in primary
        for c in row["comparisons"]
        if c["p_floor"] and c["arm"] in shown
    }
    if floors:
        notes.append(
            f"Interval and p: one permutation test within blocks ({relabelled(cell)}), adjusted "
            f"over all rows and arms; smallest reachable p {p_text(min(floors))}. "
            "Delta: Hodges-Lehmann, above 0 where the metric is larger."
        )
    return notes
