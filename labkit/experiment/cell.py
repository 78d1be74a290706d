"""A cell before analysis: the arms of one comparison, its design, its plan of blocks, its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from labkit.config import Design, Isolation, State, require
from labkit.experiment.permuted_blocks import Run, schedule
from labkit.records import Arm, RecordError, StudyPath

MAX_ROUNDS = 1000  # the largest factor of a case in earlier versions
UNITS = "all"  # the case of all requests or windows of a run
UNIT_OPTIONS = {"requests": "num_requests", "scoring": "num_windows"}
ALLOCATION = "allocation.json"  # of a cell whose blocks or rounds follow from design.time


@dataclass(frozen=True)
class CellPaths:
    """Paths of the files in a cell's folder ``dir``.

    A worker writes its record to ``runs/pending``. The runner checks it and moves it to ``runs``.
    Files of runs that are repeated go to ``runs/abandoned``. ``arms_dir`` is the folder of the
    arms' files within the cell's.
    """

    dir: Path
    arms_dir: str = "arms"

    @property
    def arms(self) -> Path:
        return self.dir / self.arms_dir

    @property
    def runs(self) -> Path:
        return self.dir / "runs"

    @property
    def pending(self) -> Path:
        return self.runs / "pending"

    @property
    def abandoned(self) -> Path:
        return self.runs / "abandoned"

    def arm(self, name: str) -> Path:
        return self.arms / f"{name}.json"

    def record(self, run: Run) -> Path:
        return self.runs / f"{run.name}.json"

    def pending_record(self, run: Run) -> Path:
        return self.pending / f"{run.name}.json"

    def log(self, run: Run) -> Path:
        return self.runs / f"{run.name}.log"

    def move_to_abandoned(self, path: Path) -> Path:
        """Move a file to ``runs/abandoned`` under an unused name, and return its new path."""
        self.abandoned.mkdir(parents=True, exist_ok=True)
        target, number = self.abandoned / path.name, 1
        while target.exists():
            target = self.abandoned / f"{path.stem}~{number}{path.suffix}"
            number += 1
        return path.rename(target)


@dataclass(frozen=True)
class BlockPlan:
    """The rounds of each case in a block of kernel runs, and what they cost by the pilot."""

    rounds: Mapping[str, int]  # by case, as are the costs
    start_s: float = 0.0  # what a block costs besides its cases
    round_s: Mapping[str, float] = field(default_factory=dict)
    warm_up_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The seconds of the block."""
        fixed_s = self.start_s + sum(self.warm_up_s.get(case, 0.0) for case in self.rounds)
        return fixed_s + sum(n * self.round_s.get(case, 0.0) for case, n in self.rounds.items())

    def without(self, cases: Collection[str]) -> BlockPlan:
        left = {case: count for case, count in self.rounds.items() if case not in cases}
        return replace(self, rounds=left)


