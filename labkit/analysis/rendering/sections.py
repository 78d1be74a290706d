"""The report of a cell: what stands at its top, and the sections below.

A section has a title and parts: prose, tables, charts for the page, pictures for the
document. Which form shows which sections, and in what order, is :data:`DOCUMENT` and
:data:`PAGE`; a renderer writes the parts that its form can show.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from labkit.analysis.answer import answer
from labkit.analysis.caveats import weaknesses
from labkit.analysis.cell_analysis import CellAnalysis
from labkit.analysis.confirmation import confirmation_sentence
from labkit.analysis.disturbance import RULES, disturbed_blocks
from labkit.analysis.formatting import count
from labkit.analysis.rendering import charts, svg, tables, work_tables
from labkit.analysis.rendering.figures import case_names, case_stem, run_positions
from labkit.analysis.rendering.memory_timeline import (
    SERIES,
    Timeline,
    line_style,
    timeline_charts,
    timeline_stem,
    timelines,
)
from labkit.analysis.rendering.roofline import cases_line, points, roofline_chart, roofline_stem
from labkit.analysis.rendering.styles import arm_classes
from labkit.analysis.rendering.tables import Result, Table, gates_text
from labkit.analysis.sensitivity import CORRELATES, Second, probe_correlations, second_analyses
from labkit.analysis.sentences import control_sentence, real_arms, row_name, sentence, sentences
from labkit.records import Record

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Prose:
    """Lines of text."""

    lines: tuple[str, ...]
    kind: ClassVar[str] = "prose"


@dataclass(frozen=True)
class Bullets:
    """Lines of text, one below the other."""

    lines: tuple[str, ...]
    kind: ClassVar[str] = "bullets"


@dataclass(frozen=True)
class Tabular:
    """A table."""

    table: Table[Any]
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class Picture:
    """A picture's files by their stem, for the document."""

    stem: str
    caption: str
    kind: ClassVar[str] = "picture"


@dataclass(frozen=True)
class Caption:
    """What stands below a picture in the document; on the page it is the chart's own."""

    lines: tuple[str, ...]
    kind: ClassVar[str] = "caption"


@dataclass(frozen=True)
class Key:
    """Every arm's name and its mark, an ``<svg>``, for the page."""

    marks: tuple[tuple[str, str], ...]
    kind: ClassVar[str] = "key"


@dataclass(frozen=True)
class Chart:
    """A chart, an ``<svg>``, for the page."""

    drawn: str
    caption: str = ""
    kind: ClassVar[str] = "chart"


@dataclass(frozen=True)
class Memory:
    """A timeline's charts with the keys of its lines and phases, for the page."""

    timeline: Timeline
    kind: ClassVar[str] = "memory"

    @property
    def charts(self) -> tuple[str, str]:
        """Memory, and the requests' phases."""
        return timeline_charts(self.timeline)

    @property
    def lines(self) -> list[tuple[str, str]]:
        """Every line's name and style."""
        return [(SERIES[name], line_style(name)) for name in self.timeline.memory]


@dataclass(frozen=True)
class Runs:
    """Every row's sentences and the runs of its numbers, for the page."""

    rows: Sequence[Json]
    said: Sequence[Sequence[str]]
    kind: ClassVar[str] = "runs"


Part = Prose | Bullets | Tabular | Picture | Caption | Key | Chart | Memory | Runs


@dataclass(frozen=True)
class Section:
    """A title and what stands below it."""

    title: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class CellReport:
    """What a cell's report says, whatever its form.

    ``folder``: before the links to records. ``anchor``: the cell's on the page.
    """

    analysis: CellAnalysis
    folder: str = ""
    anchor: str = ""

    @property
    def cell(self) -> Json:
        """The cell's ``cell.json``."""
        return self.analysis.json

    @property
    def records(self) -> Sequence[Record]:
        """The cell's records."""
        return self.analysis.data.records

    @property
    def title(self) -> str:
        """The question; without one the cell's name."""
        return str(self.cell["question"] or self.cell["cell"])

    @cached_property
    def answer(self) -> str:
        """The answer, in one sentence."""
        return answer(self.analysis)

    @cached_property
    def results(self) -> Table[Result]:
        """The primary rows."""
        return tables.results_table(self.cell, self.records, anchor=self.anchor)

    @cached_property
    def secondary(self) -> Table[Result]:
        """All other rows; no lines where there are none."""
        rest = tables.results_table(self.cell, self.records, primary=False, anchor=self.anchor)
        return replace(rest, notes=())

    @cached_property
    def notes(self) -> list[str]:
        """What stands below the results."""
        more = control_sentence(self.cell), confirmation_sentence(self.analysis)
        return [*self.results.notes, *filter(None, more)]

    @cached_property
    def caveats(self) -> list[str]:
        """What weakens the result."""
        return weaknesses(self.analysis)

    @property
    def gates(self) -> str:
        """The gates on one line."""
        return gates_text({name: gate["status"] for name, gate in self.cell["gates"].items()})

    @cached_property
    def machine(self) -> list[str]:
        """On which machine the runs were made, and what they cost."""
        return [environment_line(self.cell["environment"]), *cost_lines(self.records)]

    @cached_property
    def key(self) -> Key:
        """Every arm's mark."""
        styles = arm_classes(self.cell).items()
        return Key(tuple((arm, svg.mark_svg(mark, style)) for arm, (style, mark) in styles))

    @cached_property
    def seconds(self) -> list[Second]:
        """The second analyses."""
        return second_analyses(self.analysis)

    @cached_property
    def noise(self) -> list[str]:
        """What the probe and the observer say of the machine."""
        return noise_lines(self.analysis)

    @cached_property
    def timelines(self) -> list[Timeline]:
        """Memory over time of the arms that noted it."""
        return timelines(self.records, real_arms(self.cell))

    def sections(self, form: Sequence[Builder]) -> Iterator[Section]:
        """Yield the sections of a form (:data:`DOCUMENT`, :data:`PAGE`) that have parts."""
        for build in form:
            section = build(self)
            if section.parts:
                yield section


