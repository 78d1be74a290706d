"""One plain sentence per comparison, derived from ``cell.json`` alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit.analysis.identity import CLAIMS
from labkit.analysis.numbers import MINUS, count, interval_text, p_text, percent_text, plain
from labkit.analysis.permutation import relabellings, smallest_p

Json = Mapping[str, Any]


def p_phrase(comparison: Json, runs: int) -> str:
    """Say the p-value and how it was found: ``exact p = 0.002, adjusted 0.006``."""
    p, adjusted = comparison["p"], comparison["p_adjusted"]
    if p is None or p < smallest_p(comparison["blocks"], runs) * (1 - 1e-9):
        return "p unknown"
    exact = "exact " if relabellings(comparison["blocks"], runs).exact else ""
    text = f"{exact}p = {p_text(p)}"
    if adjusted is not None and p_text(adjusted) != p_text(p):
        text += f", adjusted {p_text(adjusted)}"
    return text


def identity_phrase(cell: Json, claim: str) -> str:
    """Say what was proven about the outputs."""
    if cell["gates"]["identical"]["status"] != "pass":
        return "outputs not compared"
    return CLAIMS.get(claim, "outputs not compared")


def direction(unit: str | None, better: str | None, effect_pct: float) -> str:
    """Say an effect in words: ``2.1 % faster``; sizes (bytes) are more or less."""
    size = f"{plain(effect_pct)} %"
    if unit == "bytes":
        return f"{size} {'more' if effect_pct > 0 else 'less'}"
    return f"{size} {'faster' if (effect_pct > 0) == (better == 'higher') else 'slower'}"


def _direction(row: Json, comparison: Json) -> str:
    return direction(row["unit"], row["better"], comparison["effect_pct"])


def _interval(row: Json, comparison: Json, level: str, directed: bool) -> str:
    """Write the interval: of the size in the effect's direction, or with its signs."""
    low, high = comparison["ci_low_pct"], comparison["ci_high_pct"]
    if low is None:
        return "no interval"
    if not directed:
        return f"{percent_text(comparison['effect_pct'])}, {level} CI {interval_text(low, high)}"
    if comparison["effect_pct"] < 0:
        low, high = -high, -low
    ends = [f"{MINUS if x < 0 else ''}{plain(x)}" for x in (low, high)]
    return f"{level} CI {ends[0]} to {ends[1]}"


def sentence(cell: Json, row: Json, comparison: Json, claim: str) -> str:
    """Say a comparison's verdict in one plain sentence, without the row's name."""
    arm, word, reason = comparison["arm"], comparison["verdict"], comparison["reason"]
    runs = int(cell["design"]["runs_per_block"])
    if word == "invalid":
        return f"{arm}: invalid: {reason}"
    if comparison["effect_pct"] is None:
        return f"{arm}: can't tell: {reason}"
    blocks = count(comparison["blocks"], "block")
    if word == "estimate_only":
        return f"{arm}: estimate only: {_direction(row, comparison)} in {blocks} ({reason})"
    level = f"{100 * (1 - float(cell['design']['alpha'])):g} %"
    directed = word in ("faster", "slower", "trivial")
    evidence = (
        f"({_interval(row, comparison, level, directed)}, {p_phrase(comparison, runs)}, {blocks}); "
        f"{identity_phrase(cell, claim)}"
    )
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


def sentences(cell: Json, claim: str) -> list[str]:
    """Give the sentences of a cell: primary rows, real arms; skipped rows with their reason."""
    control = control_name(cell)
    found = []
    for row in cell["rows"]:
        if not row["primary"]:
            continue
        name = row_name(row)
        if row["skipped"] is not None:
            found.append(f"{name}: skipped: {row['skipped']}")
        for comparison in row["comparisons"]:
            if comparison["arm"] != control:
                found.append(f"{name}: {sentence(cell, row, comparison, claim)}")
    return found


def real_arms(cell: Json) -> list[str]:
    """Name all arms but the control, the baseline first."""
    return [arm["name"] for arm in cell["arms"] if arm["role"] != "control"]


def control_name(cell: Json) -> str | None:
    """Give the A/A arm's name, or None."""
    return next((a["name"] for a in cell["arms"] if a["role"] == "control"), None)


def control_sentence(cell: Json) -> str | None:
    """Say what the A/A control measured: the noise that nothing explains."""
    control = control_name(cell)
    found = [
        c
        for row in cell["rows"]
        if row["primary"]
        for c in row["comparisons"]
        if c["arm"] == control and c["effect_pct"] is not None
    ]
    if control is None or not found:
        return None
    largest = max(found, key=lambda c: abs(c["effect_pct"]))
    text = f"A/A control: at most {percent_text(largest['effect_pct'])} from the baseline"
    limits = [abs(c[key]) for c in found for key in ("ci_low_pct", "ci_high_pct") if c[key]]
    if limits:
        text += f"; widest interval ±{plain(max(limits))} %"
    return text
