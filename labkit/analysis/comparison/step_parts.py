"""Where the time went: the time of steps by part, and what makes the arms' times differ.

The times come from turns with clocks, which follow the measurement and decide nothing
(:mod:`labkit.workload.requests.clocked_serving`). Each run has one value per part: its time per
output token. Steps with and without prompt tokens are weighted as often as they occurred in the
measurement. Arms are compared by the permutation test of the metrics, in a family of their own:
intervals and p-values are adjusted over parts and arms.

A cause is named only of a difference that the study claims in a primary row: parts are the second
family of a sequence, each tested at alpha. So the probability of a cause where nothing differs is
at most alpha over all rows, arms and parts (gatekeeping: P. H. Westfall and A. Krishen, 2001).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np
from scipy.special import stdtrit

from labkit.analysis.comparison import counted_work
from labkit.analysis.comparison.arm_comparison import (
    ArmComparison,
    DecisionCriteria,
    compare_arm,
)
from labkit.analysis.comparison.observations import MetricRow, RunValue
from labkit.analysis.model.time_model import (
    HOST,
    MODEL,
    PART_NAMES,
    STALLS,
    ArmTime,
    PartDifference,
    PartShare,
    TimeDivision,
)
from labkit.analysis.number_format import round_significant
from labkit.records import Arm, Record

GROUPS: Mapping[str, tuple[str, ...]] = {
    "attention": ("attention",),
    "products": ("products",),
    "host": HOST,
}
TOTAL = "total"
# Parts that take longer if a step computes more rows.
WITH_ROWS = (*MODEL, "sample", "plan", "build")


def divide_time(
    arms: Sequence[Arm],
    records: Sequence[Record],
    criteria: DecisionCriteria,
    claimed: Collection[str],
) -> TimeDivision | None:
    """Return where the time went; None if no run of the baseline had turns with clocks.

    ``claimed``: the arms of which a primary metric's difference is claimed, so that it has a cause.
    """
    clocked = [r for r in records if r.ok and r.known_notes.get("step_parts")]
    parts = {record.run: part_times(record) for record in clocked}
    baseline = arms[0].name
    base = [parts[record.run] for record in clocked if record.arm == baseline]
    if not base:
        return None
    total_us = median(whole_us(times) for times in base)
    names = [name for name in PART_NAMES if any(name in times for times in parts.values())]
    rows = [_row(name, clocked, parts, total_us) for name in (*names, TOTAL)]
    clocks_pct, of_tokens_pct = _clocks(clocked)
    tested = max(1, sum(arm.role == "arm" for arm in arms))
    return TimeDivision(
        baseline=tuple(_share(name, (name,), base) for name in names),
        groups=tuple(
            _share(group, members, base)
            for group, members in GROUPS.items()
            if any(name in names for name in members)
        ),
        arms=tuple(
            _arm_time(
                compare_arm(
                    rows, arm.name, baseline, criteria, tested if arm.role == "arm" else 1
                ),
                rows, clocked, total_us, claimed,
            )
            for arm in arms[1:]
            if any(record.arm == arm.name for record in clocked)
        ),
        clocks_pct=clocks_pct,
        of_tokens_pct=of_tokens_pct,
        tokens=sum(int(r.known_notes["step_parts"]["output_tokens"]) for r in clocked),
    )  # fmt: skip


def part_times(record: Record) -> dict[str, float]:
    """Return the time of each part of a run in us per output token, as weighted in the run."""
    note, counters = record.known_notes["step_parts"], record.counters
    measured = {
        "decode": counters.get("steps.decode", 0.0),
        "prefill": counters.get("steps.prefill", 0.0) + counters.get("steps.mixed", 0.0),
    }
    tokens = counters.get("tokens.sampled", 0.0)
    if not tokens or any(not measured.get(kind) for kind in note["steps"]):
        measured, tokens = dict(note["steps"]), note["output_tokens"]
    times: dict[str, float] = {}
    for kind, by_part in note["parts_us"].items():
        weight = measured[kind] / note["steps"][kind] / tokens
        for part, us in by_part.items():
            times[part] = times.get(part, 0.0) + us * weight
    return times


def whole_us(times: Mapping[str, float]) -> float:
    """Return the time of all parts of a run. Stalls are apart, as in the metrics."""
    return sum(us for part, us in times.items() if part != STALLS)


def _row(
    name: str,
    records: Sequence[Record],
    parts: Mapping[str, Mapping[str, float]],
    total_us: float,
) -> MetricRow:
    """Return a part as a metric, compared by ratios: times have outliers.

    A part that takes no time in some run is compared by differences, in units of the whole time.
    """
    row = MetricRow("all", name, "us", "lower", primary=name != TOTAL)
    for record in records:
        times = parts[record.run]
        value = whole_us(times) if name == TOTAL else times.get(name, 0.0)
        row.arms.setdefault(record.arm, []).append(
            RunValue(record.block, record.position, f"runs/{record.run}.json", value)
        )
    row.unit_value = None if row.positive else total_us
    return row


def _share(name: str, members: Sequence[str], runs: Sequence[Mapping[str, float]]) -> PartShare:
    us = [sum(times.get(member, 0.0) for member in members) for times in runs]
    whole = [whole_us(times) for times in runs]
    return share_of(name, us, [100 * own / all_us for own, all_us in zip(us, whole, strict=True)])


def share_of(name: str, us: Sequence[float], pct: Sequence[float]) -> PartShare:
    """Return the median time, and the mean share with its t interval, within 0 and 100 %."""
    mean, low, high = float(np.mean(pct)), None, None
    if len(pct) > 1:
        half = float(stdtrit(len(pct) - 1, 0.975) * np.std(pct, ddof=1) / np.sqrt(len(pct)))
        low, high = max(0.0, mean - half), min(100.0, mean + half)
    rounded = map(round_significant, (median(us), mean, low, high))
    return PartShare(name, *rounded)  # type: ignore[arg-type]


def _arm_time(
    compared: Sequence[ArmComparison],
    rows: Sequence[MetricRow],
    records: Sequence[Record],
    total_us: float,
    claimed: Collection[str],
) -> ArmTime:
    *parts, total = (_difference(*pair, total_us) for pair in zip(rows, compared, strict=True))
    names = compared[0].baseline, compared[0].arm
    found = counted_work.changes(*([r.counters for r in records if r.arm == n] for n in names))
    counts = tuple(counted_work.sentences(found, 1.0 + (total.pct or 0.0) / 100))
    arm = ArmTime(names[1], tuple(parts), total, None, counts)
    first = arm.cause_part
    if first is None or arm.arm not in claimed:
        return arm
    slower = (first.difference_us or 0.0) > 0
    by_rows = counted_work.row_cause(found, slower) if first.part in WITH_ROWS else None
    return replace(arm, cause=by_rows or first.part)


def _difference(row: MetricRow, one: ArmComparison, total_us: float) -> PartDifference:
    """Return an arm's difference in one part in us, also if it was compared by ratios."""
    own, base = (median(v.value for v in row.arms[name]) for name in (one.arm, one.baseline))
    scale = (base if row.unit_value is None else total_us) / 100

    def us(pct: float | None) -> float | None:
        return None if pct is None else round_significant(pct * scale)

    low, high = one.ci_pct or (None, None)
    difference = us(one.effect_pct)
    return PartDifference(
        part=str(row.metric),
        us=round_significant(own) or 0.0,
        difference_us=difference,
        low_us=us(low),
        high_us=us(high),
        pct=None if difference is None else round_significant(100 * difference / total_us),
        p_adjusted=round_significant(one.p_adjusted),
    )


def _clocks(records: Sequence[Record]) -> tuple[float, float]:
    """Return what the clocks add to a step, and the share of the tokens that they timed (%).

    Both are medians over runs.
    """
    costs, shares = [], []
    for record in records:
        note = record.known_notes["step_parts"]
        spent = sum(map(whole_us, note["parts_us"].values()))
        costs.append(100 * note["clocks_us"] * sum(note["steps"].values()) / spent)
        tokens = record.counters.get("tokens.sampled") or note["output_tokens"]
        shares.append(min(100.0, 100 * note["output_tokens"] / tokens))
    return round_significant(median(costs)) or 0.0, round_significant(median(shares)) or 0.0
