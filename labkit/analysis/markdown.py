"""``report.md``: a study in Markdown: the answer, the article's table, what weakens it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from labkit.analysis.agreement import confirmation_sentence
from labkit.analysis.answer import answer
from labkit.analysis.cell import CellAnalysis
from labkit.analysis.disturbance import RULES, disturbed_blocks
from labkit.analysis.engine_table import engine_table
from labkit.analysis.kernel_tables import counters_table, queue_table, roofline_table
from labkit.analysis.numbers import count, interval_text, p_text, percent_text, slug, value_text
from labkit.analysis.plots import roofline_stem, timeline_stem
from labkit.analysis.sensitivity import CORRELATES, probe_correlations, second_analyses
from labkit.analysis.sentences import control_sentence, real_arms, row_name, sentences
from labkit.analysis.table import (
    Table,
    agreement_table,
    cell_table,
    host_table,
    output_unit,
    published_table,
)
from labkit.analysis.terminal import gates_line
from labkit.analysis.timeline import timelines
from labkit.analysis.weakness import weaknesses
from labkit.experiment.record import Record

Json = Mapping[str, Any]
SECONDS = "Of each row alone, not adjusted. The verdicts above do not use these numbers."


def markdown_table(table: Table) -> str:
    """Write a table in Markdown (GitHub's pipes)."""
    head = [column.name for column in table.columns]
    rule = ["---:" if column.number else "---" for column in table.columns]
    lines = [head, rule, *(line.cells for line in table.lines)]
    return "\n".join("| " + " | ".join(_escaped(c) for c in cells) + " |" for cells in lines)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def study_markdown(study: Json, analyses: Sequence[CellAnalysis]) -> str:
    """Write the whole report; pictures are linked relative to the study."""
    parts = [f"# {study['study']}", ""]
    if len(analyses) > 1:
        parts += [_overview(study), ""]
    for analysis in analyses:
        parts += _cell(analysis)
    return "\n".join(parts).rstrip() + "\n"


def _overview(study: Json) -> str:
    lines = ["| cell | answer | gates |", "| --- | --- | --- |"]
    for cell in study["cells"]:
        gates = ", ".join(f"{name} {status}" for name, status in cell["gates"].items())
        lines.append(f"| {_escaped(cell['cell'])} | {_escaped(cell['answer'])} | {gates} |")
    return "\n".join(lines)


def _cell(analysis: CellAnalysis) -> list[str]:
    cell = analysis.json
    parts = [f"## {cell['question'] or cell['cell']}", "", f"**{answer(analysis)}**", ""]
    table = cell_table(cell, analysis.data.records)
    parts += [markdown_table(table), ""]
    for note in (*table.notes, control_sentence(cell), confirmation_sentence(analysis)):
        parts += [note, ""] if note else []
    weak = weaknesses(analysis)
    if weak:
        parts += ["What weakens this result:", "", *(f"- {line}" for line in weak), ""]
    return [*parts, *_details(analysis)]


def _measured(analysis: CellAnalysis) -> list[str]:
    """Say by which design and on which machine it was measured."""
    cell = analysis.json
    design = cell["design"]
    return [
        "### How it was measured",
        "",
        f"Cell `{cell['cell']}`: {count(design['blocks'], 'block')} of "
        f"{count(design['runs_per_block'], 'run')} "
        f"of each arm, seed {design.get('seed')}, margin ±{design['margin_pct']:g} %, "
        f"alpha {design['alpha']:g}. Gates: {gates_line(cell)}.",
        "",
        environment_line(cell["environment"]),
        *cost_lines(analysis.data.records),
        "",
    ]


def _details(analysis: CellAnalysis) -> list[str]:
    cell = analysis.json
    parts = _measured(analysis)
    rows = sentences(cell, analysis.data.arms[0].identity)
    parts += ["### Row by row", "", *(f"- {line}" for line in rows), ""] if rows else []
    records = analysis.data.records
    secondary = cell_table(cell, records, primary=False)
    if secondary.lines:
        parts += ["### Other metrics", "", markdown_table(secondary), ""]
    for title, table in (
        ("What a dispatch did", counters_table(cell, records)),
        ("What the engine counted", engine_table(cell)),
        ("Published by others", published_table(cell)),
        ("Launches in a queue", queue_table(cell, records)),
        ("Host time to build the maps", host_table(cell, records)),
        ("Roofline", roofline_table(cell, records)),
        ("Outputs", agreement_table(analysis.identity, output_unit(cell))),
    ):
        if table is not None:
            notes = [part for note in table.notes for part in (note, "")]
            parts += [f"### {title}", "", markdown_table(table), "", *notes]
        if table is not None and title == "Roofline":
            parts += [f"![Roofline](plots/{roofline_stem(cell)}.png)", ""]
    parts += _spread(cell)
    parts += _seconds(analysis)
    stem = slug(cell["cell"])
    parts += ["### Runs in order", ""]
    for case in dict.fromkeys(row["case"] for row in cell["rows"] if row["skipped"] is None):
        parts += [f"![{case}](plots/{stem}--{slug(case)}.png)", ""]
    shown = timelines(records, real_arms(cell))
    parts += ["### Memory over time", ""] if shown else []
    for timeline in shown:
        path = f"plots/{timeline_stem(cell, timeline.arm)}.png"
        parts += [f"![{timeline.caption()}]({path})", "", f"{timeline.caption()}.", ""]
    if cell["failures"]:
        parts += ["### Failed runs", "", "| run | outcome | detail |", "| --- | --- | --- |"]
        parts += [
            f"| {f['run']} | {f['outcome']} | {_escaped(str(f['detail']))} |"
            for f in cell["failures"]
        ]
        parts += [""]
    return parts


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


def _spread(cell: Json) -> list[str]:
    """Table of every arm's median, quartiles, smallest visible effect and pairwise wins."""
    parts = ["### Spread", "", "| row | arm | median | q1 | q3 | runs | wins | sees at best |"]
    parts += ["| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for row in cell["rows"]:
        if row["skipped"] is not None or not row["primary"]:
            continue
        by_arm = {c["arm"]: c for c in row["comparisons"]}
        for arm, values in row["arms"].items():
            found = by_arm.get(arm, {})
            wins = f"{found['wins']} of {found['blocks']}" if found.get("wins") is not None else ""
            sees = f"{found['mde_pct']:.1f}%" if found.get("mde_pct") is not None else ""
            numbers = [value_text(values[k], row["unit"]) for k in ("median", "q1", "q3")]
            parts.append(
                f"| {row_name(row)} | {arm} | {' | '.join(numbers)} | {values['n']} "
                f"| {wins} | {sees} |"
            )
    return [*parts, ""]


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


def _seconds(analysis: CellAnalysis) -> list[str]:
    lines, found = noise_lines(analysis), second_analyses(analysis)
    if not found:
        return ["### The machine's noise", "", *lines, ""] if lines else []
    parts = ["### The same with the machine's noise taken out", ""]
    parts += [*lines, ""]
    parts += ["| row | arm | analysis | delta | CI alone (%) | p alone | blocks |"]
    parts += ["| --- | --- | --- | ---: | ---: | ---: | ---: |"]
    for second in found:
        row = analysis.json["rows"][second.row]
        low, high = second.ci_pct or (None, None)
        parts.append(
            f"| {row_name(row)} | {second.arm} | {second.how} | {percent_text(second.effect_pct)} "
            f"| {interval_text(low, high)} | {p_text(second.p)} | {second.blocks} |"
        )
    return [*parts, "", SECONDS, ""]
