"""Verdict sentences: one plain sentence per comparison, derived only from ``cell.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labkit.analysis.comparison.output_identity import IDENTITY_CLAIMS
from labkit.analysis.findings.effect_wording import effect_phrase, size_text, value_with_unit
from labkit.analysis.number_format import MINUS, interval_text, magnitude_text, p_text, percent_text
from labkit.analysis.statistics.permutation_test import Relabellings, relabellings
from labkit.config import count_text
from labkit.records.metric_registry import define_metric

Json = Mapping[str, Any]


def title(cell: Json) -> str:
    """Return a cell's question (or its name), with its scale if it has one."""
    scale = cell.get("scale")
    return f"{cell['question'] or cell['cell']}" + (f" (scale={scale})" if scale else "")


MAX_UNREMARKED_P = 0.02  # the sentence on the A/A control names rows with a smaller p


def test_method_text(cell: Json) -> str:
    """Return the way p-values were computed: ``exact``, or ``Monte Carlo, 100,000 draws``.

    It is the same for all rows: a row that lacks a block is tested under the relabellings of the
    complete rows.
    """
    labels = _labels(cell)
    if labels is None or labels.exact:
        return "exact"
    return f"Monte Carlo, {labels.count:,} draws"


def relabellings_text(cell: Json) -> str:
    """Return ``all 1,296 relabellings``, or ``Monte Carlo, 100,000 draws`` if they were sampled."""
    labels = _labels(cell)
    if labels is None or not labels.exact:
        return test_method_text(cell)
    return f"all {labels.count:,} relabellings"


def _labels(cell: Json) -> Relabellings | None:
    blocks = max((c["blocks"] for row in cell["rows"] for c in row["comparisons"]), default=0)
    return relabellings(blocks, int(cell["design"]["runs_per_block"])) if blocks else None


def level_text(cell: Json) -> str:
    """Return the confidence level: ``95 %``, or ``99 %`` at an interim look that spends 0.01."""
    known = (c["level"] for row in cell["rows"] for c in row["comparisons"] if c["level"])
    return f"{100 * next(known, 1 - float(cell['design']['alpha'])):g} %"


def identity_phrase(cell: Json, claim: str) -> str:
    """Return a phrase on the outputs, such as ``outputs bit-identical``.

    It is ``outputs not compared`` unless the identity gate passed.
    """
    if cell["gates"]["identical"]["status"] != "pass":
        return "outputs not compared"
    return IDENTITY_CLAIMS.get(claim, "outputs not compared")


@dataclass(frozen=True)
class CellPhrases:
    """The phrases that every sentence of a cell repeats. Finding them needs all of its rows."""

    cell: Json
    level: str
    test_method: str
    identity: str


def cell_phrases(cell: Json, claim: str) -> CellPhrases:
    """Return the phrases of a cell whose outputs were claimed to be ``claim``."""
    return CellPhrases(cell, level_text(cell), test_method_text(cell), identity_phrase(cell, claim))


def _effect(cell: Json, row: Json, comparison: Json, *notes: str) -> str:
    """Return a comparison's effect with its verb and, in parentheses, ``notes``."""
    base = row["arms"][cell["arms"][0]["name"]]["median"]
    metric = define_metric(row["metric"], row["unit"])
    effects = [comparison["effect_pct"]]
    return effect_phrase(metric, effects, base=base, interval="; ".join(notes))


def computed_text(row: Json, arm: str, baseline: str) -> str:
    """Return an arm's computed value and its difference: ``9.7 %, 50.2 points less than ...``.

    The difference is missing if the baseline has no value, as a budget without a limit.
    """
    value, base = (row["arms"][name]["median"] for name in (arm, baseline))
    if value is None:
        return "unknown"
    text = value_with_unit(value, row["unit"])
    if base is None:
        return f"{text}, {baseline} has none"
    if value == base:
        return f"{text}, as in {baseline}"
    words = define_metric(row["metric"], row["unit"]).words
    word = words.more if value > base else words.less
    size = size_text(row["unit"], value - base)
    return f"{text}, {size} {word} than in {baseline}"


def _interval(comparison: Json, key: str, directed: bool) -> str:
    """Return an interval as text, with signed limits.

    If ``directed``, the sentence has named the direction of the effect, so the limits are sizes
    without a sign: ``1.2 to 3.4`` after "better".
    """
    low, high = comparison[f"{key}_low_pct"], comparison[f"{key}_high_pct"]
    if low is None:
        return "unknown"
    if not directed:
        return interval_text(low, high)
    if comparison["effect_pct"] < 0:
        low, high = -high, -low
    ends = [f"{MINUS if x < 0 else ''}{magnitude_text(x)}" for x in (low, high)]
    return f"{ends[0]} to {ends[1]} %"


