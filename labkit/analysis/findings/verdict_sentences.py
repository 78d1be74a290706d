"""The verdict on a comparison as one plain sentence, and that on a whole cell in a word or two."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from labkit.analysis.comparison.best_setting import is_decided, tested_rows
from labkit.analysis.comparison.output_identity import IDENTITY_CLAIMS
from labkit.analysis.comparison.verdict import IF_NO_DRIFT
from labkit.analysis.findings.cell_findings import CHANGED, SAME, Answer, Findings
from labkit.analysis.findings.effect_wording import (
    direction_word,
    effect_phrase,
    size_text,
    value_with_unit,
)
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.model.result_row import Comparison, Row
from labkit.analysis.number_format import (
    MINUS,
    bound_text,
    interval_text,
    magnitude_text,
    p_text,
    percent_text,
)
from labkit.analysis.statistics.permutation_test import relabellings
from labkit.config import count_text

MAX_UNREMARKED_P = 0.02  # the sentence on the A/A control names rows with a smaller p
TEXTS = {
    Answer.nothing_to_compare: ("none", "nothing to compare"),
    Answer.none: ("invalid", "no answer"),
    Answer.estimate: ("estimate_only", "estimate only"),
    Answer.computed: ("computed", "computed"),
    Answer.undecided: ("inconclusive", "undecided"),
}
MAX_WORDS = 2  # more metrics than that are only better or worse
OF_OUTPUTS = {"pass": ("equivalent", "as claimed"), "fail": ("invalid", "not as claimed")}


@dataclass(frozen=True)
class CellPhrases:
    """The phrases that the sentences of a cell repeat. Finding them needs all of its rows.

    ``test_methods``: see :func:`method_texts`.
    """

    test_methods: Mapping[int, str]
    identity: str
    margin: str


def cell_phrases(cell: Cell, claim: str) -> CellPhrases:
    """Return the phrases of a cell whose outputs were claimed to be ``claim``."""
    compared = cell.gates["identical"].status == "pass" and claim in IDENTITY_CLAIMS
    return CellPhrases(
        method_texts(cell, "exact"),
        IDENTITY_CLAIMS[claim] if compared else "outputs not compared",
        f"±{cell.design.margin_pct:g} %",
    )


def method_texts(cell: Cell, all_of: str) -> dict[int, str]:
    """Return how rows are tested, by the largest number of blocks that such a row has.

    That is ``Monte Carlo, 100,000 draws`` if relabellings were sampled, else ``all_of`` (``{}`` is
    their number). Rows that a look stopped, and arms that it dropped, have its blocks. A row that
    lacks a block is tested under the relabellings of the complete rows.
    """
    looks = (one for one in cell.design.looks_taken if one.get("stopped") or "kept" in one)
    numbers = {int(look["blocks"]) for look in looks}
    numbers.add(max((one.blocks for one in cell.comparisons), default=0))
    texts = dict[int, str]()
    for blocks in sorted(numbers - {0}):
        labels = relabellings(blocks, cell.design.runs_per_block)
        text = all_of if labels.exact else "Monte Carlo, {} draws"
        texts[blocks] = text.format(f"{labels.count:,}")
    return texts


def method_of(texts: Mapping[int, str], one: Comparison) -> str:
    """Return how a comparison was tested, one of :func:`method_texts`."""
    return next((text for blocks, text in texts.items() if one.blocks <= blocks), "exact")


def computed_text(row: Row, comparison: Comparison) -> str:
    """Return an arm's computed value and its difference: ``9.7 %, 50.2 points less than in ...``.

    The difference is missing if the baseline has no value, as a budget without a limit.
    """
    baseline = comparison.baseline
    value, base = row.median(comparison.arm), row.median(baseline)
    if value is None:
        return "unknown"
    text = value_with_unit(value, row.unit)
    if base is None:
        return f"{text}, {baseline} has none"
    if value == base:
        return f"{text}, as in {baseline}"
    words = row.definition.words
    word = words.more if value > base else words.less
    return f"{text}, {size_text(row.unit, value - base)} {word} than in {baseline}"


def _ends(interval: tuple[float, float] | None, effect: float, directed: bool) -> str:
    """Return an interval, if ``directed`` as sizes in the effect's direction: ``−1.2 to 3.4 %``."""
    if interval is None:
        return "unknown"
    if not directed:
        return interval_text(*interval)
    low, high = interval if effect >= 0 else (-interval[1], -interval[0])
    ends = [f"{MINUS if x < 0 else ''}{magnitude_text(x)}" for x in (low, high)]
    return f"{ends[0]} to {ends[1]} %"


