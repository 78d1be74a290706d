"""A cell: the question, the arms, the design, the gates, the rows, and what failed.

:class:`Cell` is built once from records. ``cell.json`` is its form on disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from labkit.analysis.model.dataclass_json import absent, fields_to_json, from_json
from labkit.analysis.model.result_row import (
    CaseAndMetric,
    Comparison,
    EffectInPercent,
    Row,
    row_name,
)
from labkit.analysis.model.step_part_times import TimeDivision
from labkit.analysis.statistics.interim_analysis import InterimLook, parse_looks
from labkit.analysis.statistics.text_window_intervals import CONFIDENCE, Interval
from labkit.analysis.text_format import slug
from labkit.records import SCHEMA_VERSION, parse_run_name
from labkit.records.metric_registry import MetricDefinition, metric_definition


@dataclass(frozen=True)
class CellArm:
    """An arm: its role (baseline, arm or control), overrides and the medians of its counters."""

    name: str
    role: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)


class ArmsByRole:
    """The names of arms by their roles; the baseline is the first arm."""

    arms: tuple[Any, ...]

    @property
    def baseline(self) -> str:
        """Name of the arm that the others are compared with."""
        return str(self.arms[0].name)

    @property
    def control(self) -> str | None:
        """Name of the A/A arm, or None."""
        return next((arm.name for arm in self.arms if arm.role == "control"), None)

    @property
    def real_arms(self) -> list[str]:
        """Names of all arms except the A/A control, the baseline first."""
        return [arm.name for arm in self.arms if arm.role != "control"]

    @property
    def treatment_arms(self) -> list[str]:
        """Names of the arms under test: all but the baseline and the control."""
        return [arm.name for arm in self.arms if arm.role == "arm"]


@dataclass(frozen=True)
class GateResult:
    """A gate's status (pass, fail or unclaimed) and its reasons."""

    status: str
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failure:
    """A failed run. ``failed_by`` is the run that ended its process, if another one did."""

    run: str
    outcome: str
    detail: str | None
    failed_by: str | None = absent()
    log: str | None = absent()

    @property
    def arm(self) -> str:
        return parse_run_name(self.run)[2]


@dataclass(frozen=True)
class CellDesign:
    """The design. ``keys`` holds it as in ``cell.json``, with the keys of its version of labkit."""

    keys: Mapping[str, Any]
    seed: int | None = None  # of the random order
    blocks: int = 0  # of the whole design
    runs_per_block: int = 0  # of each arm
    alpha: float = 0.0  # the significance level of the whole cell
    margin_pct: float = 0.0  # differences smaller than this do not matter
    isolation: str = "process"  # or ``in_process`` or ``live``
    # What is known of runs that another tool measured (:mod:`labkit.importers`): the caveats
    # ``could_change`` and ``for_the_record``, and whether the runs were ``in_sequence``, so that a
    # drift of the machine would look like an effect.
    imported: Mapping[str, Any] = field(default_factory=dict)
    time_s: float | None = None  # the time from which blocks or rounds followed
    # By case for which the time did not suffice, the seconds that deciding it would take.
    estimates: Mapping[str, float] = field(default_factory=dict)
    units: int | None = None  # requests or windows of every run, if the number followed from time
    quality_confidence: float = CONFIDENCE  # higher if looks decided how much was scored
    across_hosts: bool = False  # whether the host may change from block to block
    declared: bool = True  # False if ``cell.json`` was lost
    metrics: tuple[str, ...] = ()  # the declared primary metrics, the most important first
    order: Sequence[Sequence[str]] = ()  # the arms of each block in the order in which they ran
    looks_taken: tuple[Mapping[str, Any], ...] = ()  # as the runner noted them
    shown: tuple[int, ...] = ()  # numbers of finished blocks when results were shown

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CellDesign:
        return from_json(cls, {**{k: v for k, v in data.items() if v is not None}, "keys": data})

    def to_json(self) -> dict[str, Any]:
        return dict(self.keys)

    def with_keys(self, **keys: Any) -> CellDesign:
        """Return the design with other or further keys."""
        return CellDesign.from_json({**self.keys, **keys})

    @property
    def num_runs(self) -> int:
        """Number of runs that left a record."""
        return sum(len(arms) for arms in self.order)

    @cached_property
    def looks(self) -> tuple[InterimLook, ...]:
        """The declared looks in order, with the final one after the last block.

        Empty if the design has no interim look. Raises ``ValueError`` if the numbers of blocks do
        not increase, or the looks spend more than ``alpha``.
        """
        return parse_looks(self.keys.get("looks"), self.alpha)