def _evidence(phrases: CellPhrases, comparison: Json, directed: bool) -> str:
    """Return intervals and p-values, adjusted and unadjusted, and the number of blocks, as text."""
    effect = "" if directed else f"{percent_text(comparison['effect_pct'])}, "
    return (
        f"{effect}adjusted {phrases.level} CI {_interval(comparison, 'ci', directed)}, "
        f"adjusted p = {p_text(comparison['p_adjusted'])}; this row alone "
        f"{_interval(comparison, 'ci_raw', directed)}, p = {p_text(comparison['p'])} "
        f"({phrases.test_method}); {count_text(comparison['blocks'], 'block')}"
    )


def verdict_sentence(phrases: CellPhrases, row: Json, comparison: Json) -> str:
    """Return a comparison's verdict as one plain sentence, without the row's name."""
    cell = phrases.cell
    arm, word, reason = comparison["arm"], comparison["verdict"], comparison["reason"]
    if word == "invalid":
        return f"{arm}: invalid: {reason}"
    if word == "computed":
        return f"{arm}: {computed_text(row, arm, cell['arms'][0]['name'])} (computed)"
    if comparison["effect_pct"] is None:
        return f"{arm}: inconclusive: {reason}"
    if word == "estimate_only":
        blocks = count_text(comparison["blocks"], "block")
        return f"estimate only: {arm} {_effect(cell, row, comparison, blocks)} ({reason})"
    directed = word in ("better", "worse", "trivial")
    evidence = _evidence(phrases, comparison, directed)
    if word in ("better", "worse"):
        return f"{arm} {_effect(cell, row, comparison, evidence)}; {phrases.identity}"
    if word == "trivial":
        margin = f"inside the margin of ±{cell['design']['margin_pct']:g} %"
        return f"{arm} {_effect(cell, row, comparison, margin, evidence)}; {phrases.identity}"
    return f"{arm}: {word}: {reason} ({evidence}); {phrases.identity}"


def row_name(row: Json) -> str:
    """Return a row's name: its case, or its metric if the case is ``all`` (all requests)."""
    return str(row["metric"] if row["case"] == "all" else row["case"])


def verdict_sentences(
    cell: Json, claim: str, qualities: Mapping[str, str] | None = None
) -> list[str]:
    """Return a sentence for each primary row and arm, and the reason for each skipped row.

    ``qualities`` maps an arm that scored texts to a phrase on its quality. The phrase is appended
    to the arm's sentences.
    """
    lines, phrases = [], cell_phrases(cell, claim)
    for row in cell["rows"]:
        if not row["primary"]:
            continue
        name = row_name(row)
        if row["skipped"] is not None:
            lines.append(f"{name}: skipped: {row['skipped']}")
        for comparison in row["comparisons"]:
            quality = (qualities or {}).get(comparison["arm"])
            end = f"; {quality}" if quality else ""
            lines.append(f"{name}: {verdict_sentence(phrases, row, comparison)}{end}")
    return lines


def real_arms(cell: Json) -> list[str]:
    """Return the names of all arms except the A/A control, the baseline first."""
    return [arm["name"] for arm in cell["arms"] if arm["role"] != "control"]


def control_name(cell: Json) -> str | None:
    """Return the A/A arm's name, or None."""
    return next((a["name"] for a in cell["arms"] if a["role"] == "control"), None)


def control_sentence(cell: Json) -> str | None:
    """Return a sentence on the A/A control, or None if there is none or its effects are unknown.

    The sentence gives the control's largest effect, its smallest p and its widest interval. It
    names every row with an unadjusted p below 0.02, which a reader might take for an effect.
    """
    control = control_name(cell)
    comparisons = [
        (row_name(row), c)
        for row in cell["rows"]
        if row["primary"]
        for c in row["comparisons"]
        if c["arm"] == control and c["effect_pct"] is not None and c["p"] is not None
    ]
    if control is None or not comparisons:
        return None
    largest_row, largest = max(comparisons, key=lambda item: abs(item[1]["effect_pct"]))
    smallest_row, smallest = min(comparisons, key=lambda item: item[1]["p"])
    text = (
        f"A/A control: at most {percent_text(largest['effect_pct'])} from the baseline "
        f"({largest_row}); smallest p {p_text(smallest['p'])} unadjusted, "
        f"{p_text(smallest['p_adjusted'])} adjusted ({smallest_row})"
    )
    keys = ("ci_low_pct", "ci_high_pct")
    limits = [abs(c[key]) for _, c in comparisons for key in keys if c[key]]
    if limits:
        text += f"; widest interval ±{magnitude_text(max(limits))} %"
    remarkable = [
        f"{name} ({percent_text(c['effect_pct'])}, p = {p_text(c['p'])})"
        for name, c in comparisons
        if c["p"] < MAX_UNREMARKED_P
    ]
    if remarkable:
        rows = count_text(len(comparisons), "row")
        text += f"; {len(remarkable)} of {rows} with p below {MAX_UNREMARKED_P:g} unadjusted: "
        text += "; ".join(remarkable)
    return text
