"""What the counters say: the work that differs between an arm and the baseline, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from labkit.analysis.number_format import significant_text

Counters = Mapping[str, float]
Changes = Mapping[str, tuple[float, float]]  # medians of the baseline and of the arm, by count
MIN_PCT = 0.5
TOKENS, STEPS = "tokens.sampled", "steps.total"
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


def _value(counters: Counters, tops: Sequence[str], below: str) -> float | None:
    known = [counters[name] for name in tops if name in counters]
    if not below or not known:
        return sum(known) if known else None
    family = below.removesuffix("*") if below.endswith("*") else None
    divisors = (v for n, v in counters.items() if n == below or (family and n.startswith(family)))
    whole = sum(divisors)
    return sum(known) / whole if whole else None


def changes(base: Sequence[Counters], arm: Sequence[Counters]) -> Changes:
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


def sentences(found: Changes, time_ratio: float) -> list[str]:
    """Describe the counts that differ, the number and the time of steps first.

    ``time_ratio``: the arm's time per output token as a multiple of the baseline's.
    """
    texts = []
    for name, (old, new) in found.items():
        values = significant_text(new, 3), significant_text(old, 3)
        if not old:
            texts.append(f"{COUNTS[name][0]} ({values[0]}, not 0)")
            continue
        amount = f"{significant_text(abs(100 * (new / old - 1)), 2)} %"
        more = "more" if new > old else "fewer"
        if name != "steps":
            texts.append(f"{amount} {more} {COUNTS[name][0]} ({values[0]}, not {values[1]})")
            continue
        reasons = (
            text.format(*(significant_text(found[why][side], 3) for side in (1, 0)))
            for why, (sign, text) in STEP_REASONS.items()
            if why in found and (found[why][1] > found[why][0]) == ((new > old) == (sign > 0))
        )
        reason = "".join(f", because {one}" for one in [*reasons][:1])
        each = 100 * (time_ratio * old / new - 1)
        longer = "longer" if each > 0 else "less time"
        texts.append(
            f"{amount} {more} steps{reason}; each step takes "
            f"{significant_text(abs(each), 2)} % {longer}"
        )
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