def as_measured_text(one: Comparison, directed: bool) -> str:
    """Return the effect as measured if it lies outside the interval, else an empty text.

    ``directed``: whether the sentence has named the effect's direction, so that the same direction
    needs no sign.
    """
    effect = one.as_measured_pct
    if effect is None:
        return ""
    unsigned = directed and effect * (one.effect_pct or 0.0) > 0
    return f"; {f'{magnitude_text(effect)} %' if unsigned else percent_text(effect)} as measured"


def _evidence(phrases: CellPhrases, one: Comparison, directed: bool) -> str:
    """Return intervals, p-values and blocks; ``directed``: the effect has been named before."""
    effect = one.effect_pct or 0.0
    start = "" if directed else f"{percent_text(effect)}, "
    adjusted, alone = (_ends(ci, effect, directed) for ci in (one.ci_pct, one.ci_raw_pct))
    method = method_of(phrases.test_methods, one)
    return (
        f"{start}adjusted {one.level_text} CI {adjusted}, adjusted p = {p_text(one.p_adjusted)}; "
        f"this row alone {alone}, p = {p_text(one.p)} ({method}); "
        f"{count_text(one.blocks, 'block')}{as_measured_text(one, directed)}"
    )


def verdict_sentence(phrases: CellPhrases, row: Row, one: Comparison) -> str:
    """Return a comparison's verdict as one plain sentence, without the row's name."""
    arm, word, reason = one.arm, one.verdict, one.reason
    if word == "invalid":
        return f"{arm}: invalid: {reason}"
    if word == "computed":
        return f"{arm}: {computed_text(row, one)} (computed)"
    if one.difference is not None and word in ("better", "worse"):
        effects, differences = [math.copysign(math.inf, one.difference)], [one.difference]
        phrase = effect_phrase(row.definition, effects, differences=differences)
        return f"{arm} {phrase}: {reason}; adjusted p = {p_text(one.p_adjusted)}"
    if one.effect_pct is None:
        return f"{arm}: {word.replace('_', '-')}: {reason}"

    def effect(*notes: str) -> str:
        base, effects = row.median(one.baseline), [one.effect_pct or 0.0]
        return effect_phrase(row.definition, effects, base=base, interval="; ".join(notes))

    if word == "estimate_only":
        blocks = count_text(one.blocks, "block")
        return f"estimate only: {arm} {effect(blocks)} ({reason})"
    evidence = _evidence(phrases, one, word in ("better", "worse", "trivial"))
    condition = f"; {IF_NO_DRIFT}" if IF_NO_DRIFT in (reason or "") else ""
    if word in ("better", "worse"):
        return f"{arm} {effect(evidence)}; {phrases.identity}{condition}"
    if word == "trivial":
        inside = f"inside the margin of {phrases.margin}"
        return f"{arm} {effect(inside, evidence)}; {phrases.identity}{condition}"
    return f"{arm}: {word}: {reason} ({evidence}); {phrases.identity}"


def verdict_sentences(
    cell: Cell, claim: str, qualities: Mapping[str, str] | None = None
) -> list[str]:
    """Return a sentence for each primary row and arm, and the reason for each skipped row.

    ``qualities`` maps an arm that scored texts to a phrase on its quality. The phrase is appended
    to the arm's sentences.
    """
    lines, phrases = [], cell_phrases(cell, claim)
    for row in cell.primary_rows:
        if row.skipped is not None:
            lines.append(f"{row.case}: skipped: {row.skipped}")
        for one in row.comparisons:
            quality = (qualities or {}).get(one.arm)
            end = f"; {quality}" if quality else ""
            lines.append(f"{cell.row_name(row)}: {verdict_sentence(phrases, row, one)}{end}")
    return lines


