"""Where the time went: the time of steps by part, and what makes the arms' times differ.

The times come from turns with clocks, which follow the measurement and decide nothing
(:mod:`labkit.workload.requests.post_run_profiling`). Each run has one value per part: its time per
output token. Steps with and without prompt tokens are weighted as often as they occurred in the
measurement. Arms are compared by the permutation test of the metrics, in a family of their own:
intervals and p-values are adjusted over parts and arms.

A cause is named only of a difference that the study claims in a primary row: parts are the second
family of a sequence, each tested at alpha. So the probability of a cause where nothing differs is
at most alpha over all rows, arms and parts (gatekeeping: P. H. Westfall and A. Krishen, 2001). The
counters say in words which work differs between an arm and the baseline.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np
from scipy.special import stdtrit

from labkit.analysis.comparison.arm_comparison import DecisionCriteria, compare_arm
from labkit.analysis.comparison.observations import MetricRow, RunValue
from labkit.analysis.model.result_row import Comparison
from labkit.analysis.model.step_part_times import (
    HOST,
    MODEL,
    PART_NAMES,
    STALLS,
    ArmTime,
    PartDifference,
    PartShare,
    TimeDivision,
)
from labkit.analysis.number_format import round_significant, significant_text
from labkit.records import Arm, Record

GROUPS: Mapping[str, tuple[str, ...]] = {
    "attention": ("attention",),
    "products": ("products",),
    "host": HOST,
}
TOTAL = "total"
# Parts that take longer if a step computes more rows.
WITH_ROWS = (*MODEL, "sample", "plan", "build")
Counters = Mapping[str, float]
Changes = Mapping[str, tuple[float, float]]  # medians of the baseline and of the arm, by count
MIN_PCT = 0.5
TOKENS, STEPS = "tokens.output", "steps.total"
# By count: its words, the counters that it sums, and what it is divided by ("x.*": a family).
COUNTS: Mapping[str, tuple[str, tuple[str, ...], str]] = {
    "steps": ("steps per output token", (STEPS,), TOKENS),
    "tokens per step": ("tokens per step", ("tokens.computed",), STEPS),
    "rows": ("rows per output token", ("tokens.computed", "tokens.padded"), TOKENS),
    "padding": ("padding rows per output token", ("tokens.padded",), TOKENS),
    "padded slots": ("padding slots attended per output token", ("kv.padded_slots",), TOKENS),
    "recomputation": ("recomputed tokens per output token", ("tokens.recomputed",), TOKENS),
    "preemptions": ("preemptions", ("preemptions",), ""),
    "prefix hits": ("prompt tokens from the prefix cache", ("prefix.hit_tokens",), ""),
    "accepted drafts": ("accepted draft tokens per step", ("spec.accepted",), STEPS),
    "bytes": ("bytes of attention per output token", ("attention.bytes",), TOKENS),
    "blocks": ("KV blocks visited per output token", ("attention.kv_blocks_visited",), TOKENS),
    "searches": ("search iterations per launch", ("attention.search_iterations",), "resolver.*"),
    "replays": ("replayed forwards per step", ("forward.replayed",), STEPS),
    "captures": ("graphs traced", ("compile.count",), ""),
    "shapes": ("new batch shapes", ("shape.new",), ""),
}
# Why the number of steps differs: the first of these that does, in the same direction (1), or in
# the other (-1: more of it, fewer steps).
STEP_REASONS = {
    "accepted drafts": (-1, "drafts were accepted {} times per step (baseline {})"),
    "preemptions": (1, "requests were preempted {} times (baseline {})"),
    "prefix hits": (-1, "the prefix cache had {} prompt tokens (baseline {})"),
    "tokens per step": (-1, "a step has {} tokens (baseline {})"),
}
ROW_CAUSES = {"padding": 1, "recomputation": 1, "prefix hits": -1}  # -1: more of it, fewer rows


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
    groups = {group: own for group, own in GROUPS.items() if not set(own).isdisjoint(names)}
    num_tested, compared = sum(arm.role == "arm" for arm in arms), []
    for arm in arms[1:]:
        if any(record.arm == arm.name for record in clocked):
            tested = num_tested if arm.role == "arm" else 1
            of_rows = compare_arm(rows, arm.name, baseline, criteria, tested)
            compared.append(_arm_time(of_rows, rows, clocked, total_us, claimed))
    return TimeDivision(
        baseline=tuple(_share(name, (name,), base) for name in names),
        groups=tuple(_share(group, members, base) for group, members in groups.items()),
        arms=tuple(compared),
        clocks_pct=clocks_pct,
        of_tokens_pct=of_tokens_pct,
        tokens=sum(int(r.known_notes["step_parts"]["output_tokens"]) for r in clocked),
    )


def part_times(record: Record) -> dict[str, float]:
    """Return the time of each part of a run in us per output token, as weighted in the run."""
    note, counters = record.known_notes["step_parts"], record.counters
    measured = {
        "decode": counters.get("steps.decode", 0.0),
        "prefill": counters.get("steps.prefill", 0.0) + counters.get("steps.mixed", 0.0),
    }
    tokens = record.output_tokens
    if not tokens or any(not measured.get(kind) for kind in note["steps"]):
        measured, tokens = dict(note["steps"]), note["output_tokens"]
    times: dict[str, float] = {}
    for kind, by_part in note["parts_us"].items():
        weight = measured[kind] / note["steps"][kind] / tokens
        times |= {part: times.get(part, 0.0) + us * weight for part, us in by_part.items()}
    return times


def whole_us(times: Mapping[str, float]) -> float:
    """Return the time of all parts of a run. Stalls are apart, as in the metrics."""
    return sum(us for part, us in times.items() if part != STALLS)


def _row(
    name: str, records: Sequence[Record], parts: Mapping[str, Mapping[str, float]], total_us: float
) -> MetricRow:
    """Return a part as a metric, compared by ratios or, if some run has none, by differences."""
    row = MetricRow("all", name, "us", "lower", primary=name != TOTAL)
    for record in records:
        times = parts[record.run]
        value = whole_us(times) if name == TOTAL else times.get(name, 0.0)
        run = RunValue(record.block, record.position, f"runs/{record.run}.json", value)
        row.arms.setdefault(record.arm, []).append(run)
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
    compared: Sequence[Comparison],
    rows: Sequence[MetricRow],
    records: Sequence[Record],
    total_us: float,
    claimed: Collection[str],
) -> ArmTime:
    *parts, total = (_difference(*pair, total_us) for pair in zip(rows, compared, strict=True))
    names = compared[0].baseline, compared[0].arm
    found = _count_changes(*([_counters(r) for r in records if r.arm == n] for n in names))
    counts = tuple(_count_sentences(found, 1.0 + (total.pct or 0.0) / 100))
    arm = ArmTime(names[1], tuple(parts), total, None, counts)
    first = arm.cause_part
    if first is None or arm.arm not in claimed:
        return arm
    slower = (first.difference_us or 0.0) > 0
    by_rows = row_cause(found, slower) if first.part in WITH_ROWS else None
    return replace(arm, cause=by_rows or first.part)


def _difference(row: MetricRow, one: Comparison, total_us: float) -> PartDifference:
    """Return an arm's difference in one part in us, also if it was compared by ratios."""
    own, base = (median(v.value for v in row.arms[name]) for name in (one.arm, one.baseline))
    scale = (base if row.unit_value is None else total_us) / 100

    def us(pct: float | None) -> float | None:
        return None if pct is None else round_significant(pct * scale)

    difference = us(one.effect_pct)
    return PartDifference(
        part=str(row.metric),
        us=round_significant(own) or 0.0,
        difference_us=difference,
        low_us=us(one.ci_low_pct),
        high_us=us(one.ci_high_pct),
        pct=None if difference is None else round_significant(100 * difference / total_us),
        p_adjusted=round_significant(one.p_adjusted),
    )


