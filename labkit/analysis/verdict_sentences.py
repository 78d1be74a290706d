"""One plain sentence per comparison, derived from ``cell.json`` alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit.analysis.number_format import (
    MINUS,
    count_text,
    interval_text,
    magnitude_text,
    p_text,
    percent_text,
)
from labkit.analysis.output_identity import IDENTITY_CLAIMS
from labkit.analysis.statistics.permutation_test import Relabellings, relabellings

Json = Mapping[str, Any]


def title(cell: Json) -> str:
    """Name a cell by its question, else by its folder, and say at which scale it was asked."""
    scale = cell.get("scale")
    return f"{cell['question'] or cell['cell']}" + (f" (scale={scale})" if scale else "")


LOOKED_AT = 0.02  # an A/A row with a smaller p is named


def test_method_text(cell: Json) -> str:
    """Say how the p-values were found: ``exact``, or ``Monte Carlo, 100,000 draws``.

    Rows that lack a block are tested under the relabellings of those that have all.
    """
    labels = _labels(cell)
    if labels is None or labels.exact:
        return "exact"
    return f"Monte Carlo, {labels.count:,} draws"


def relabellings_text(cell: Json) -> str:
    """Say over what the p-values were found: ``all 1,296 relabellings``, or the draws."""
    labels = _labels(cell)
    if labels is None or not labels.exact:
        return test_method_text(cell)
    return f"all {labels.count:,} relabellings"


def _labels(cell: Json) -> Relabellings | None:
    blocks = max((c["blocks"] for row in cell["rows"] for c in row["comparisons"]), default=0)
    return relabellings(blocks, int(cell["design"]["runs_per_block"])) if blocks else None


def level_text(cell: Json) -> str:
    """Write the level of the intervals that are shown: ``95 %``, or ``99 %`` at a look."""
    known = (c["level"] for row in cell["rows"] for c in row["comparisons"] if c["level"])
    return f"{100 * next(known, 1 - float(cell['design']['alpha'])):g} %"


def identity_phrase(cell: Json, claim: str) -> str:
    """Say what was proven about the outputs."""
    if cell["gates"]["identical"]["status"] != "pass":
        return "outputs not compared"
    return IDENTITY_CLAIMS.get(claim, "outputs not compared")


def direction(unit: str | None, better: str | None, effect_pct: float) -> str:
    """Say an effect in words: ``2.1 % faster``; sizes (bytes) are more or less."""
    size = f"{magnitude_text(effect_pct)} %"
    if unit == "bytes":
        return f"{size} {'more' if effect_pct > 0 else 'less'}"
    return f"{size} {'faster' if (effect_pct > 0) == (better == 'higher') else 'slower'}"


def _direction(row: Json, comparison: Json) -> str:
    return direction(row["unit"], row["better"], comparison["effect_pct"])


def _interval(comparison: Json, key: str, directed: bool) -> str:
    """Write an interval: of the size in the effect's direction, or with its signs."""
    low, high = comparison[f"{key}_low_pct"], comparison[f"{key}_high_pct"]
    if low is None:
        return "unknown"
    if not directed:
        return interval_text(low, high)
    if comparison["effect_pct"] < 0:
        low, high = -high, -low
    ends = [f"{MINUS if x < 0 else ''}{magnitude_text(x)}" for x in (low, high)]
    return f"{ends[0]} to {ends[1]}"


def _evidence(cell: Json, comparison: Json, directed: bool) -> str:
    """Write what supports a verdict: adjusted interval and p, then those of the row alone."""
    effect = "" if directed else f"{percent_text(comparison['effect_pct'])}, "
    return (
        f"({effect}adjusted {level_text(cell)} CI {_interval(comparison, 'ci', directed)}, "
        f"adjusted p = {p_text(comparison['p_adjusted'])}; alone "
        f"{_interval(comparison, 'ci_raw', directed)}, p = {p_text(comparison['p'])} "
        f"({test_method_text(cell)}); {count_text(comparison['blocks'], 'block')})"
    )


def verdict_sentence(cell: Json, row: Json, comparison: Json, claim: str) -> str:
    """Say a comparison's verdict in one plain sentence, without the row's name."""
    arm, word, reason = comparison["arm"], comparison["verdict"], comparison["reason"]
    if word == "invalid":
        return f"{arm}: invalid: {reason}"
    if comparison["effect_pct"] is None:
        return f"{arm}: can't tell: {reason}"
    if word == "estimate_only":
        blocks = count_text(comparison["blocks"], "block")
        return f"{arm}: estimate only: {_direction(row, comparison)} in {blocks} ({reason})"
    directed = word in ("faster", "slower", "trivial")
    evidence = f"{_evidence(cell, comparison, directed)}; {identity_phrase(cell, claim)}"
    if word in ("faster", "slower"):
        return f"{arm} is {_direction(row, comparison)} {evidence}"
    if word == "trivial":
        margin = f"±{cell['design']['margin_pct']:g} %"
        return f"{arm} is {_direction(row, comparison)}, inside the margin of {margin} {evidence}"
    if word == "equivalent":
        return f"{arm}: flat: {reason} {evidence}"
    return f"{arm}: can't tell: {reason} {evidence}"


def row_name(row: Json) -> str:
    """Name a row: its case, or its metric where the case is all requests."""
    return str(row["metric"] if row["case"] == "all" else row["case"])


def verdict_sentences(cell: Json, claim: str) -> list[str]:
    """Return a cell's sentences: its primary rows, arm by arm, or why a row was skipped."""
    found = []
    for row in cell["rows"]:
        if not row["primary"]:
            continue
        name = row_name(row)
        if row["skipped"] is not None:
            found.append(f"{name}: skipped: {row['skipped']}")
        for comparison in row["comparisons"]:
            found.append(f"{name}: {verdict_sentence(cell, row, comparison, claim)}")
    return found


def real_arms(cell: Json) -> list[str]:
    """Name all arms but the control, the baseline first."""
    return [arm["name"] for arm in cell["arms"] if arm["role"] != "control"]


def control_name(cell: Json) -> str | None:
    """Return the A/A arm's name, or None."""
    return next((a["name"] for a in cell["arms"] if a["role"] == "control"), None)


def control_sentence(cell: Json) -> str | None:
    """Say what the A/A control measured: the noise that nothing explains.

    Its largest effect and its smallest p stand side by side, and every row that a reader
    who looks for an effect would have found is named.
    """
    control = control_name(cell)
    found = [
        (row_name(row), c)
        for row in cell["rows"]
        if row["primary"]
        for c in row["comparisons"]
        if c["arm"] == control and c["effect_pct"] is not None and c["p"] is not None
    ]
    if control is None or not found:
        return None
    where, largest = max(found, key=lambda item: abs(item[1]["effect_pct"]))
    there, surest = min(found, key=lambda item: item[1]["p"])
    text = (
        f"A/A control: at most {percent_text(largest['effect_pct'])} from the baseline ({where}); "
        f"smallest p {p_text(surest['p'])} alone, {p_text(surest['p_adjusted'])} adjusted ({there})"
    )
    limits = [abs(c[key]) for _, c in found for key in ("ci_low_pct", "ci_high_pct") if c[key]]
    if limits:
        text += f"; widest interval ±{magnitude_text(max(limits))} %"
    low = [
        f"{name} ({percent_text(c['effect_pct'])}, p = {p_text(c['p'])})"
        for name, c in found
        if c["p"] < LOOKED_AT
    ]
    if low:
        text += f"; {len(low)} of {count_text(len(found), 'row')} below p = {LOOKED_AT:g} alone: "
        text += "; ".join(low)
    return text
