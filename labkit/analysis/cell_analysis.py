"""One cell, analysed: everything in ``cell.json`` is derived from the records.

``cell.json`` is first written by the runner with what was declared (question, design,
published numbers); the analysis keeps that and computes the rest anew each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from labkit.analysis import gates, output_identity, stall_attribution
from labkit.analysis.arm_comparison import ArmComparison, DecisionCriteria, compare_arm
from labkit.analysis.first_divergence import StoredValues
from labkit.analysis.number_format import round_significant
from labkit.analysis.observations import MetricRow, build_rows, probe_values, summary
from labkit.analysis.statistics.interim_analysis import (
    InterimLook,
    alpha_at,
    parse_looks,
    withheld_reason,
)
from labkit.analysis.verdict import Verdict, judge
from labkit.config import Design
from labkit.records import (
    SCHEMA_VERSION,
    Arm,
    Record,
    RecordError,
    read_arms,
    read_cell,
    read_runs,
)


@dataclass(frozen=True)
class CellData:
    """What was read: the declared facts, the arms (baseline first) and the records."""

    dir: Path
    manifest: Mapping[str, Any]
    arms: tuple[Arm, ...]
    records: tuple[Record, ...]

    @cached_property
    def design(self) -> Mapping[str, Any]:
        """The design's declared facts."""
        design: Mapping[str, Any] = self.manifest["design"]
        return design

    @property
    def baseline(self) -> str:
        """The arm that the others are compared with."""
        return self.arms[0].name

    @property
    def control(self) -> str | None:
        """The A/A arm, or None."""
        return next((arm.name for arm in self.arms if arm.role == "control"), None)

    @property
    def asked(self) -> list[str]:
        """The arms that the question is about: neither the baseline nor the control."""
        return [arm.name for arm in self.arms if arm.role == "arm"]

    @property
    def emulated(self) -> list[str]:
        """The arms, but for the control, whose Metal kernels ran in the emulator."""
        return [
            arm.name
            for arm in self.arms
            if arm.role != "control"
            and arm.config.get("engine", {}).get("attention", {}).get("device") == "emulated"
        ]

    @cached_property
    def looks(self) -> tuple[InterimLook, ...]:
        """The predeclared looks; empty where there are none."""
        return parse_looks(self.design.get("looks"), float(self.design["alpha"]))

    @cached_property
    def criteria(self) -> DecisionCriteria:
        """Runs per block, margin, and the alpha that may be spent now."""
        runs, margin = int(self.design["runs_per_block"]), float(self.design["margin_pct"])
        if self.withheld_reason is not None:
            return DecisionCriteria(runs, 0.0, margin, self.withheld_reason)
        alpha = alpha_at(self.looks, len(self.blocks_done), float(self.design["alpha"]))
        return DecisionCriteria(runs, alpha, margin)

    @cached_property
    def withheld_reason(self) -> str | None:
        """Why nothing may be claimed from the blocks that are done now; None if it may."""
        if not self.design.get("declared", True):
            return "cell.json was lost, and with it what had been declared before the runs"
        return withheld_reason(
            len(self.blocks_done), int(self.design["blocks"]), self.looks, self.shown
        )

    @property
    def shown(self) -> tuple[int, ...]:
        """After how many blocks results were shown, by now."""
        before = tuple(int(n) for n in self.design.get("shown", ()))
        now = (len(self.blocks_done),) if self.complete else ()
        return tuple(sorted({*before, *now}))

    @cached_property
    def blocks_done(self) -> tuple[int, ...]:
        """The blocks whose runs have all left a record."""
        expected = len(self.arms) * int(self.design["runs_per_block"])
        counts: dict[int, int] = {}
        for record in self.records:
            counts[record.block] = counts.get(record.block, 0) + 1
        return tuple(sorted(block for block, n in counts.items() if n >= expected))

    @cached_property
    def hosts(self) -> Mapping[str, tuple[int, ...]]:
        """The blocks of every host that ran some."""
        found: dict[str, set[int]] = {}
        for record in self.records:
            if record.environment.get("host"):
                found.setdefault(str(record.environment["host"]), set()).add(record.block)
        return {host: tuple(sorted(blocks)) for host, blocks in found.items()}

    @cached_property
    def probe(self) -> Mapping[tuple[int, int], float]:
        """Each run's probe before the arm, by block and position (mean log microseconds)."""
        return probe_values(self.records)

    @property
    def complete(self) -> bool:
        """Whether all blocks that were asked for have all their records."""
        return len(self.blocks_done) >= int(self.design["blocks"])


