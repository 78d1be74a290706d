"""Analysis of one cell: ``cell.json`` is derived from the records.

The runner first writes ``cell.json`` with the declared facts (question, design, published
numbers). The analysis copies these facts and recomputes everything else each time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from statistics import median_high
from typing import Any

from labkit.analysis.comparison import output_identity, slow_kernel_launches, validity_gates
from labkit.analysis.comparison.arm_comparison import (
    OUT_OF_REACH,
    DecisionCriteria,
    compare_arm,
    effect_pct,
)
from labkit.analysis.comparison.best_setting import best_settings
from labkit.analysis.comparison.machine_or_arm_stalls import (
    StallAttribution,
    as_measured,
    attribute_stalls,
)
from labkit.analysis.comparison.observations import (
    MetricRow,
    arm_values,
    build_rows,
    complete_blocks,
    probe_values,
)
from labkit.analysis.comparison.perplexity_and_kl import text_qualities
from labkit.analysis.comparison.request_comparability import count_cause
from labkit.analysis.comparison.step_parts import divide_time
from labkit.analysis.comparison.verdict import DECIDED_WORDS, EFFECTS, IF_NO_DRIFT, Verdict, judge
from labkit.analysis.model.cell_model import (
    ArmQuality,
    ArmsByRole,
    BestInRow,
    Cell,
    CellArm,
    CellDesign,
    Failure,
    Published,
)
from labkit.analysis.model.result_row import CaseAndMetric, Comparison, Row
from labkit.analysis.number_format import value_text
from labkit.analysis.statistics.hodges_lehmann import hodges_lehmann, mean_difference
from labkit.analysis.statistics.interim_analysis import InterimLook, alpha_at, withheld_reason
from labkit.config import Design, Isolation
from labkit.records import (
    SCHEMA_VERSION,
    Arm,
    Record,
    RecordError,
    StudyPath,
    read_arms,
    read_cell,
    read_runs,
    unlisted_records,
)


@dataclass(frozen=True)
class CellData(ArmsByRole):
    """The contents of a cell's files: its manifest, the arms (baseline first) and the records.

    ``unlisted`` is the number of records that have no digest, so that edits would go unnoticed.
    """

    dir: StudyPath
    manifest: Mapping[str, Any]
    arms: tuple[Arm, ...]
    records: tuple[Record, ...]
    unlisted: int = 0

    @cached_property
    def design(self) -> CellDesign:
        return CellDesign.from_json(self.manifest.get("design", {}))

    @property
    def sweep(self) -> Mapping[str, Sequence[Any]]:
        """The options that a sweep varies, with their values; empty if the cell is no sweep."""
        return self.manifest.get("sweep") or {}

    @property
    def emulated(self) -> list[str]:
        """Names of the arms, without the control, whose Metal kernels ran in the emulator."""
        devices = {
            arm.name: arm.config.get("engine", {}).get("attention", {}).get("device")
            for arm in self.arms
        }
        return [name for name in self.real_arms if devices[name] == "emulated"]

    @cached_property
    def criteria(self) -> DecisionCriteria:
        """Runs per block, margin, and the current alpha (0 while nothing may be claimed)."""
        design, reason = self.design, self.withheld_reason
        alpha = alpha_at(design.looks, len(self.blocks_done), design.alpha) if not reason else 0.0
        return DecisionCriteria(design.runs_per_block, alpha, design.margin_pct, reason)

    @cached_property
    def stopped(self) -> Mapping[str, InterimLook]:
        """The look that decided a case, after which it was not measured; by case."""
        looks = {look.blocks: look for look in self.design.looks}
        return {
            case: looks[int(taken["blocks"])]
            for taken in self.design.looks_taken
            for case in taken.get("stopped", ())
        }

    def criteria_of(self, case: str) -> DecisionCriteria:
        """Return the criteria of a case's rows: the current ones, or those of its last look."""
        look = self.stopped.get(case)
        if case in self.estimates_at(None) and self.criteria.withheld_reason is None:
            return replace(self.criteria, withheld_reason=OUT_OF_REACH)
        if look is None or not self.design.declared:
            return self.criteria
        return replace(self.criteria, alpha=look.alpha, withheld_reason=None)

    def estimates_at(self, look: InterimLook | None) -> frozenset[str]:
        """Return the cases that were only estimated, and so not tested, at a look; None: now."""
        if look is None:
            return frozenset(self.design.estimates)
        taken = (one for one in self.design.looks_taken if one["blocks"] == look.blocks)
        return frozenset(case for one in taken for case in one.get("estimates", ()))

    @cached_property
    def withheld_reason(self) -> str | None:
        """The reason why nothing may be claimed from the finished blocks, or None."""
        if not self.design.declared:
            return "cell.json was lost, and with it the declared design"
        return withheld_reason(
            len(self.blocks_done), self.design.blocks, self.design.looks, self.shown
        )

    @property
    def shown(self) -> tuple[int, ...]:
        """Numbers of finished blocks when results were shown, the present one if all are done."""
        now = (len(self.blocks_done),) if self.complete else ()
        return tuple(sorted({*self.design.shown, *now}))

    @cached_property
    def blocks_done(self) -> tuple[int, ...]:
        """The blocks in which every run has left a record."""
        counts = Counter(record.block for record in self.records)
        dropped = self.dropped.values()  # numbers of blocks, after which an arm has no runs
        arms = {block: len(self.arms) - sum(end <= block for end in dropped) for block in counts}
        runs = self.design.runs_per_block
        return tuple(sorted(block for block, n in counts.items() if n >= runs * arms[block]))

    @cached_property
    def dropped(self) -> Mapping[str, int]:
        """By sweep's setting that an interim look dropped, the number of blocks that it ran."""
        dropped: dict[str, int] = {}
        for look in self.design.looks_taken:
            for arm in self.arms if "kept" in look else ():
                if arm.name not in look["kept"]:
                    dropped.setdefault(arm.name, int(look["blocks"]))
        return dropped

    @cached_property
    def hosts(self) -> Mapping[str, tuple[int, ...]]:
        """The blocks that each host ran, by host name."""
        hosts: dict[str, set[int]] = {}
        for record in self.records:
            if record.environment.get("host"):
                hosts.setdefault(str(record.environment["host"]), set()).add(record.block)
        return {host: tuple(sorted(blocks)) for host, blocks in hosts.items()}

    @cached_property
    def stalls(self) -> StallAttribution | None:
        """The attribution of interleaved arms' stalls; None if there were none."""
        takes_turns = Isolation(self.design.isolation).takes_turns
        return attribute_stalls(self.records, self.arms) if takes_turns else None

    @property
    def keeps_stalls(self) -> bool:
        """Whether there were stalls, and verdicts are about times with them."""
        return self.stalls is not None and self.stalls.kept_reason is not None

    @cached_property
    def judged_records(self) -> tuple[Record, ...]:
        """The records with the times that verdicts are about: with stalls if these are kept."""
        return as_measured(self.records) if self.keeps_stalls else self.records

    @cached_property
    def probe(self) -> Mapping[tuple[int, int], float]:
        """Mean log of the machine probe's times (us) before each arm, by (block, position)."""
        return probe_values(self.records)

    @cached_property
    def qualities(self) -> tuple[ArmQuality, ...]:
        names = [arm.name for arm in self.arms]
        return tuple(text_qualities(names, self.records, self.design.quality_confidence))

    @property
    def complete(self) -> bool:
        """Whether every block of the design has all its records."""
        return len(self.blocks_done) >= self.design.blocks