def _clocks(records: Sequence[Record]) -> tuple[float, float]:
    """Return what clocks add to a step and what share of tokens they timed: medians of runs (%)."""
    costs, shares = [], []
    for record in records:
        note = record.known_notes["step_parts"]
        spent = sum(map(whole_us, note["parts_us"].values()))
        costs.append(100 * note["clocks_us"] * sum(note["steps"].values()) / spent)
        tokens = record.output_tokens or note["output_tokens"]
        shares.append(min(100.0, 100 * note["output_tokens"] / tokens))
    return round_significant(median(costs)) or 0.0, round_significant(median(shares)) or 0.0


def _counters(record: Record) -> Counters:
    """Return a run's counters. ``TOKENS`` is derived for older records."""
    tokens = record.output_tokens
    return record.counters if tokens is None else {**record.counters, TOKENS: tokens}


def _value(counters: Counters, tops: Sequence[str], below: str) -> float | None:
    known = [counters[name] for name in tops if name in counters]
    if not below or not known:
        return sum(known) if known else None
    family = below.removesuffix("*") if below.endswith("*") else None
    divisors = (v for n, v in counters.items() if n == below or (family and n.startswith(family)))
    whole = sum(divisors)
    return sum(known) / whole if whole else None


def _count_changes(base: Sequence[Counters], arm: Sequence[Counters]) -> Changes:
    """Return the counts that differ; ``base``, ``arm``: the counters of their runs.

    A count differs if no run of the arm has a value that a run of the baseline has or passes, and
    if the medians differ by more than ``MIN_PCT``. What a run did not count is 0 if both arms have
    the same engine, else unknown.
    """
    found = {}
    engines = [{n for run in runs for n in run if n.startswith("engine.")} for runs in (base, arm)]
    absent = [0.0] if engines[0] == engines[1] else []
    for name, (_, tops, below) in COUNTS.items():
        values = [[_value(run, tops, below) for run in runs] for runs in (base, arm)]
        old, new = (
            [v for one in side for v in (absent if one is None else [one])] for side in values
        )
        apart = old and new and (max(old) < min(new) or max(new) < min(old))
        if apart and abs(median(new) - median(old)) > MIN_PCT / 100 * abs(median(old)):
            found[name] = median(old), median(new)
    return found