def read_data(cell_dir: Path) -> CellData:
    """Read a cell's files.

    Raises
    ------
    RecordError
        Names the file and what is wrong with it.
    """
    arms, records = read_arms(cell_dir), read_runs(cell_dir)
    lost = not (cell_dir / "cell.json").is_file()
    facts = _undeclared(cell_dir, arms, records) if lost else read_cell(cell_dir)
    for key in ("blocks", "runs_per_block", "alpha", "margin_pct"):
        if key not in facts["design"]:
            raise RecordError(f"{cell_dir / 'cell.json'}: design has no {key}")
    if not arms or arms[0].role != "baseline":
        raise RecordError(f"{cell_dir / 'arms'}: no baseline arm")
    known = {arm.name for arm in arms}
    stray = next((r for r in records if r.arm not in known), None)
    if stray is not None:
        raise RecordError(f"{cell_dir / 'runs' / stray.run}.json: no such arm in arms/")
    return CellData(cell_dir, facts, tuple(arms), tuple(records))


def _undeclared(cell_dir: Path, arms: Sequence[Arm], records: Sequence[Record]) -> dict[str, Any]:
    """Infer a lost ``cell.json`` from the runs; what was declared stays unknown.

    Its alpha and margin are the schema's defaults, and nothing is claimed.
    """
    blocks = {record.block for record in records}
    runs = max(sum(r.arm == arm.name for r in records) for arm in arms) if arms else 0
    together = any(record.notes.get("together") for record in records)
    return {
        "cell": cell_dir.name,
        "question": None,
        "scale": None,
        "design": {
            "seed": records[0].seed if records else None,
            "blocks": len(blocks),
            "runs_per_block": -(-runs // max(1, len(blocks))),
            "control": any(arm.role == "control" for arm in arms),
            "isolation": "in_process" if together else "process",
            "looks": [],
            "alpha": Design.alpha,
            "margin_pct": Design.margin_pct,
            "declared": False,
        },
        "published": None,
    }


@dataclass(frozen=True)
class JudgedComparison:
    """One arm in one row: what the runs say, and the verdict; ``index``: the row's place."""

    index: int
    row: MetricRow
    comparison: ArmComparison
    verdict: Verdict


@dataclass(frozen=True)
class CellAnalysis:
    """The data and what follows from it.

    The comparisons of the arms are made when they are asked for: who compares two studies
    needs the rows and the gates only. ``beside`` finds the cell that confirms this one, or
    that this one confirms; None where there is none.
    """

    data: CellData
    rows: tuple[MetricRow, ...]
    gates: Mapping[str, gates.Gate]
    identity: output_identity.IdentityReport
    stalls: stall_attribution.StallAttribution | None = None
    alternative_rows: tuple[MetricRow, ...] = ()
    companion: Callable[[], CellAnalysis | None] = lambda: None

    @property
    def name(self) -> str:
        """The cell's name: its overrides."""
        return str(self.data.manifest.get("cell", self.data.dir.name))

    @cached_property
    def environment(self) -> dict[str, Any]:
        """The fingerprint of the first run that has one."""
        return next((dict(r.environment) for r in self.data.records if r.environment), {})

    def rows_with_stalls(self, *, whole: bool) -> tuple[MetricRow, ...]:
        """Return the rows with what looks like the machine's stalls, or without."""
        if self.stalls is None or whole == (self.stalls.own is not None):
            return self.rows
        return self.alternative_rows

    @property
    def status(self) -> int:
        """The cell's exit status: 0 if it is complete and every gate held, else 1."""
        held = all(gate.status != "fail" for gate in self.gates.values())
        return 0 if self.data.complete and held else 1

    @cached_property
    def comparisons(self) -> tuple[Mapping[str, ArmComparison], ...]:
        """Per row, each arm against the baseline; nothing in a skipped row."""
        data = self.data
        tested = len(data.asked)
        per_arm = {
            arm.name: compare_arm(
                self.rows,
                arm.name,
                data.baseline,
                data.criteria,
                tested if arm.role == "arm" else 1,
            )
            for arm in data.arms[1:]
        }
        return tuple(
            {} if row.skipped is not None else {arm: found[i] for arm, found in per_arm.items()}
            for i, row in enumerate(self.rows)
        )

    @cached_property
    def judged(self) -> tuple[JudgedComparison, ...]:
        """Every arm in every row that was measured, with its verdict: rows first."""
        control = self.data.control or ""
        return tuple(
            JudgedComparison(
                index, self.rows[index], found, self._judge(index, found, row.get(control))
            )
            for index, row in enumerate(self.comparisons)
            for found in row.values()
        )

    def _judge(self, index: int, found: ArmComparison, noise: ArmComparison | None) -> Verdict:
        gates = (self.gates[name] for name in ("engaged", "identical", "healthy"))
        causes = [cause for gate in gates if (cause := gate.cause(found.arm)) is not None]
        criteria, row = self.data.criteria, self.rows[index]
        verdict = judge(found, row.better, criteria, causes, noise)
        if self.stalls is None or row.arms == self.alternative_rows[index].arms:
            return verdict
        return self.stalls.limit(verdict, found.arm, criteria.margin_pct)

    @cached_property
    def json(self) -> dict[str, Any]:
        """``cell.json`` with the fields of design.md section 8."""
        data = self.data
        return {
            "schema_version": SCHEMA_VERSION,
            "cell": self.name,
            "question": data.manifest.get("question"),
            "scale": data.manifest.get("scale"),
            "arms": [_arm(arm, data.records) for arm in data.arms],
            "design": {
                **data.design,
                "order": _order(data),
                "looks": _looks(data),
                "shown": list(data.shown),
            },
            "gates": {name: gate.to_json() for name, gate in self.gates.items()},
            "rows": [self._row(i) for i in range(len(self.rows))],
            "failures": [
                {"run": r.run, "outcome": r.outcome, "detail": r.detail}
                for r in data.records
                if not r.ok
            ],
            "environment": self.environment,
            "published": data.manifest.get("published"),
        }

    def _row(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        return {
            "case": row.case,
            "metric": row.metric,
            "unit": row.unit,
            "better": row.better,
            "primary": row.primary,
            "skipped": row.skipped,
            "arms": {arm.name: summary(row.arms.get(arm.name, ())) for arm in self.data.arms},
            "comparisons": [
                _comparison(one.comparison, one.verdict)
                for one in self.judged
                if one.index == index
            ],
        }


def analyse(
    cell_dir: Path, beside: Callable[[], CellAnalysis | None] = lambda: None
) -> CellAnalysis:
    """Analyse one cell from its files; raises :class:`RecordError`."""
    data = read_data(cell_dir)
    names = [arm.name for arm in data.arms]
    claim = data.arms[0].identity
    report = output_identity.compare_outputs(data.records, names, StoredValues(cell_dir), claim)
    found = {
        "healthy": gates.healthy(data.records, bool(data.design.get("across_hosts", False))),
        "engaged": gates.engaged(data.records, data.arms),
        "identical": gates.identical(report, data.arms, data.records, float(data.design["alpha"])),
    }
    rows, otherwise, found_stalls = _rows(data)
    return CellAnalysis(data, rows, found, report, found_stalls, otherwise, beside)


def _rows(
    data: CellData,
) -> tuple[tuple[MetricRow, ...], tuple[MetricRow, ...], stall_attribution.StallAttribution | None]:
    """Return the rows to judge by, those with stalls the other way, and what stalls there were."""
    together = data.design.get("isolation") == "in_process"
    paired_baseline = data.baseline if together else None
    rows = tuple(build_rows(data.records, paired_baseline))
    found = stall_attribution.attribute_stalls(data.records, data.arms) if together else None
    if found is None:
        return rows, (), None
    whole = tuple(build_rows(stall_attribution.as_measured(data.records), paired_baseline))
    return (rows, whole, found) if found.own is None else (whole, rows, found)


def analyse_cell(cell_dir: Path) -> dict[str, Any]:
    """Analyse one cell and return its ``cell.json`` (design.md section 8).

    Raises
    ------
    RecordError
        A file of the cell is missing, truncated, foreign or of another schema version.
    """
    return analyse(Path(cell_dir)).json


def _arm(arm: Arm, records: Sequence[Record]) -> dict[str, Any]:
    """Describe an arm; its counters are the medians over its runs."""
    mine = [r.counters for r in records if r.arm == arm.name and r.counters]
    names = list(dict.fromkeys(name for counters in mine for name in counters))
    middle = {name: sorted(float(c.get(name, 0.0)) for c in mine)[len(mine) // 2] for name in names}
    return {
        "name": arm.name,
        "role": arm.role,
        "overrides": dict(arm.overrides),
        "counters": middle,
    }


def _order(data: CellData) -> list[list[str]]:
    """Return the order that was really run: per block, the arms by position."""
    blocks: dict[int, list[str]] = {}
    for record in data.records:
        blocks.setdefault(record.block, []).append(record.arm)
    return [blocks[block] for block in sorted(blocks)]


def _looks(data: CellData) -> list[dict[str, Any]]:
    return [{"blocks": look.blocks, "alpha": look.alpha} for look in data.looks]


def _comparison(found: ArmComparison, verdict: Verdict) -> dict[str, Any]:
    low, high = found.ci_pct if found.ci_pct is not None else (None, None)
    raw_low, raw_high = found.ci_raw_pct if found.ci_raw_pct is not None else (None, None)
    return {
        "arm": found.arm,
        "baseline": found.baseline,
        "effect_pct": round_significant(found.effect_pct),
        "ci_low_pct": round_significant(low),
        "ci_high_pct": round_significant(high),
        "level": round_significant(found.level),
        "ci_raw_low_pct": round_significant(raw_low),
        "ci_raw_high_pct": round_significant(raw_high),
        "p": round_significant(found.p),
        "p_adjusted": round_significant(found.p_adjusted),
        "p_floor": found.p_floor,
        "mde_pct": round_significant(found.mde_pct),
        "alpha_row": round_significant(found.alpha_row),
        "sd": round_significant(found.sd),
        "wins": found.wins,
        "blocks": found.blocks,
        "verdict": verdict.word,
        "reason": verdict.reason,
    }
