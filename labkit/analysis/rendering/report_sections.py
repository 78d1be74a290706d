"""The report of a cell: what stands at its top, and the sections below.

A section has a title and parts: prose, tables, charts for the page, pictures for the
document. Which form shows which sections, and in what order, is :data:`DOCUMENT` and
:data:`PAGE`; a renderer writes the parts that its form can show, and leaves out a section
without parts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from labkit.analysis.caveats import caveats
from labkit.analysis.cell_analysis import CellAnalysis
from labkit.analysis.disturbed_runs import RULES, disturbed_blocks
from labkit.analysis.headline import headline
from labkit.analysis.isolation_agreement import isolation_sentence
from labkit.analysis.number_format import count_text
from labkit.analysis.rendering import (
    counter_tables,
    html_charts,
    kv_utilization,
    server_tables,
    svg_elements,
    tables,
    video_tables,
)
from labkit.analysis.rendering.arm_styles import arm_classes
from labkit.analysis.rendering.attained_rates_table import attained_rates_table
from labkit.analysis.rendering.matplotlib_figures import case_names, case_stem, run_positions
from labkit.analysis.rendering.memory_timeline_chart import (
    SERIES,
    Timeline,
    line_style,
    timeline_charts,
    timeline_stem,
    timelines,
)
from labkit.analysis.rendering.published_table import (
    agreement_rows,
    host_rows,
    published_table,
    published_tables,
)
from labkit.analysis.rendering.request_outcome_tables import request_outcomes_table
from labkit.analysis.rendering.results_table import ResultLine, results_table
from labkit.analysis.rendering.roofline import (
    cases_line,
    roofline_chart,
    roofline_points,
    roofline_stem,
)
from labkit.analysis.rendering.tables import Table, gates_text
from labkit.analysis.sensitivity_analysis import (
    MIN_CORRELATION,
    SensitivityResult,
    probe_correlations,
    sensitivity_results,
)
from labkit.analysis.verdict_sentences import (
    control_sentence,
    real_arms,
    row_name,
    title,
    verdict_sentence,
    verdict_sentences,
)
from labkit.records import Record

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Prose:
    """Lines of text."""

    lines: Sequence[str]
    kind: ClassVar[str] = "prose"


@dataclass(frozen=True)
class Bullets:
    """Lines of text, one below the other."""

    lines: Sequence[str]
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

    lines: Sequence[str]
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
        """The question, without one the cell's name, and the scale."""
        return title(self.cell)

    @cached_property
    def answer(self) -> str:
        """The answer, in one sentence."""
        return headline(self.analysis)

    @cached_property
    def results(self) -> Table[ResultLine]:
        """The primary rows."""
        return results_table(self.cell, self.records, anchor=self.anchor)

    @cached_property
    def secondary(self) -> Table[ResultLine]:
        """All other rows; no lines where there are none."""
        rest = results_table(self.cell, self.records, primary=False, anchor=self.anchor)
        return replace(rest, notes=())

    @cached_property
    def notes(self) -> list[str]:
        """What stands below the results."""
        more = control_sentence(self.cell), isolation_sentence(self.analysis)
        return [*self.results.notes, *filter(None, more)]

    @cached_property
    def caveats(self) -> list[str]:
        """What weakens the result."""
        return caveats(self.analysis)

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
        return Key(
            tuple((arm, svg_elements.mark_svg(mark, style)) for arm, (style, mark) in styles)
        )

    @cached_property
    def seconds(self) -> list[SensitivityResult]:
        """The second analyses."""
        return sensitivity_results(self.analysis)

    @cached_property
    def videos(self) -> video_tables.Videos | None:
        """What the records say of clips; None where there are none."""
        return video_tables.videos(self.cell, self.records)

    @cached_property
    def noise(self) -> list[str]:
        """What the probe and the observer say of the machine."""
        return noise_lines(self.analysis)


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
        f"A run cost {cost:.1f} s beyond its measurement (median of "
        f"{count_text(len(spent), 'run')})."
    ]
    observed = [float(o["share"]) for r in records if (o := r.notes.get("observer") or {}) and r.ok]
    if observed:
        share = 100 * statistics.median(observed)
        lines.append(f"Observing took {share:.2f} % of one core beside it.")
    return lines


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
            f"from {MIN_CORRELATION} on the probe's part is also taken out."
        )
    for block, reasons in sorted(disturbed_blocks(analysis.data.records).items()):
        more = f" and {len(reasons) - 2} more" if len(reasons) > 2 else ""
        lines.append(f"Block {block} was disturbed ({'; '.join(map(str, reasons[:2]))}{more}).")
    if len(lines) > 1:
        lines.append(f"A block is disturbed if in one of its runs {RULES}.")
    return lines