def read_data(cell_dir: StudyPath) -> CellData:
    """Read a cell's files; raise ``RecordError``, which names it, if one is missing or invalid."""
    arms, records = read_arms(cell_dir), read_runs(cell_dir)
    lost = not (cell_dir / "cell.json").is_file()
    facts = _undeclared(cell_dir, arms, records) if lost else read_cell(cell_dir)
    for key in ("blocks", "runs_per_block", "alpha", "margin_pct"):
        if key not in facts["design"]:
            raise RecordError(f"{cell_dir / 'cell.json'}: design has no {key}")
    if not arms or arms[0].role != "baseline":
        raise RecordError(f"{cell_dir / 'arms'} has no baseline arm")
    known = {arm.name for arm in arms}
    stray = next((r for r in records if r.arm not in known), None)
    if stray is not None:
        raise RecordError(
            f"{cell_dir / 'runs' / stray.run}.json: its arm {stray.arm!r} is not in arms/"
        )
    return CellData(cell_dir, facts, tuple(arms), tuple(records), unlisted_records(cell_dir))


def _undeclared(
    cell_dir: StudyPath, arms: Sequence[Arm], records: Sequence[Record]
) -> dict[str, Any]:
    """Return a substitute for a lost ``cell.json``, from the runs; nothing is claimed with it."""
    blocks = {record.block for record in records}
    runs = max(sum(r.arm == arm.name for r in records) for arm in arms) if arms else 0
    together = [record for record in records if record.known_notes.get("together")]
    return {
        "cell": cell_dir.name,
        "question": None,
        "scale": None,
        "design": {
            "seed": records[0].seed if records else None,
            "blocks": len(blocks),
            "runs_per_block": -(-runs // max(1, len(blocks))),
            "control": any(arm.role == "control" for arm in arms),
            "isolation": str(together[0].notes["isolation"]) if together else "process",
            "looks": [],
            "alpha": Design.alpha,
            "margin_pct": Design.margin_pct,
            "declared": False,
        },
        "published": None,
    }


@dataclass(frozen=True)
class CellAnalysis:
    """A cell's files, rows, gates and, on first use, comparisons and verdicts.

    ``companion()`` returns the analysis of the same cell under the other isolation (interleaved
    or separate processes), or None. ``alternative_rows`` include stalls if ``rows`` exclude them,
    and exclude stalls if ``rows`` include them. Those of launches are compared by their means. They
    are empty if there were neither stalls nor launches.
    """

    data: CellData
    rows: tuple[MetricRow, ...]
    gates: Mapping[str, validity_gates.Gate]
    identity: output_identity.IdentityReport
    alternative_rows: tuple[MetricRow, ...] = ()
    companion: Callable[[], CellAnalysis | None] = lambda: None
    # The comparisons of an arm in the differing alternative rows, as far as asked for.
    _alternatives: dict[str, Sequence[Mapping[str, Comparison]]] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def all_computed(self) -> bool:
        """Whether every primary row is computed, so that nothing is tested."""
        primary = [row for row in self.rows if row.primary]
        return bool(primary) and all(row.is_computed for row in primary)

    @property
    def name(self) -> str:
        """Name of the cell: its overrides."""
        return str(self.data.manifest.get("cell", self.data.dir.name))

    @cached_property
    def environment(self) -> dict[str, Any]:
        """The machine's fingerprint from the first run that recorded one."""
        return next((dict(r.environment) for r in self.data.records if r.environment), {})

    def rows_by_stalls(self, *, included: bool) -> tuple[MetricRow, ...]:
        """Return the rows whose times include the machine's stalls, or those that exclude them."""
        with_stalls = self.data.keeps_stalls
        same = self.data.stalls is None or included == with_stalls
        return self.rows if same else self.alternative_rows

    @property
    def status(self) -> int:
        """Exit status of the cell: 0 if it is complete and every gate holds, else 1."""
        gates_hold = all(gate.status != "fail" for gate in self.gates.values())
        return 0 if self.data.complete and gates_hold else 1

    @cached_property
    def comparisons(self) -> tuple[Mapping[str, Comparison], ...]:
        """For each row, the comparisons with the baseline by arm; empty for a skipped row."""
        return self._compare(self.rows)

    def _alternative_comparison(self, index: int, arm: str) -> Comparison | None:
        """Return the comparison of an arm in an alternative row; None if there is no such arm."""
        if arm not in self._alternatives:
            self._alternatives[arm] = self._compare(self.alternative_rows, self.differing, arm)
        return self._alternatives[arm][index].get(arm)

    def _compare(
        self,
        rows: Sequence[MetricRow],
        only: Container[int] | None = None,
        only_arm: str | None = None,
    ) -> tuple[Mapping[str, Comparison], ...]:
        """Compare the arms in every row; a case that stopped at a look keeps its result."""
        data = self.data
        arms = [arm for arm in data.arms[1:] if only_arm in (None, arm.name)]
        now = data.criteria, data.estimates_at(None)
        compared = list(self._compare_by(rows, arms, *now, only))
        for look in {look.blocks: look for look in data.stopped.values()}.values():
            stopped = [i for i, row in enumerate(rows) if data.stopped.get(row.case) == look]
            if stopped:
                then = [row.before(look.blocks) for row in rows]
                criteria = data.criteria_of(rows[stopped[0]].case)
                at_look = self._compare_by(then, arms, criteria, data.estimates_at(look), only)
                for index in stopped:
                    compared[index] = at_look[index]
        return tuple(compared)

    def _compare_by(
        self,
        rows: Sequence[MetricRow],
        arms: Sequence[Arm],
        criteria: DecisionCriteria,
        estimates: Collection[str],
        only: Container[int] | None,
    ) -> tuple[Mapping[str, Comparison], ...]:
        data = self.data
        estimated = {index for index, row in enumerate(rows) if row.case in estimates}
        per_arm = {}
        for arm in arms:
            tested = len(data.treatment_arms) if arm.role == "arm" else 1
            names = arm.name, data.baseline
            per_arm[arm.name] = compare_arm(rows, *names, criteria, tested, estimated, only)
        return tuple(
            {} if row.skipped is not None else {arm: of_rows[i] for arm, of_rows in per_arm.items()}
            for i, row in enumerate(rows)
        )

    @cached_property
    def best(self) -> tuple[BestInRow, ...]:
        """The best setting of every primary row of a sweep; empty if the cell is no sweep."""
        return tuple(best_settings(self)) if self.data.sweep else ()

    def causes(self, arm: str, row: CaseAndMetric | None = None) -> list[str]:
        """Return the reasons why an arm has no verdict in a row or, by default, in any row.

        They are those of gates, counts of tokens, ways of timing, units and rounds.
        """
        data, gates = self.data, ("engaged", "identical", "healthy")
        causes = [self.gates[name].cause(arm) for name in gates]
        if row is not None:
            causes.append(count_cause(row.metric, arm, data.arms, data.records))
            if row.metric == "dispatch_us":
                causes.append(slow_kernel_launches.timing_cause(arm, data.baseline, data.records))
            same = (own for own in self.rows if (own.case, own.metric) == (row.case, row.metric))
            left_out = next((own.left_out for own in same), {})
            causes.append(left_out.get(arm) or left_out.get(data.baseline))
        return [cause for cause in causes if cause is not None]

    def _judge(self, index: int, comparison: Comparison) -> Verdict:
        row, noise = self.rows[index], self.comparisons[index].get(self.data.control or "")
        criteria = self.data.criteria_of(row.case)
        causes = self.causes(comparison.arm, row)
        if row.is_computed and not causes:  # also of an arm that does not report it
            return Verdict("computed")
        verdict = judge(comparison, row.better, criteria, causes, noise)
        measured = not causes and bool(row.arms.get(comparison.arm))
        from_zero = measured and row.is_zero(comparison.baseline)
        if from_zero:
            verdict = verdict.because(_zero_baseline_text(row, comparison))
        if self.data.design.imported.get("in_sequence") and verdict.word in DECIDED_WORDS:
            return verdict.because(IF_NO_DRIFT)
        if from_zero or index not in self.differing or verdict.word not in DECIDED_WORDS:
            return verdict

        def as_measured() -> Verdict:
            control = self._alternative_comparison(index, self.data.control or "")
            other = self._alternative_comparison(index, comparison.arm)
            assert other is not None
            return judge(other, row.better, criteria, causes, control)

        stalls = self.data.stalls
        if stalls is not None:
            return stalls.restrict(verdict, comparison.arm, criteria.margin_pct, as_measured)
        p = self.slow_launch_p(index, comparison.arm)
        assert p is not None
        effects = comparison.effect_pct or 0.0, self._alternative_effect_pct(index, comparison)
        return slow_kernel_launches.restrict(verdict, comparison.arm, p, effects, as_measured)

    def slow_launch_p(self, index: int, arm: str) -> float | None:
        """Return the p of slow launches in a row; None if they are not compared by their means."""
        if self.data.stalls is not None or index not in self.differing:
            return None
        launches, pair = self.alternative_rows[index], (self.data.baseline, arm)
        blocks = complete_blocks(launches, pair, self.data.criteria.runs)
        return slow_kernel_launches.slow_launch_p(launches, *pair, blocks)

    def _alternative_effect_pct(self, index: int, comparison: Comparison) -> float:
        """Return the effect in the alternative row: with stalls, or of the mean launch."""
        estimate = hodges_lehmann if self.data.stalls is not None else mean_difference
        row, runs = self.alternative_rows[index], self.data.criteria.runs
        effect = effect_pct(row, comparison.arm, comparison.baseline, runs, estimate)
        return comparison.effect_pct or 0.0 if effect is None else effect

    def _as_measured_pct(self, index: int, one: Comparison) -> float | None:
        """Return the effect with stalls or slow launches if it lies outside the interval shown."""
        shown = self.rows[index].primary and index in self.differing
        if self.data.keeps_stalls or not shown or one.ci_pct is None:
            return None
        effect = self._alternative_effect_pct(index, one)
        return None if one.ci_pct[0] <= effect <= one.ci_pct[1] else effect

    @cached_property
    def differing(self) -> frozenset[int]:
        """The indices of the rows whose alternative rows are not the rows themselves."""
        rows = zip(self.rows, self.alternative_rows, strict=False)  # there may be none
        return frozenset(
            index
            for index, (row, other) in enumerate(rows)
            if row.over_rounds != other.over_rounds or row.arms != other.arms
        )

    @cached_property
    def cell(self) -> Cell:
        """The model of the cell, with the numbers as in ``cell.json``."""
        data, manifest, published = (
            self.data,
            self.data.manifest,
            self.data.manifest.get("published"),
        )
        lists = (manifest.get(key) for key in ("overrides", "config_dirs"))
        overrides, folders = (None if each is None else tuple(each) for each in lists)
        rows = tuple(map(self._row, range(len(self.rows))))
        compared = (one for row in rows if row.primary for one in row.comparisons)
        claimed = {one.arm for one in compared if one.verdict in EFFECTS}
        return Cell(
            schema_version=SCHEMA_VERSION,
            cell=self.name,
            question=manifest.get("question"),
            scale=manifest.get("scale"),
            arms=tuple(_arm(arm, data.records) for arm in data.arms),
            design=data.design.with_keys(
                order=_order(data),
                looks=[asdict(look) for look in data.design.looks],
                shown=list(data.shown),
            ),
            gates={name: gate.result() for name, gate in self.gates.items()},
            rows=rows,
            failures=tuple(
                Failure(r.run, r.outcome, r.detail, notes.get("failed_by"), notes.get("log"))
                for r in data.records
                if not r.ok
                for notes in [r.known_notes]
            ),
            environment=self.environment,
            published=Published(published) if published is not None else None,
            overrides=overrides,
            config_dirs=folders,
            sweep=dict(data.sweep) or None,
            best=self.best if data.sweep else None,
            quality=data.qualities or None,
            time=divide_time(data.arms, data.records, data.criteria, claimed),
        )

    def _row(self, index: int) -> Row:
        row = self.rows[index]
        return Row(
            *(row.case, row.metric, row.unit, row.better, row.primary, row.skipped),
            arms={arm.name: arm_values(row.arms.get(arm.name, ())) for arm in self.data.arms},
            comparisons=tuple(self._judged(index, one) for one in self.comparisons[index].values()),
        )

    def _judged(self, index: int, one: Comparison) -> Comparison:
        verdict, as_measured_pct = self._judge(index, one), self._as_measured_pct(index, one)
        told = replace(one, verdict=verdict.word, reason=verdict.reason)
        return replace(told, as_measured_pct=as_measured_pct).rounded()


def _zero_baseline_text(row: MetricRow, comparison: Comparison) -> str:
    median = value_text(arm_values(row.arms[comparison.arm]).median, row.unit)
    text = (
        f"{comparison.baseline} has 0 {row.unit} in every run, so no effect in percent of it "
        f"exists; {comparison.arm} has {median} {row.unit}"
    )
    if comparison.difference_ci is None or comparison.level is None:
        return text
    low, high = (value_text(end, row.unit) for end in comparison.difference_ci)
    interval = f"{low} to {high} {row.unit}"
    return f"{text} (adjusted {100 * comparison.level:g} % CI of the difference {interval})"


def analyse(
    cell_dir: StudyPath, companion: Callable[[], CellAnalysis | None] = lambda: None
) -> CellAnalysis:
    """Analyse one cell from its files; raise :class:`RecordError` if a file is not valid."""
    data = read_data(cell_dir)
    names = [arm.name for arm in data.arms]
    report = output_identity.compare_outputs(data.records, names, cell_dir, data.arms[0].identity)
    gate_results = {
        "healthy": validity_gates.healthy(data.records, data.arms, data.design.across_hosts),
        "engaged": validity_gates.engaged(data.records, data.arms),
        "identical": validity_gates.identical(
            report, data.arms, data.records, data.design.alpha, data.design.quality_confidence
        ),
    }
    rows, alternative_rows = _rows(data)
    return CellAnalysis(data, rows, gate_results, report, alternative_rows, companion)


def _rows(data: CellData) -> tuple[tuple[MetricRow, ...], tuple[MetricRow, ...]]:
    """Return ``rows`` and ``alternative_rows`` of the cell's :class:`CellAnalysis`."""
    interleaved = Isolation(data.design.isolation).takes_turns
    named = data.baseline if interleaved else None, data.design.metrics
    rows = tuple(build_rows(data.records, *named))
    if data.stalls is None and not any(row.has_slow_launches for row in rows):
        return rows, ()
    measured = tuple(build_rows(as_measured(data.records), *named))
    if data.stalls is None:
        slow = (replace(r, over_rounds="mean") if r.has_slow_launches else r for r in measured)
        return rows, tuple(slow)
    return (measured, rows) if data.keeps_stalls else (rows, measured)


def analyse_cell(cell_dir: StudyPath) -> dict[str, Any]:
    """Analyse one cell and return its ``cell.json``.

    Raises ``RecordError`` if a file of the cell is missing or truncated, or was written by another
    program or for another schema version.
    """
    return analyse(cell_dir).cell.to_json()


def _arm(arm: Arm, records: Sequence[Record]) -> CellArm:
    """Return an arm with its counters' medians, of an even number the larger of the middle two."""
    runs = [r.counters for r in records if r.arm == arm.name and r.counters]
    names = list(dict.fromkeys(name for counters in runs for name in counters))
    medians = {name: median_high(float(c.get(name, 0.0)) for c in runs) for name in names}
    return CellArm(arm.name, arm.role, dict(arm.overrides), medians)


def _order(data: CellData) -> list[list[str]]:
    blocks: dict[int, list[str]] = {}
    for record in data.records:
        blocks.setdefault(record.block, []).append(record.arm)
    return [blocks[block] for block in sorted(blocks)]