def _count_sentences(found: Changes, time_ratio: float) -> list[str]:
    """Describe the counts that differ. ``time_ratio``: time per token over the baseline's."""
    texts = []
    for name, (old, new) in found.items():
        values = f"{significant_text(new, 3)}, not {significant_text(old, 3)}"
        amount = f"{significant_text(abs(100 * (new / old - 1)), 2)} % " if old else ""
        more = f"{amount}{'more' if new > old else 'fewer'} " if old else ""
        if name != "steps" or not old:
            texts.append(f"{more}{COUNTS[name][0]} ({values})")
            continue
        reasons = (
            text.format(*(significant_text(found[why][side], 3) for side in (1, 0)))
            for why, (sign, text) in STEP_REASONS.items()
            if why in found and (found[why][1] > found[why][0]) == ((new > old) == (sign > 0))
        )
        reason = "".join(f", because {one}" for one in [*reasons][:1])
        each = 100 * (time_ratio * old / new - 1)
        longer = f"{significant_text(abs(each), 2)} % {'longer' if each > 0 else 'less time'}"
        texts.append(f"{more}steps{reason}; each step takes {longer}")
    return texts


def row_cause(found: Changes, slower: bool) -> str | None:
    """Return the work that explains why the model's time changed: it changed the number of rows.

    None if the rows per output token did not change in the direction of the time.
    """
    old, new = found.get("rows", (0.0, 0.0))
    if old == new or (new > old) != slower:
        return None
    same = (
        name
        for name, sign in ROW_CAUSES.items()
        if name in found and (found[name][1] > found[name][0]) == (slower == (sign > 0))
    )
    return next(same, None)
