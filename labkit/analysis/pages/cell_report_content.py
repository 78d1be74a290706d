"""The content of one cell's report, independent of its format."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from labkit.analysis.charts.html_interval_bars import card_bars
from labkit.analysis.comparison.cell_analysis import CellAnalysis
from labkit.analysis.comparison.client_lateness import lateness_errors
from labkit.analysis.document import svg_chart_renderer
from labkit.analysis.document.report_parts import CellSource
from labkit.analysis.document.svg_chart_renderer import arm_classes
from labkit.analysis.document.table_model import Table
from labkit.analysis.findings.cell_findings import plan_findings
from labkit.analysis.findings.full_answer import long_text
from labkit.analysis.findings.short_answer import short_answer
from labkit.analysis.findings.verdict_sentences import control_sentence, summary_verdict
from labkit.analysis.pages.study_overview import gates_text
from labkit.analysis.robustness.caveats import machine_states, ranked_caveats
from labkit.analysis.robustness.disturbed_runs import CLIENT_RULE, RULES, disturbed_blocks
from labkit.analysis.robustness.isolation_agreement import isolation_sentence
from labkit.analysis.robustness.sensitivity_analysis import (
    MIN_CORRELATION,
    probe_correlations,
    sensitivity_results,
)
from labkit.analysis.tables.results_table import ResultLine, results_table
from labkit.analysis.tables.sweep_tables import Values, settings_table
from labkit.analysis.text_format import machine_words
from labkit.config import count_text
from labkit.records import Arm, Record

Json = Mapping[str, Any]
MAX_SHOWN_DISTURBANCES = 2  # per block


@dataclass(frozen=True)
class CellReport(CellSource):
    """The content of a cell's report, each part computed once, when it is asked for."""

    findings = cached_property(lambda self: plan_findings(self.analysis))
    answer = cached_property(lambda self: long_text(self.findings))
    short_answer = cached_property(lambda self: short_answer(self.findings))
    verdict = cached_property(lambda self: summary_verdict(self.findings))
    caveats = cached_property(lambda self: ranked_caveats(self.analysis))
    bars = cached_property(lambda self: card_bars(self.analysis))
    machine_states = cached_property(lambda self: machine_states(self.analysis))
    sensitivity = cached_property(lambda self: sensitivity_results(self.analysis))
    noise = cached_property(lambda self: _noise_lines(self.analysis))

    @cached_property
    def settings(self) -> list[Table[Values]]:
        """The tables of a sweep's settings, one per primary row; empty if the cell is no sweep."""
        return [settings_table(self.cell, best) for best in self.cell.best or ()]

    @cached_property
    def results(self) -> Table[ResultLine]:
        return results_table(self.cell, self.records, anchor=self.anchor)

    @cached_property
    def secondary_results(self) -> Table[ResultLine]:
        """The results of the rows that are not primary. The table may have no lines."""
        results = results_table(self.cell, self.records, primary=False, anchor=self.anchor)
        return replace(results, notes=())

    @property
    def has_results(self) -> bool:
        """Whether anything was measured, so that there is a table or a chart."""
        return any(row.skipped is None for row in self.cell.rows)

    @cached_property
    def notes(self) -> list[str]:
        """The lines below the results.

        They are the table's notes, the A/A control's result, and whether the results in one
        process and in separate processes agree.
        """
        sentences = control_sentence(self.cell), isolation_sentence(self.analysis)
        return [*self.results.notes, *filter(None, sentences)]

    @property
    def gates(self) -> str:
        return gates_text({name: gate.status for name, gate in self.cell.gates.items()})

    @cached_property
    def machine(self) -> list[str]:
        """The machine that ran the cell, and the cost of a run outside its measurement."""
        imported = _import_lines(self.analysis.data.arms, self.records)
        return [environment_line(self.cell.environment), *imported, *_cost_lines(self.records)]

    @cached_property
    def legend(self) -> list[tuple[str, str]]:
        """The legend of the HTML page: every arm's name and mark (an ``<svg>`` element)."""
        styles = arm_classes(self.cell).items()
        return [(arm, svg_chart_renderer.mark_svg(mark, style)) for arm, (style, mark) in styles]


def environment_line(environment: Json) -> str:
    """Return a line with the machine's CPU, memory, OS and accelerator and the library versions."""
    system = " ".join(str(environment[k]) for k in ("os", "os_release") if environment.get(k))
    versions = (environment.get("versions") or {}).items()
    words = machine_words({**environment, "os": system}) + [f"{name} {v}" for name, v in versions]
    return f"Machine: {', '.join(words) or 'not known'}."


def _import_lines(arms: Iterable[Arm], records: Iterable[Record]) -> list[str]:
    """Return each arm's differing package versions; none if no arm has its own environment."""
    imported: dict[str, dict[str, str]] = {}
    for record in records if any(arm.environment for arm in arms) else ():
        if record.ok and record.role != "control" and record.arm not in imported:
            commit = record.environment.get("git")
            imported[record.arm] = {
                "Python": str(record.environment.get("python")),
                **(record.environment.get("versions") or {}),
                **({"labkit at": commit[:12]} if commit else {}),
            }
    names = dict.fromkeys(name for versions in imported.values() for name in versions)
    differing = [name for name in names if len({v.get(name) for v in imported.values()}) > 1]
    own = {arm: [n for n in differing if n in versions] for arm, versions in imported.items()}
    return [
        f"{arm} imported {', '.join(f'{name} {imported[arm][name]}' for name in own[arm])}."
        for arm in (own if differing else ())
    ]


def _cost_lines(records: Sequence[Record]) -> Iterator[str]:
    """Yield lines on a run's time outside its measurement and the observer's share, if known."""
    start_ups = [s for record in records if record.ok and (s := record.start_up_s) is not None]
    if not start_ups:
        return
    yield (
        f"A run spent {statistics.median(start_ups):.1f} s outside its measurement "
        f"(median of {count_text(len(start_ups), 'run')})."
    )
    notes = (r.known_notes.get("observer") for r in records if r.ok)
    shares = [float(note["share"]) for note in notes if note]
    if shares:
        yield f"Observing the run took {100 * statistics.median(shares):.2f} % of one core."


def _noise_lines(analysis: CellAnalysis) -> list[str]:
    """Return lines on the metric's correlation with the machine probe and on disturbed blocks."""
    lines = []
    if correlations := [value for _, value in probe_correlations(analysis)]:
        low, high = min(correlations), max(correlations)
        several = f" to {high:.2f} over {len(correlations)} rows" if len(correlations) > 1 else ""
        lines.append(
            f"The correlation of the metric's noise with the arm-blind probe is {low:.2f}{several};"
            f" from {MIN_CORRELATION} on, probe-adjusted results are shown as well."
        )
    for block, reasons in sorted(disturbed_blocks(analysis.data.records).items()):
        shown = "; ".join(text for text, _ in reasons[:MAX_SHOWN_DISTURBANCES])
        hidden = len(reasons) - MAX_SHOWN_DISTURBANCES
        more = f" and {hidden} more" if hidden > 0 else ""
        lines.append(f"Block {block} was disturbed ({shown}{more}).")
    if len(lines) > 1:
        lines.append(f"A block is disturbed if, in one of its runs, {RULES}.")
        if any(any(lateness_errors(record)) for record in analysis.data.records):
            lines.append(CLIENT_RULE)
    return lines