@dataclass(frozen=True)
class Section:
    """A title, and what stands below it in a cell's report."""

    title: str
    parts: Callable[[CellReport], Sequence[Part]]


def _tables(table: Table[Any] | None) -> Sequence[Part]:
    return [Tabular(table)] if table is not None and table.lines else []


def _over_http(report: CellReport) -> Sequence[Part]:
    asked = server_tables.streams_table(report.cell, report.records)
    return [*_tables(asked), *_tables(server_tables.client_table(report.cell, report.records))]


def _measured(report: CellReport) -> Sequence[Part]:
    cell, design = report.cell, report.cell["design"]
    line = (
        f"Cell `{cell['cell']}`: {count_text(design['blocks'], 'block')} of "
        f"{count_text(design['runs_per_block'], 'run')} "
        f"of each arm, seed {design.get('seed')}, margin ±{design['margin_pct']:g} %, "
        f"alpha {design['alpha']:g}. Gates: {report.gates}."
    )
    return [Prose([line]), Prose(report.machine)]


def _row_by_row(report: CellReport) -> Sequence[Part]:
    lines = verdict_sentences(report.cell, report.analysis.data.arms[0].identity)
    return [Bullets(lines)] if lines else []


def _effects(report: CellReport) -> Sequence[Part]:
    drawn = html_charts.forest(report.cell)
    return [report.key, Chart(drawn)] if drawn is not None else []


def _roofline(report: CellReport) -> Sequence[Part]:
    cell, found = report.cell, roofline_points(report.cell, report.records)
    if not found:
        return []
    drawn = Chart(roofline_chart(cell, found), cases_line(found))
    table = Tabular(counter_tables.roofline_table(found))
    return [report.key, drawn, table, Picture(roofline_stem(cell), "Roofline")]


def _published(report: CellReport) -> Sequence[Part]:
    agreement = agreement_rows(report.analysis.identity.agreement)
    rows = published_table(report.cell, [*agreement, *host_rows(report.records)])
    parts = [*_tables(rows)]
    for name, table in published_tables(report.cell):
        parts += [Prose([f"{name}:"]), Tabular(table)]
    return parts


def _outputs(report: CellReport) -> Sequence[Part]:
    unit = tables.output_unit(report.cell)
    return _tables(tables.agreement_table(report.analysis.identity, unit))


def _latencies(report: CellReport) -> Sequence[Part]:
    beyond = "all requests of all runs; the slowest 0.5 % beyond the right edge"
    found = html_charts.latency_cdfs(report.analysis)
    drawn = [Chart(chart, f"{name}, {beyond}") for name, chart in found]
    return [report.key, *drawn] if drawn else []


def _runs_in_order(report: CellReport) -> Sequence[Part]:
    cell, order = report.cell, run_positions(report.cell)
    drawn = [
        Chart(chart, f"{row_name(row)}; lines are medians, dots link to records")
        for row in cell["rows"]
        if row["primary"] and (chart := html_charts.runs_in_order(cell, row, order, report.folder))
    ]
    pictures = [Picture(case_stem(cell, case), case) for case in case_names(cell)]
    return [report.key, *drawn, *pictures]


def _memory(report: CellReport) -> Iterator[Part]:
    for timeline in timelines(report.records, real_arms(report.cell)):
        caption = timeline.caption()
        yield Memory(timeline)
        yield Picture(timeline_stem(report.cell, timeline.arm), caption)
        yield Caption([f"{caption}."])


def _held(report: CellReport) -> Sequence[Part]:
    found = kv_utilization.kv_utilizations(report.cell)
    if not found:
        return []
    chart = Chart(kv_utilization.kv_utilization_chart(found), kv_utilization.CAPTION)
    return [chart, Picture(kv_utilization.kv_utilization_stem(report.cell), kv_utilization.CAPTION)]