Builder = Callable[[CellReport], Section]


def measured(report: CellReport) -> Section:
    """Say by which design and on which machine it was measured."""
    cell, design = report.cell, report.cell["design"]
    line = (
        f"Cell `{cell['cell']}`: {count(design['blocks'], 'block')} of "
        f"{count(design['runs_per_block'], 'run')} "
        f"of each arm, seed {design.get('seed')}, margin ±{design['margin_pct']:g} %, "
        f"alpha {design['alpha']:g}. Gates: {report.gates}."
    )
    return Section("How it was measured", (Prose((line,)), Prose(tuple(report.machine))))


def environment_line(environment: Json) -> str:
    """Say on which machine the runs were made, in one line."""
    memory = environment.get("memory_bytes")
    parts = [
        environment.get("cpu_model"),
        f"{environment['cores']} cores" if environment.get("cores") else None,
        f"{memory / 2**30:.0f} GiB" if memory else None,
        " ".join(str(environment[k]) for k in ("os", "os_release") if environment.get(k)) or None,
        environment.get("accelerator"),
        *(f"{name} {v}" for name, v in (environment.get("versions") or {}).items()),
    ]
    return "Machine: " + ", ".join(str(part) for part in parts if part) + "."


def cost_lines(records: Iterable[Record]) -> list[str]:
    """Say what a run cost beyond its measurement, and observing it, where that was recorded."""
    records = list(records)
    spent = [s for record in records if record.ok and (s := record.start_up_s) is not None]
    if not spent:
        return []
    cost = statistics.median(spent)
    lines = [
        f"A run cost {cost:.1f} s beyond its measurement (median of {count(len(spent), 'run')})."
    ]
    observed = [float(o["share"]) for r in records if (o := r.notes.get("observer") or {}) and r.ok]
    if observed:
        share = 100 * statistics.median(observed)
        lines.append(f"Observing took {share:.2f} % of one core beside it.")
    return lines


def row_by_row(report: CellReport) -> Section:
    """Say every primary row's verdicts in sentences."""
    lines = sentences(report.cell, report.analysis.data.arms[0].identity)
    return Section("Row by row", (Bullets(tuple(lines)),) if lines else ())


def effects(report: CellReport) -> Section:
    """Draw the effects with their intervals."""
    drawn = charts.forest(report.cell)
    return Section("Effects", (report.key, Chart(drawn)) if drawn is not None else ())


def other_metrics(report: CellReport) -> Section:
    """Lay out the rows that are not primary."""
    table = report.secondary
    return Section("Other metrics", (Tabular(table),) if table.lines else ())


def _tabular(title: str, table: Table[Any] | None) -> Section:
    return Section(title, (Tabular(table),) if table is not None and table.lines else ())


def dispatches(report: CellReport) -> Section:
    """Lay out what a dispatch did."""
    return _tabular("What a dispatch did", work_tables.dispatch_table(report.cell, report.records))


def counted(report: CellReport) -> Section:
    """Lay out what the engine counted."""
    return _tabular("What the engine counted", work_tables.engine_table(report.cell))


def published(report: CellReport) -> Section:
    """Lay out what others published."""
    return _tabular("Published by others", tables.published_table(report.cell))


def host_time(report: CellReport) -> Section:
    """Lay out the host's time to build maps."""
    return _tabular("Host time to build the maps", tables.host_table(report.cell, report.records))


def roofline(report: CellReport) -> Section:
    """Show how near kernels come to the machine's limits."""
    cell, title = report.cell, "Roofline"
    table = work_tables.roofline_table(cell, report.records)
    if table is None:
        return Section(title, ())
    found = points(cell, report.records)
    drawn = Chart(roofline_chart(cell, found), cases_line(found))
    return Section(title, (report.key, drawn, Tabular(table), Picture(roofline_stem(cell), title)))