@dataclass(frozen=True)
class PublishedRow:
    """A row of an article's table; ``names_metric``: it names a metric or unit of its own."""

    case: str
    metric: str
    unit: str | None
    names_metric: bool
    arms: Mapping[str, Any]
    delta_pct: Mapping[str, Any]
    p: Mapping[str, Any]
    wins: Mapping[str, Any]


@dataclass(frozen=True)
class PublishedTable:
    """A table of an article, as it was printed."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Published:
    """The numbers that an article published. ``keys`` holds them as the ablation declares them."""

    keys: Mapping[str, Any]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Published:
        return cls(data)

    def to_json(self) -> Mapping[str, Any]:
        return self.keys

    @cached_property
    def rows(self) -> tuple[PublishedRow, ...]:
        """The rows. A row without a metric or unit has the article's."""
        keys, names = self.keys, ("arms", "delta_pct", "p", "wins")
        rows = []
        for row in keys.get("rows") or ():
            metric, unit = (row.get(key, keys.get(key)) for key in ("metric", "unit"))
            named = (row.get("metric"), row.get("unit")) != (None, None)
            numbers = (row.get(name) or {} for name in names)
            rows.append(PublishedRow(str(row["case"]), str(metric), unit, named, *numbers))
        return tuple(rows)

    @property
    def tables(self) -> tuple[PublishedTable, ...]:
        return tuple(from_json(PublishedTable, table) for table in self.keys.get("tables") or ())

    @property
    def unit(self) -> str | None:
        """The unit of rows that name none."""
        return self.keys.get("unit")

    @property
    def machine(self) -> str:
        return str(self.keys.get("machine", "machine not stated"))

    @property
    def source(self) -> str:
        return str(self.keys.get("source", "source not stated"))


@dataclass(frozen=True)
class ArmQuality:
    """An arm's quality over windows of text, and the number of their predicted tokens.

    ``metrics`` holds each metric with its interval over windows:

    - ``perplexity``: exp of the mean negative log likelihood per token; ``perplexity_ratio``: that
      of the arm divided by the baseline's on the same tokens;
    - ``kl_mean``, ``kl_p50``, ...: KL divergence from the baseline per position, in nats: its mean
      and quantiles, which are within .05 % of the exact ones (``labkit.records.kl_histogram``);
    - ``top1_agreement``: share of positions whose likeliest token is that of the baseline;
    - ``probability_change``: root mean square difference from the baseline in the probability of
      the text's next token.
    """

    arm: str
    windows: int
    tokens: int
    metrics: Mapping[str, Interval]


@dataclass(frozen=True)
class BestInRow(EffectInPercent):
    """The best setting of a sweep in one row; unknown values are None.

    ``values`` maps each arm to the baseline's median times the arm's ratio to the baseline, as
    estimated within blocks. ``reference`` is the baseline, or the second best arm if the baseline
    is the best. ``effect_pct`` is the difference of the best arm from the reference, corrected for
    having chosen the best, and ``level`` the confidence level of its interval; computed values have
    no interval. ``possibly_best`` are the arms that may be the best, ordered from the best mean to
    the worst. ``excluded`` maps each arm without a valid result to the reason. ``dropped`` maps
    each arm that an interim look dropped, because another arm was better, to the number of blocks
    it ran. ``withheld`` is the reason why nothing is claimed and the numbers are only estimates, or
    None.
    """

    case: str
    metric: str | None
    unit: str | None
    better: str | None
    values: Mapping[str, float] = field(default_factory=dict)
    excluded: Mapping[str, str] = field(default_factory=dict)
    best: str | None = None
    reference: str | None = None
    effect_pct: float | None = None
    ci_low_pct: float | None = None
    ci_high_pct: float | None = None
    level: float | None = None
    possibly_best: tuple[str, ...] = ()
    withheld: str | None = None
    dropped: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_computed(self) -> bool:
        """Whether the values are computed, so that the best is known without a test."""
        return self.best is not None and self.withheld is None and self.ci_pct is None

    @property
    def is_decided(self) -> bool:
        """Whether the best is known: one setting, or several with the same computed value."""
        return self.is_computed or len(self.possibly_best) == 1

    @property
    def definition(self) -> MetricDefinition:
        return metric_definition(self.metric, self.unit)


