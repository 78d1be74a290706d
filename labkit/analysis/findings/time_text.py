"""Where the time went, in sentences: the first cause, the counters, what it can be worth."""

from __future__ import annotations

from collections.abc import Iterator

from labkit.analysis.model.cell_model import Cell
from labkit.analysis.model.time_model import PART_NAMES, ArmTime, PartShare, TimeDivision
from labkit.analysis.number_format import interval_text, magnitude_text, signed_text, value_text
from labkit.config import count_text

WORK_NAMES = {
    "padding": "padding",
    "recomputation": "tokens computed again after preemptions",
    "prefix hits": "hits of the prefix cache",
}
GROUP_NAMES = {
    "attention": "attention",
    "products": "the products with weights",
    "host": "the host (scheduler, batch, plan, sampling, update)",
}
SPEED_UP_PCT = 10.0  # the example of a faster part


def _cause_text(arm: ArmTime) -> str:
    """Name the first cause of an arm's difference, or say why there is none."""
    total, first = arm.total, arm.cause_part
    whole = ""
    if total.pct is not None:
        more = "more" if total.pct >= 0 else "less"
        whole = f"{magnitude_text(total.pct)} % {more} time per output token; "
    if first is None or arm.cause is None:
        return f"{arm.arm}: {whole}{_why_none(arm)}."
    interval = interval_text(first.low_us, first.high_us)
    by = WORK_NAMES.get(arm.cause)
    through = f" (it shows in {PART_NAMES[first.part]})" if by else ""
    return (
        f"{arm.arm}: {whole}first cause: {by or PART_NAMES[first.part]}{through}, "
        f"{signed_text(first.difference_us or 0.0)} µs per output token ({interval}), "
        f"{signed_text(first.pct or 0.0)} % of the baseline's time."
    )


def _why_none(arm: ArmTime) -> str:
    if all(part.low_us is None for part in arm.parts):
        return "too few blocks to name a cause"
    if arm.cause_part is None:
        return "no part's time differs significantly in its direction"
    return "no metric's difference is decided, so there is no cause to name"


def worth_text(share: PartShare) -> str:
    """Say how much a change of a part can bring at most: the part's share of the time."""
    most = 100 * share.pct / (100 - share.pct) if share.pct < 100 else float("inf")
    some = SPEED_UP_PCT / 100 * share.pct
    within = ""
    if share.low_pct is not None and share.high_pct is not None:
        within = f" ({magnitude_text(share.low_pct)} to {magnitude_text(share.high_pct)})"
    return (
        f"{magnitude_text(share.pct)} %{within} of the time goes to {GROUP_NAMES[share.part]}: "
        f"without it, throughput would be at most {magnitude_text(most)} % higher; "
        f"{SPEED_UP_PCT:g} % faster, {magnitude_text(100 * some / (100 - some))} %"
    )


def _predicted_text(cell: Cell, arm: ArmTime) -> str | None:
    """Put the throughput that an arm's parts predict beside the measured one; None without one."""
    compared = (row.comparison(arm.arm) for row in cell.primary_rows if row.unit == "tok/s")
    measured = next(filter(None, compared), None)
    if measured is None or measured.effect_pct is None or arm.total.pct is None:
        return None
    predicted = 100 * (1 / (1 + arm.total.pct / 100) - 1)
    interval = f" ({interval_text(*measured.ci_pct)})" if measured.ci_pct else ""
    return (
        f"{arm.arm}: its parts predict {signed_text(predicted)} % tok/s; measured "
        f"{signed_text(measured.effect_pct)} %{interval}"
    )


def time_sentences(cell: Cell, division: TimeDivision) -> Iterator[str]:
    """Yield the sentences of the section: causes, counters, predictions."""
    for arm in division.arms:
        if arm.arm in cell.compared_arms:
            yield _cause_text(arm)
            if arm.counts:
                yield f"{arm.arm}, counted: {'; '.join(arm.counts)}."
            predicted = _predicted_text(cell, arm)
            if predicted:
                yield f"{predicted}."
    worth = "; ".join(map(worth_text, division.groups))
    yield f"What it can be worth: {worth}."


def clocks_text(division: TimeDivision) -> str:
    """Say where the times come from and what the clocks cost."""
    return (
        f"Times are from {count_text(division.tokens, 'output token')} of turns with clocks after "
        f"the measurement ({division.of_tokens_pct:.0f} % of its tokens), which decide nothing; "
        f"the clocks add {value_text(division.clocks_pct)} % to a step. Stalls, what single "
        "steps took beyond the median of their part, are not in the total. Intervals and p: the "
        "permutation test of the metrics, adjusted over parts and arms. Published, of LocalAI's "
        "llama.cpp fork: the host takes 4 to 8 % of a step (inputs 47 µs, block table 2 µs)."
    )