def outputs(report: CellReport) -> Section:
    """Lay out how far the outputs agree."""
    unit = tables.output_unit(report.cell)
    return _tabular("Outputs", tables.agreement_table(report.analysis.identity, unit))


def spread(report: CellReport) -> Section:
    """Lay out the arms' quartiles."""
    return Section("Spread", (Tabular(tables.spread_table(report.cell)),))


def latencies(report: CellReport) -> Section:
    """Draw the latencies' distributions."""
    beyond = "all requests of all runs; the slowest 0.5 % beyond the right edge"
    drawn = [
        Chart(chart, f"{name}, {beyond}") for name, chart in charts.latency_cdfs(report.analysis)
    ]
    return Section("Latencies", (report.key, *drawn) if drawn else ())


def runs_in_order(report: CellReport) -> Section:
    """Show every run in the order it was run."""
    cell, order = report.cell, run_positions(report.cell)
    pictures = [Picture(case_stem(cell, case), case) for case in case_names(cell)]
    drawn = [
        Chart(chart, f"{row_name(row)}; lines are medians, dots link to records")
        for row in cell["rows"]
        if row["primary"] and (chart := charts.runs_in_order(cell, row, order, report.folder))
    ]
    return Section("Runs in order", (report.key, *drawn, *pictures))


def memory(report: CellReport) -> Section:
    """Show memory over time and the requests' phases."""
    parts: list[Part] = []
    for timeline in report.timelines:
        caption, stem = timeline.caption(), timeline_stem(report.cell, timeline.arm)
        parts += [Memory(timeline), Picture(stem, caption), Caption((f"{caption}.",))]
    return Section("Memory over time", tuple(parts))


def drift(report: CellReport) -> Section:
    """Draw what arms leave over of the metric beside the probe."""
    caption = (
        "What arms leave over of the metric (solid, mean of the primary rows) and the "
        "arm-blind probe of the machine (dashed)"
    )
    drawn = charts.drift(report.analysis)
    return Section("Drift and probe", (Chart(drawn, caption),) if drawn is not None else ())


def noise(report: CellReport) -> Section:
    """Say what the machine's noise was."""
    lines = report.noise
    return Section("The machine's noise", (Prose(tuple(lines)),) if lines else ())


def without_noise(report: CellReport) -> Section:
    """Lay out the same with the machine's noise taken out."""
    return _tabular(
        "The same with the machine's noise taken out",
        tables.seconds_table(report.cell, report.seconds),
    )


def noise_and_without(report: CellReport) -> Section:
    """Say what the machine's noise was, and lay out the same without it, as one section."""
    noisy, without = noise(report), without_noise(report)
    return replace(without, parts=(*noisy.parts, *without.parts)) if without.parts else noisy


def failed_runs(report: CellReport) -> Section:
    """Name the failed runs."""
    return _tabular("Failed runs", tables.failures_table(report.cell, report.folder))


def numbers_and_runs(report: CellReport) -> Section:
    """Lead from every number to its runs."""
    cell, claim = report.cell, report.analysis.data.arms[0].identity
    said = [[sentence(cell, row, c, claim) for c in row["comparisons"]] for row in cell["rows"]]
    return Section("Numbers and their runs", (Runs(cell["rows"], said),))


def noise_lines(analysis: CellAnalysis) -> list[str]:
    """Say how the metric correlates with the probe, and which blocks were disturbed by what."""
    lines = []
    found = probe_correlations(analysis)
    if found:
        low, high = min(v for _, v in found), max(v for _, v in found)
        span = (
            f"{low:.2f}" if len(found) == 1 else f"{low:.2f} to {high:.2f} over {len(found)} rows"
        )
        lines.append(
            f"The metric's noise correlates with the arm-blind probe by {span}; "
            f"from {CORRELATES} on the probe's part is also taken out."
        )
    for block, reasons in sorted(disturbed_blocks(analysis.data.records).items()):
        more = f" and {len(reasons) - 2} more" if len(reasons) > 2 else ""
        lines.append(f"Block {block} was disturbed ({'; '.join(map(str, reasons[:2]))}{more}).")
    if len(lines) > 1:
        lines.append(f"A block is disturbed if in one of its runs {RULES}.")
    return lines


DOCUMENT: tuple[Builder, ...] = (
    measured,
    row_by_row,
    other_metrics,
    dispatches,
    counted,
    published,
    host_time,
    roofline,
    outputs,
    spread,
    noise_and_without,
    runs_in_order,
    memory,
    failed_runs,
)
PAGE: tuple[Builder, ...] = (
    effects,
    other_metrics,
    dispatches,
    counted,
    published,
    host_time,
    roofline,
    latencies,
    memory,
    runs_in_order,
    drift,
    noise,
    without_noise,
    outputs,
    failed_runs,
    numbers_and_runs,
)