def _drift(report: CellReport) -> Sequence[Part]:
    caption = (
        "What arms leave over of the metric (solid, mean of the primary rows) and the "
        "arm-blind probe of the machine (dashed)"
    )
    drawn = html_charts.drift(report.analysis)
    return [Chart(drawn, caption)] if drawn is not None else []


def _noise(report: CellReport) -> Sequence[Part]:
    return [Prose(report.noise)] if report.noise else []


def _without_noise(report: CellReport) -> Sequence[Part]:
    return _tables(tables.seconds_table(report.cell, report.seconds))


def _numbers(report: CellReport) -> Sequence[Part]:
    cell, claim = report.cell, report.analysis.data.arms[0].identity
    said = [
        [verdict_sentence(cell, row, c, claim) for c in row["comparisons"]] for row in cell["rows"]
    ]
    return [Runs(cell["rows"], said)]


def _decoding(report: CellReport) -> Sequence[Part]:
    return _tables(video_tables.decode_table(report.cell, report.videos))


def _evidence(report: CellReport) -> Sequence[Part]:
    found = video_tables.evidence_table(report.cell, report.videos, report.records)
    return [*_tables(found), *_tables(video_tables.answers_table(report.cell, report.records))]


def _picks(report: CellReport) -> Sequence[Part]:
    drawn = [
        Chart(chart, f"{clip}; the number of copies where a frame is picked more than once")
        for clip, chart in video_tables.picks_charts(report.cell, report.videos)
    ]
    stem = video_tables.picks_stem(report.cell)
    return [report.key, *drawn, Picture(stem, "Which frames are picked")] if drawn else []


NOISE, WITHOUT_NOISE = "The machine's noise", "The same with the machine's noise taken out"
OTHER = Section("Other metrics", lambda report: _tables(report.secondary))
WORK = (
    Section(
        "What a dispatch did",
        lambda report: _tables(counter_tables.dispatch_table(report.cell, report.records)),
    ),
    Section(
        "What the engine counted", lambda report: _tables(counter_tables.engine_table(report.cell))
    ),
    Section(
        "The ideal beside the achieved",
        lambda report: _tables(attained_rates_table(report.cell, report.records)),
    ),
    Section("KV memory held and used", _held),
    Section(
        "What became of the requests",
        lambda report: _tables(request_outcomes_table(report.cell, report.records)),
    ),
    Section("Over HTTP", lambda report: _over_http(report)),
    Section("Decoding, clip by clip", _decoding),
    Section(
        "What was read and decoded",
        lambda report: _tables(video_tables.work_table(report.cell, report.videos)),
    ),
    Section("Which frames are picked", _picks),
    Section("Visible evidence", _evidence),
    Section("Published by others", _published),
    Section(
        "Launches in a queue",
        lambda report: _tables(counter_tables.queue_table(report.cell, report.records)),
    ),
    Section(
        "Host time to build the maps",
        lambda report: _tables(tables.host_table(report.cell, report.records)),
    ),
    Section("Roofline", _roofline),
)
OUTPUTS = Section("Outputs", _outputs)
RUNS = Section("Runs in order", _runs_in_order)
MEMORY = Section("Memory over time", lambda report: list(_memory(report)))
FAILED = Section(
    "Failed runs", lambda report: _tables(tables.failures_table(report.cell, report.folder))
)
# In the document the noise stands above the numbers without it, under one title.
DOCUMENT = (
    Section("How it was measured", _measured),
    Section("Row by row", _row_by_row),
    OTHER,
    *WORK,
    OUTPUTS,
    Section("Spread", lambda report: [Tabular(tables.spread_table(report.cell))]),
    Section(NOISE, lambda report: [] if report.seconds else _noise(report)),
    Section(
        WITHOUT_NOISE,
        lambda report: [*_noise(report), *_without_noise(report)] if report.seconds else [],
    ),
    RUNS,
    MEMORY,
    FAILED,
)
PAGE = (
    Section("Effects", _effects),
    OTHER,
    *WORK,
    Section("Latencies", _latencies),
    MEMORY,
    RUNS,
    Section("Drift and probe", _drift),
    Section(NOISE, _noise),
    Section(WITHOUT_NOISE, _without_noise),
    OUTPUTS,
    FAILED,
    Section("Numbers and their runs", _numbers),
)