@dataclass(frozen=True)
class ReadyCell:
    """One cell, ready to run."""

    dir: Path
    name: str
    arms: tuple[Arm, ...]  # the baseline first, the control (if any) last
    design: Design  # the constructor replaces it by its :func:`_normalized_design`
    seed: int
    question: str = ""
    published: Any = None  # an article's numbers, shown beside the measured ones
    scale: str | None = None  # None if the experiment has no scales
    # The primary metrics, the most important first; empty: those that the records name.
    metrics: tuple[str, ...] = ()
    # The options whose combinations of values are the arms: {option: [values]}.
    sweep: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()  # such as ``workload=chat``
    config_dirs: tuple[str, ...] = ()  # of the user's files that the command named
    timed: bool = False  # whether blocks or rounds have followed from ``design.time``
    said_s: float = 0.0  # that the user was told the blocks take; 0 if none were
    # By case for which the time does not suffice, the seconds that deciding it would take.
    estimates: Mapping[str, float] = field(default_factory=dict)
    # Whether design.blocks is the fewest that can claim something, and more may follow from the
    # time; whether such blocks have a look before the last one; whether the number of requests or
    # windows in a run may follow from the time, too.
    blocks_from_time: bool = False
    ends_early: bool = True
    units_from_time: bool = False
    # By block, the plan from that block on. Empty: workload.repeats of the arms, unless it is null,
    # when the plans still have to be found.
    plans: Mapping[int, BlockPlan] = field(default_factory=dict)
    arms_dir: str = "arms"  # in ``dir``, where workers read the arms

    def __post_init__(self) -> None:
        roles = [arm.role for arm in self.arms]
        if roles.count("baseline") != 1 or roles.count("control") > 1:
            raise ValueError(
                f"cell {self.name}: there must be exactly one baseline and at most one control"
            )
        if self.design.isolation is Isolation.auto:
            raise ValueError(f"cell {self.name}: isolation=auto must be resolved first")
        names = [arm.name for arm in self.arms]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"cell {self.name}: two arms are named {name!r}")
        object.__setattr__(self, "design", _normalized_design(self.design))

    @property
    def paths(self) -> CellPaths:
        return CellPaths(self.dir, self.arms_dir)

    @property
    def tested_arms(self) -> int:
        """The number of arms that are tested together; the settings of a sweep are ranked."""
        return 1 if self.sweep else max(1, sum(arm.role == "arm" for arm in self.arms))

    @property
    def rounds_from_time(self) -> bool:
        """Whether the cases' rounds, or the requests of a run, have to be found."""
        workload = self.arms[0].config.get("workload", {})
        rounds = workload.get("kind") == "kernel" and workload.get("repeats") is None
        return (rounds or self.counts_units) and not self.plans

    @property
    def counts_units(self) -> bool:
        """Whether the number of requests or windows in a run follows from ``design.time``."""
        timed = self.units_from_time and self.design.time is not None
        return timed and all(_open_units(arm) for arm in self.arms)

    @property
    def units(self) -> int | None:
        """The requests or windows of every run, if their number has followed from the time."""
        plan = self.plan(0)
        return plan.rounds[UNITS] if self.counts_units and plan is not None else None

    @property
    def window_looks(self) -> bool:
        """Whether looks at limits on quality decide how many windows a run scores."""
        return self.counts_units and bool(self.arms[0].quality)

    @property
    def follows_time(self) -> bool:
        return self.blocks_from_time or self.rounds_from_time

    @property
    def cases(self) -> list[str]:
        workloads = [arm.config.get("workload", {}) for arm in self.arms]
        return list(dict.fromkeys(case["name"] for w in workloads for case in w.get("cases", ())))

    def rows_of(self, cases: Iterable[str]) -> list[str]:
        """Return the names of cases in records and rows: a case has two with ``state=both``."""
        suffixes = self._row_suffixes
        return [f"{case}{suffix}" for case in cases for suffix in suffixes]

    def cases_of(self, rows: Iterable[str]) -> list[str]:
        """Return the cases of rows, without duplicates; see ``rows_of``."""
        names = list(rows)
        for suffix in self._row_suffixes:
            names = [name.removesuffix(suffix) for name in names]
        return list(dict.fromkeys(names))

    @property
    def _row_suffixes(self) -> tuple[str, ...]:
        both = self.arms[0].config.get("workload", {}).get("state") == State.both.value
        return tuple(f" ({state.value})" for state in (State.hot, State.cold)) if both else ("",)

    def plan(self, block: int) -> BlockPlan | None:
        """Return the plan of a block, or None if the arms fix their rounds."""
        start = max((start for start in self.plans if start <= block), default=None)
        return None if start is None else self.plans[start]

    def with_plan(self, plan: BlockPlan) -> ReadyCell:
        """Return the cell whose arms measure a block's rounds.

        A case that the pilot did not measure, such as one that is too large, stays in it: its runs
        say why it is skipped.
        """
        planned = self.plans[min(self.plans)].rounds
        others = dict.fromkeys((case for case in self.cases if case not in planned), 1)
        return self.with_rounds({**others, **plan.rounds})

    @property
    def with_fixed_numbers(self) -> ReadyCell:
        """The cell whose arms are prepared, and run if no plan says otherwise (`fixed_numbers`)."""
        arms = tuple(replace(arm, config=fixed_numbers(arm.config)) for arm in self.arms)
        return self if arms == self.arms else replace(self, arms=arms, arms_dir="rounds/fixed")

    def with_rounds(self, rounds: Mapping[str, int]) -> ReadyCell:
        """Return the cell whose arms measure the named cases, each for so many rounds."""
        arms = tuple(replace(arm, config=_with_rounds(arm.config, rounds)) for arm in self.arms)
        text = json.dumps(rounds, sort_keys=True)
        folder = f"rounds/{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        return replace(self, arms=arms, arms_dir=folder)

    def arm(self, name: str) -> Arm:
        return {arm.name: arm for arm in self.arms}[name]

    def schedule(self) -> list[Run]:
        names = [arm.name for arm in self.arms]
        return schedule(names, self.design.blocks, self.design.runs_per_block, self.seed)

    def schedule_after_looks(self, kept: Mapping[int, Sequence[str]]) -> list[Run]:
        """Return the runs that remain when interim looks have dropped arms, in order.

        ``kept``: for each look that dropped arms, the look's number of blocks and the names of the
        arms that remain.
        """
        stages = {0: [arm.name for arm in self.arms], **kept}
        starts = sorted(stages)
        ends = [*starts[1:], self.design.blocks]
        return [
            run
            for start, end in zip(starts, ends, strict=True)
            for run in schedule(stages[start], end, self.design.runs_per_block, self.seed)
            if run.block >= start
        ]

    @property
    def stopping_points(self) -> tuple[int, ...]:
        """The numbers of blocks after which the cell may end: its looks or, without any, the last.

        Looks after the last block are left out.
        """
        looks = tuple(look.blocks for look in self.design.looks)
        return tuple(n for n in looks if n <= self.design.blocks) or (self.design.blocks,)


