"""An arm's rates of prefix hits, accepted drafts and padding, against the attainable ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from labkit.records import Record
from labkit.records.record_notes_schema import RectangleNote, SharingNote

MAX_CHANCE_ACCEPTANCE = 0.01  # share of random drafts that may be accepted by chance
# Counters of layouts that pad a batch: their padding is shown even if it is 0.
PADDING_LAYOUTS = ("layout.padded", "engine.mlx_lm")
# Counters of decode shapes that add rows even if all requests have the same length.
PADDED_SHAPES = ("decode_shape.bucketed", "decode_shape.captured", "decode_shape.fixed")


@dataclass(frozen=True)
class AttainedRates:
    """An arm's rates as shares, 0 to 1; a rate that does not apply to the arm is None.

    - Prefix cache: ``hits`` is the share of prompt tokens that hit, ``attainable_hits`` the share
      that an unlimited cache would hit, ``max_hits`` the same if the prompts repeat all answers.
    - Speculation: ``accepted`` is the share of drafted tokens that were accepted.
    - Padding: ``padded`` is the share of computed rows that hold no token. ``rectangle`` is what
      that share would be if all requests were padded to the longest in one batch.

    Three flags mark arms with a rate that must be about 0. ``equal_lengths``: all requests have the
    same length and a single step prefills all prompts, so there is no padding. ``unshared``: no two
    prompts share a prefix, so there are no hits. ``random``: drafts are random, so hardly any draft
    is accepted.
    """

    arm: str
    attainable_hits: float | None
    max_hits: float | None
    hits: float | None
    accepted: float | None
    rectangle: float | None
    padded: float | None
    equal_lengths: bool
    unshared: bool
    random: bool

    def impossible_counts(self) -> Iterator[str]:
        """Yield a message for each impossible rate, which shows that a counter is wrong."""
        if self.hits is not None and self.max_hits is not None:
            hits = f"{self.arm}: {self.hits:.1%} of its prompt tokens hit the prefix cache, but"
            most = f"{self.max_hits:.1%} are shared with an earlier prompt and its answer"
            if self.unshared and self.hits > 0:
                yield f"{hits} no two prompts share a prefix"
            elif self.hits > self.max_hits:
                yield f"{hits} at most {most}"
        if self.equal_lengths and (self.padded or 0.0) > 0:
            yield (
                f"{self.arm}: {self.padded:.1%} of its rows are padding, but all requests have the "
                "same length"
            )
        if self.random and (self.accepted or 0.0) > MAX_CHANCE_ACCEPTANCE:
            yield (
                f"{self.arm}: {self.accepted:.1%} of its draft tokens are accepted, but the "
                "drafts are random"
            )


def hit_and_acceptance_rates(
    names: Sequence[str], records: Sequence[Record]
) -> list[AttainedRates]:
    """Return the rates (medians over runs) of the arms to which any rate applies."""
    arms: dict[str, list[Record]] = {arm: [] for arm in names}
    for record in records:
        if record.ok and record.arm in arms and "sharing" in record.known_notes:
            arms[record.arm].append(record)
    rates = [_rates(arm, runs) for arm, runs in arms.items() if runs]
    return [one for one in rates if not one.hits is one.accepted is one.padded is None]


def _rates(arm: str, runs: Sequence[Record]) -> AttainedRates:
    sharing, counters = runs[0].known_notes["sharing"], [run.counters for run in runs]
    caches = any(
        counts.get("prefix.queried_tokens") and not counts.get("prefix_cache.none")
        for counts in counters
    )
    prompt_tokens = sharing["prompt_tokens"]
    # In earlier records a preempted request's hits on its own tokens count, too.
    known = caches and not any(counts.get("preemptions") for counts in counters)
    hits = [counts.get("prefix.hit_tokens", 0.0) / prompt_tokens for counts in counters]
    return AttainedRates(
        arm=arm,
        attainable_hits=sharing["shared_tokens"] / prompt_tokens if known else None,
        max_hits=median(_max_hits(sharing, run) for run in runs) if known else None,
        hits=median(hits) if caches else None,
        accepted=_share(counters, "spec.accepted", "spec.drafted"),
        rectangle=_rectangle(runs[0].known_notes.get("rectangle"), counters),
        padded=_share(counters, "tokens.padded", "tokens.padded", "tokens.computed"),
        equal_lengths=_equal_lengths(runs[0].known_notes.get("rectangle"), counters),
        unshared=bool(sharing["unshared"]) and runs[0].known_notes.get("cache_state") != "warm",
        random=any(counts.get("spec.random") for counts in counters),
    )


def _max_hits(sharing: SharingNote, run: Record) -> float:
    """Return the share of prompt tokens that can hit if the prompts repeat all earlier answers.

    A block may hold the end of a prompt and the beginning of its answer.
    """
    blocks = run.counters.get("requests.submitted", 0.0) * sharing["block_size"]
    answers = (run.output_tokens or 0.0) + blocks
    return min(1.0, (sharing["shared_tokens"] + answers) / sharing["prompt_tokens"])


def _rectangle(
    rectangle: RectangleNote | None, counters: Sequence[Mapping[str, float]]
) -> float | None:
    """Return the padding of one batch of all requests; None if the arm pads otherwise or never."""
    pads = any(counts.get(name) for counts in counters for name in PADDING_LAYOUTS)
    by_shape = any(counts.get(name) for counts in counters for name in PADDED_SHAPES)
    if rectangle is None or not pads or by_shape:
        return None
    return 1 - rectangle["tokens"] / rectangle["slots"]


def _equal_lengths(
    rectangle: RectangleNote | None, counters: Sequence[Mapping[str, float]]
) -> bool:
    """Return whether nothing needs padding: equal lengths, and one step prefills all prompts."""
    if rectangle is None or rectangle["tokens"] < rectangle["slots"]:
        return False
    return all(c.get("steps.prefill") == 1 and not any(map(c.get, PADDED_SHAPES)) for c in counters)


def _share(counters: Sequence[Mapping[str, float]], part: str, *of: str) -> float | None:
    """Return the median over runs of counter ``part`` divided by the sum of the counters ``of``.

    Runs in which that sum is 0 are left out. The result is None if no run remains.

    If ``part`` is also in ``of``, it counts padding. Then a share of 0 in all runs is returned as 0
    if the arm's layout pads batches, else as None.
    """
    pairs = ((c.get(part, 0.0), sum(c.get(name, 0.0) for name in of)) for c in counters)
    known = [own / whole for own, whole in pairs if whole]
    zeros = part in of and not any(c.get(name) for c in counters for name in PADDING_LAYOUTS)
    if not known or (zeros and not any(known)):
        return None
    return median(known)