def control_sentence(cell: Cell) -> str | None:
    """Return a sentence on the A/A control, or None if there is none or its effects are unknown.

    The sentence gives the control's largest effect, its smallest p and its widest interval. It
    names every row with an unadjusted p below 0.02, which a reader might take for an effect.
    """
    pairs = ((row, row.comparison(cell.control)) for row in cell.primary_rows)
    known = [
        (cell.row_name(row), one, one.effect_pct, one.p)
        for row, one in pairs
        if one is not None and one.effect_pct is not None and one.p is not None
    ]
    if not known:
        return None
    largest_row, _, largest, _ = max(known, key=lambda item: abs(item[2]))
    smallest_row, smallest, _, smallest_p = min(known, key=lambda item: item[3])
    text = (
        f"A/A control: at most {percent_text(largest)} from the baseline "
        f"({largest_row}); smallest p {p_text(smallest_p)} unadjusted, "
        f"{p_text(smallest.p_adjusted)} adjusted ({smallest_row})"
    )
    limits = [abs(limit) for _, one, *_ in known for limit in one.ci_pct or () if limit]
    if limits:
        text += f"; widest interval ±{bound_text(max(limits))} %"
    small = ((name, effect, p) for name, _, effect, p in known if p < MAX_UNREMARKED_P)
    remarkable = [f"{name} ({percent_text(e)}, p = {p_text(p)})" for name, e, p in small]
    if remarkable:
        rows = count_text(len(known), "row")
        text += f"; {len(remarkable)} of {rows} with p below {MAX_UNREMARKED_P:g} unadjusted: "
        text += "; ".join(remarkable)
    return text


@dataclass(frozen=True)
class SummaryVerdict:
    """A cell's verdict. ``kind`` is one of the rows' verdict words, ``mixed`` or ``none``."""

    kind: str
    text: str


def summary_verdict(findings: Findings) -> SummaryVerdict:
    """Return the verdict on all arms in all primary rows of a cell.

    It is mixed if some rows are better and others worse. Rows without a change lower the share.
    """
    if findings.answer is Answer.best_setting:
        return _of_sweep(findings)
    if findings.outputs is not None:
        of_outputs = OF_OUTPUTS.get(findings.outputs.status, TEXTS[Answer.none])
        return SummaryVerdict(*of_outputs)
    if findings.answer in TEXTS:
        return SummaryVerdict(*TEXTS[findings.answer])
    tested = [one for one in findings.findings if one.word != "computed"]
    counts = {word: sum(one.word == word for one in tested) for word in (*CHANGED, *SAME)}
    if counts["better"] and counts["worse"]:
        return SummaryVerdict("mixed", "mixed")
    kind = next((word for word in CHANGED if counts[word]), None)
    if kind is None:
        same = sum(counts[word] for word in SAME)
        return SummaryVerdict("equivalent", "no difference" + _share(same, len(tested), findings))
    words = [direction_word(e.metric, e.effect > 0) for e in tested if e.word == kind]
    text = ", ".join(dict.fromkeys(words)) if len(set(words)) <= MAX_WORDS else kind
    return SummaryVerdict(kind, text + _share(counts[kind], len(tested), findings))


def _share(part: int, total: int, findings: Findings) -> str:
    """Return in how many of the primary rows, or of all arms' comparisons, a verdict holds."""
    noun = "rows" if len(findings.arms) == 1 else "comparisons"
    return f" in {part} of {total} {noun}" if part < total else ""


def _of_sweep(findings: Findings) -> SummaryVerdict:
    if all(one.best is None for one in findings.best):
        return SummaryVerdict(*TEXTS[Answer.none])
    tested = tested_rows(findings.best)
    if not tested or any(one.withheld is not None for one in tested):
        return SummaryVerdict(*TEXTS[Answer.estimate])
    if is_decided(tested):
        part, total = len(tested), len(findings.best)
        where = f" in {part} of {total} rows" if part < total else ""
        return SummaryVerdict("better", f"best setting known{where}")
    return SummaryVerdict(*TEXTS[Answer.undecided])