@dataclass(frozen=True)
class Cell(ArmsByRole):
    """A cell's results."""

    schema_version: int
    cell: str  # the cell's name
    question: str | None
    scale: str | None
    arms: tuple[CellArm, ...]  # the arms, the baseline first
    design: CellDesign
    gates: Mapping[str, GateResult]
    rows: tuple[Row, ...]
    failures: tuple[Failure, ...]
    environment: Mapping[str, Any]  # the machine's fingerprint from the first run that recorded one
    published: Published | None
    # overrides, config_dirs: the command's overrides and folders of files; None in older studies.
    overrides: tuple[str, ...] | None = absent()
    config_dirs: tuple[str, ...] | None = absent()
    # sweep, best: the options that a sweep varies with their values, and each primary row's best
    # setting; None if the cell is no sweep.
    sweep: Mapping[str, Any] | None = absent()
    best: tuple[BestInRow, ...] | None = absent()
    # The arms' quality; None if the workload scores no texts.
    quality: tuple[ArmQuality, ...] | None = absent()
    # Where the time of steps went; None if no turns had clocks.
    time: TimeDivision | None = absent()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cell:
        """Read a ``cell.json``, also one of an older version of labkit."""
        older = {"schema_version": SCHEMA_VERSION, "scale": None, "published": None}
        return from_json(cls, {**older, **data})

    def to_json(self) -> dict[str, Any]:
        return fields_to_json(self)

    @property
    def name(self) -> str:
        """The overrides in full, or the cell's name if they are not recorded."""
        return ", ".join(self.overrides or [self.cell])

    @property
    def title(self) -> str:
        """The question (or the cell's name), with the scale if there is one."""
        return f"{self.question or self.cell}{f' (scale={self.scale})' if self.scale else ''}"

    def stem(self, picture: str) -> str:
        """Return the name of a picture's files without the extension."""
        return f"{slug(self.cell)}--{picture}"

    @property
    def compared_arms(self) -> list[str]:
        """The arms under test, or the control if there is no other arm."""
        return self.treatment_arms or [arm for arm in [self.control] if arm is not None]

    @property
    def published_rows(self) -> tuple[PublishedRow, ...]:
        return self.published.rows if self.published is not None else ()

    @property
    def primary_rows(self) -> list[Row]:
        """The rows that the question is about."""
        return [row for row in self.rows if row.primary]

    def row_name(self, row: CaseAndMetric) -> str:
        return row_name(row, self._primary_metrics)

    @cached_property
    def _primary_metrics(self) -> frozenset[str | None]:
        return frozenset(row.metric for row in self.primary_rows)

    @property
    def compared(self) -> Iterator[tuple[Row, Comparison]]:
        return ((row, one) for row in self.rows for one in row.comparisons)

    @property
    def comparisons(self) -> Iterator[Comparison]:
        return (one for _, one in self.compared)

    @property
    def level_texts(self) -> list[str]:
        """Confidence levels of the intervals: ``95 %``, or ``99 %`` at a look that spends 0.01.

        The lowest is the first; rows that an earlier look has decided have a higher one.
        """
        levels = {one.level for one in self.comparisons if one.level} or {1.0 - self.design.alpha}
        return [f"{100 * level:g} %" for level in sorted(levels)]

    @property
    def counters(self) -> dict[str, Mapping[str, float]]:
        return {arm.name: arm.counters for arm in self.arms}

    @cached_property
    def failure_outcomes(self) -> dict[str, str]:
        """By arm, its failed runs' outcomes: ``oom, timeout``; ``lost`` if another run ended it."""
        outcomes: dict[str, list[str]] = {}
        for failure in self.failures:
            outcome = "lost" if failure.failed_by else failure.outcome
            outcomes.setdefault(failure.arm, []).append(outcome)
        return {arm: ", ".join(dict.fromkeys(names)) for arm, names in outcomes.items()}

    @cached_property
    def run_positions(self) -> dict[str, int]:
        """The position of every run in the cell's order (from 1), by the record's file."""
        files = {run.file for row in self.rows for arm in row.arms.values() for run in arm.runs}
        by_name = {parse_run_name(Path(file).stem): file for file in sorted(files)}
        blocks = {block for block, *_ in by_name}
        blocks |= {parse_run_name(failure.run)[0] for failure in self.failures}  # without a value
        starts = dict(zip(sorted(blocks), self.block_starts, strict=False))
        # Positions in a name count from the start of the block and include failed runs.
        return {file: starts[block] + place + 1 for (block, place, _), file in by_name.items()}

    @property
    def last_position(self) -> int:
        """The position of the last run; beyond the number of runs if a record was removed."""
        return max((self.design.num_runs, *self.run_positions.values()))

    @property
    def block_starts(self) -> list[int]:
        """The number of runs before each block."""
        return list(accumulate((len(arms) for arms in self.design.order), initial=0))[:-1]

    @property
    def qualities(self) -> dict[str, ArmQuality]:
        """Each arm's quality; empty if the workload scores no texts."""
        return {one.arm: one for one in self.quality or ()}
