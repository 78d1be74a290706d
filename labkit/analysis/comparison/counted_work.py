"""What the counters say: the work that differs between an arm and the baseline, in words.

A count differs if no run of the arm has a value that a run of the baseline has or passes, and if
the medians differ by more than ``MIN_PCT``: counts of the same requests hardly vary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from labkit.analysis.number_format import significant_text

Counters = Mapping[str, float]
MIN_PCT = 0.5


@dataclass(frozen=True)
class Count:
    """A count of work: its name in a sentence, and its value from a run's counters.

    ``value`` returns None if the run did not count it.
    """

    words: str
    value: Callable[[Counters], float | None]


def _per(name: str, divisor: str) -> Callable[[Counters], float | None]:
    def value(counters: Counters) -> float | None:
        below = counters.get(divisor)
        return counters[name] / below if below and name in counters else None

    return value


def _rows(counters: Counters) -> float | None:
    sampled = counters.get("tokens.sampled")
    rows = counters.get("tokens.computed", 0.0) + counters.get("tokens.padded", 0.0)
    return rows / sampled if sampled else None


def _searched(counters: Counters) -> float | None:
    launches = sum(value for name, value in counters.items() if name.startswith("resolver."))
    found = counters.get("attention.search_iterations")
    return found / launches if launches and found is not None else None


SAMPLED, STEPS = "tokens.sampled", "steps.total"
COUNTS: Mapping[str, Count] = {
    "steps": Count("steps per output token", _per(STEPS, SAMPLED)),
    "tokens per step": Count("tokens per step", _per("tokens.computed", STEPS)),
    "rows": Count("rows per output token", _rows),
    "padding": Count("padding rows per output token", _per("tokens.padded", SAMPLED)),
    "padded slots": Count("padding slots attended per output token",
                          _per("kv.padded_slots", SAMPLED)),
    "recomputation": Count("recomputed tokens per output token",
                           _per("tokens.recomputed", SAMPLED)),
    "preemptions": Count("preemptions", lambda counters: counters.get("preemptions")),
    "prefix hits": Count("prompt tokens from the prefix cache",
                         lambda counters: counters.get("prefix.hit_tokens")),
    "accepted drafts": Count("accepted draft tokens per step", _per("spec.accepted", STEPS)),
    "bytes": Count("bytes of attention per output token", _per("attention.bytes", SAMPLED)),
    "blocks": Count("KV blocks visited per output token",
                    _per("attention.kv_blocks_visited", SAMPLED)),
    "searches": Count("search iterations per launch", _searched),
    "replays": Count("replayed forwards per step", _per("forward.replayed", STEPS)),
    "captures": Count("graphs traced", lambda counters: counters.get("compile.count")),
    "shapes": Count("new batch shapes", lambda counters: counters.get("shape.new")),
}  # fmt: skip
# Why there are fewer or more steps, and which work makes a step's rows differ: the first that does.
STEP_REASONS = {
    "accepted drafts": "drafts were accepted {arm} times per step (baseline {base})",
    "preemptions": "requests were preempted {arm} times (baseline {base})",
    "prefix hits": "the prefix cache had {arm} prompt tokens (baseline {base})",
    "tokens per step": "a step has {arm} tokens (baseline {base})",
}
ROW_CAUSES = ("padding", "recomputation", "prefix hits")


@dataclass(frozen=True)
class CountChange:
    """A count that differs: the medians over the runs of the baseline and of the arm."""

    name: str
    base: float
    arm: float

    @property
    def ratio(self) -> float | None:
        """The arm's count as a multiple of the baseline's; None if that is 0."""
        return self.arm / self.base if self.base else None

    def text(self) -> str:
        """Describe the change: ``12 % fewer steps per output token (0.0941, not 0.107)``."""
        words, more = COUNTS[self.name].words, "more" if self.arm > self.base else "fewer"
        values = f"({significant_text(self.arm, 3)}, not {significant_text(self.base, 3)})"
        if self.ratio is None:
            return f"{words} {values}"
        return f"{significant_text(abs(100 * (self.ratio - 1)), 2)} % {more} {words} {values}"


def changes(base: Sequence[Counters], arm: Sequence[Counters]) -> dict[str, CountChange]:
    """Return the counts that differ, by name. ``base``, ``arm``: the counters of their runs."""
    found = {}
    engines = [{n for run in runs for n in run if n.startswith("engine.")} for runs in (base, arm)]
    absent = [0.0] if engines[0] == engines[1] else []  # what stands for a count that a run lacks
    for name, count in COUNTS.items():
        values = [[count.value(run) for run in runs] for runs in (base, arm)]
        known = [[v for one in side for v in (absent if one is None else [one])] for side in values]
        if not all(known):
            continue
        apart = max(known[0]) < min(known[1]) or max(known[1]) < min(known[0])
        old, new = map(median, known)
        if apart and abs(new - old) > MIN_PCT / 100 * abs(old):
            found[name] = CountChange(name, old, new)
    return found


def step_sentence(found: Mapping[str, CountChange], time_ratio: float) -> str | None:
    """Say how the number of steps and the time of a step changed; None if the number did not.

    ``time_ratio``: the arm's time per output token as a multiple of the baseline's.
    """
    steps = found.get("steps")
    if steps is None or not steps.ratio:
        return None
    reasons = (
        text.format(arm=significant_text(one.arm, 3), base=significant_text(one.base, 3))
        for name, text in STEP_REASONS.items()
        if (one := found.get(name)) is not None
    )
    reason = next(reasons, None)
    each = 100 * (time_ratio / steps.ratio - 1)
    fewer = "fewer" if steps.ratio < 1 else "more"
    return (
        f"{significant_text(abs(100 * (steps.ratio - 1)), 2)} % {fewer} steps"
        f"{f', because {reason}' if reason else ''}; each step takes "
        f"{significant_text(abs(each), 2)} % {'longer' if each > 0 else 'less time'}"
    )


def row_cause(found: Mapping[str, CountChange], slower: bool) -> str | None:
    """Return the work that explains why the model's time changed, or None.

    That is padding, recomputation or prefix hits, if the rows per output token changed in the
    direction of the time.
    """
    rows = found.get("rows")
    if rows is None or (rows.arm > rows.base) != slower:
        return None
    same = (
        found[name]
        for name in ROW_CAUSES
        if name in found
        and (found[name].arm > found[name].base) == (slower != (name == "prefix hits"))
    )
    return next((one.name for one in same), None)
