"""What arms could reach at best and did: prefix hits, accepted drafts, padding, and controls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from labkit.records import Record

CHANCE = 0.01  # of random drafts more are not accepted by chance
# What pads a batch: whose count of padding is shown where it is 0, too.
PADS = ("layout.padded", "engine.mlx_lm")
# Rows beyond the requests' own, whatever their lengths.
BY_SHAPE = ("decode_shape.bucketed", "decode_shape.fixed")


@dataclass(frozen=True)
class AttainedRates:
    """What an arm could reach and did, as shares; None: it has nothing of the kind.

    ``hits_allowed``: prompt tokens that an unlimited cache would find, ``hits``: that were found;
    ``accepted``: drafted tokens that were right. ``padded``: rows computed for no token,
    ``rectangle``: of one rectangle of all requests, as long as the longest, what holds none.
    ``alike``: the control, no row can be padding: requests of one length, prompts of one step.
    ``unshared`` and ``random``: the arm is the control of hits, or of acceptance.
    """

    arm: str
    hits_allowed: float | None
    hits: float | None
    accepted: float | None
    rectangle: float | None
    padded: float | None
    alike: bool
    unshared: bool
    random: bool

    def disagreements(self) -> Iterator[str]:
        """Name what cannot be: a count that is not what it is called."""
        if self.hits is not None and self.hits_allowed is not None:
            if self.unshared and self.hits > 0:
                yield f"{self.arm}: {self.hits:.1%} of its prompts hit, and no two begin alike"
            elif self.hits > self.hits_allowed:
                yield (
                    f"{self.arm}: {self.hits:.1%} of its prompts hit, and they share "
                    f"{self.hits_allowed:.1%}"
                )
        if self.alike and (self.padded or 0.0) > 0:
            share = f"{self.padded:.1%}"
            yield f"{self.arm}: {share} of its rows are padding, and all requests are alike"
        if self.random and (self.accepted or 0.0) > CHANCE:
            yield f"{self.arm}: {self.accepted:.1%} of its drafts are right, and they are random"


def attained_rates(names: Sequence[str], records: Sequence[Record]) -> list[AttainedRates]:
    """Return which of these arms have something to reach, as medians over their runs."""
    arms: dict[str, list[Record]] = {arm: [] for arm in names}
    for record in records:
        if record.ok and record.arm in arms and "sharing" in record.notes:
            arms[record.arm].append(record)
    found = [_reached(arm, runs) for arm, runs in arms.items() if runs]
    return [one for one in found if not one.hits is one.accepted is one.padded is None]


def _reached(arm: str, runs: Sequence[Record]) -> AttainedRates:
    sharing, counters = runs[0].notes["sharing"], [run.counters for run in runs]
    caches = any(
        counts.get("prefix.queried_tokens") and not counts.get("prefix_cache.none")
        for counts in counters
    )
    asked = sharing["prompt_tokens"]
    # A preempted request looks its own prompt up again, which is no sharing.
    alone = caches and not any(counts.get("preemptions") for counts in counters)
    found = [counts.get("prefix.hit_tokens", 0.0) / asked for counts in counters]
    return AttainedRates(
        arm=arm,
        hits_allowed=sharing["shared_tokens"] / asked if alone else None,
        hits=median(found) if caches else None,
        accepted=_share(counters, "spec.accepted", "spec.drafted"),
        rectangle=_rectangle(runs[0].notes.get("rectangle"), counters),
        padded=_share(counters, "tokens.padded", "tokens.padded", "tokens.computed"),
        alike=_alike(runs[0].notes.get("rectangle"), counters),
        unshared=bool(sharing["unshared"]) and runs[0].notes.get("cache_state") != "warm",
        random=any(counts.get("spec.random") for counts in counters),
    )


def _rectangle(
    rectangle: Mapping[str, int] | None, counters: Sequence[Mapping[str, float]]
) -> float | None:
    """Return the share of a rectangle that holds no token; None of an arm that pads otherwise."""
    pads = any(counts.get(name) for counts in counters for name in PADS)
    if rectangle is None or not pads or any(c.get(name) for c in counters for name in BY_SHAPE):
        return None
    return 1 - rectangle["tokens"] / rectangle["slots"]


def _alike(rectangle: Mapping[str, int] | None, counters: Sequence[Mapping[str, float]]) -> bool:
    """Tell whether nothing may be padded: none waits while others' prompts are computed."""
    if rectangle is None or rectangle["tokens"] < rectangle["slots"]:
        return False
    return all(c.get("steps.prefill") == 1 and not any(map(c.get, BY_SHAPE)) for c in counters)


def _share(counters: Sequence[Mapping[str, float]], part: str, *of: str) -> float | None:
    """Return the median share of a counter in others; None where it or they are 0 throughout."""
    known = [
        counts.get(part, 0.0) / whole
        for counts in counters
        if (whole := sum(counts.get(name, 0.0) for name in of))
    ]
    zeros = part in of and not any(c.get(name) for c in counters for name in PADS)
    if not known or (zeros and not any(known)):
        return None
    return median(known)