def with_units(cell: StudyPath, arm: Arm) -> Arm:
    """Return an arm with the requests or windows that followed from the time of the cell ``cell``.

    Raises ``RecordError`` if the cell's allocation does not say how many.
    """
    workload, path = arm.config.get("workload") or {}, cell / ALLOCATION
    option = UNIT_OPTIONS.get(workload.get("kind", ""), "")
    if workload.get(option) != 0 or not path.is_file():
        return arm
    try:
        cases = {case["case"]: case for case in json.loads(path.read_bytes())["cases"]}
        number = int(cases[UNITS]["rounds"])
    except (ValueError, KeyError, TypeError):
        raise RecordError(f"{path}: it does not say how many {option} a run had") from None
    return replace(arm, config={**arm.config, "workload": {**workload, option: number}})


def _open_units(arm: Arm) -> bool:
    """Return whether a run of an arm may have any number of its requests or windows."""
    workload = arm.config.get("workload", {})
    kind = workload.get("kind")
    if workload.get(UNIT_OPTIONS.get(kind, ""), 1) != 0:
        return False
    if kind == "scoring":
        return bool(arm.quality)
    arrivals = workload.get("arrivals", {}).get("kind")
    return not workload.get("per_request") and arrivals not in ("at_once", "trace")


def fixed_numbers(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an arm's config with numbers that workers of any version read.

    Cases whose rounds follow from the time have one round. Requests and windows that follow from it
    are all of them, as null says in every version and 0 only since they may follow from the time.
    """
    workload = config.get("workload", {})
    if workload.get(UNIT_OPTIONS.get(workload.get("kind"), "")) == 0:
        return _with_rounds(config, {UNITS: None})
    if workload.get("kind") == "kernel" and workload.get("repeats") is None:
        return _with_rounds(config, {case["name"]: 1 for case in workload.get("cases", ())})
    return config


def _with_rounds(config: Mapping[str, Any], rounds: Mapping[str, int | None]) -> Mapping[str, Any]:
    """Return an arm's config with so many rounds of each case, or requests or windows."""
    workload = config["workload"]
    if (option := UNIT_OPTIONS.get(workload["kind"])) is not None:
        return {**config, "workload": {**workload, option: rounds[UNITS]}}
    cases = [
        {**case, "factor": rounds[case["name"]]}
        for case in workload["cases"]
        if case["name"] in rounds
    ]
    return {**config, "workload": {**workload, "repeats": 1, "cases": cases}}


def _normalized_design(design: Design) -> Design:
    """Return a design with an explicit final look.

    Two runs of an arm in one process are refused: they are not independent, as properties of a
    whole process (where its code and memory lie) affect every run in it.
    """
    runs, isolation = design.runs_per_block, design.isolation
    require(
        runs == 1 or isolation is Isolation.process,
        f"design.runs_per_block={runs}: arms that take turns (design.isolation="
        f"{isolation.value}) run once per block; set design.runs_per_block=1 and "
        f"design.blocks={design.blocks * runs}, or design.isolation=process",
    )
    return replace(design, looks=design.all_looks)
