"""The answer to a question in at most 20 words, for a card or the first line of a report.

:mod:`labkit.analysis.findings.headline` has the whole answer. The short answer leaves out what does
not fit: the names of rows, further metrics, reasons. It names metrics and arms as people do (``E2E
p50``). The headline and the short answer use the same verdicts. Cells that compare the same arms in
the same metric have one answer together (:func:`answers_of_cells`), as the rows of a cell have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from labkit.analysis.comparison.best_setting import setting_text
from labkit.analysis.comparison.cell_analysis import CellAnalysis
from labkit.analysis.findings.effect_wording import change_word
from labkit.analysis.findings.frames_answer import frames_clauses
from labkit.analysis.findings.outputs_answer import outputs_answer
from labkit.analysis.findings.quality_answer import quality_clauses
from labkit.analysis.findings.verdict_sentences import row_name
from labkit.analysis.number_format import join_names, magnitude_text, scaled, unit_name
from labkit.config import count_text
from labkit.records.metric_registry import OUTPUTS, define_metric

Json = Mapping[str, Any]
MAX_WORDS = 20
MAX_NAMED_ARMS = 3
PROPER_NAMES = ("mlx_lm",)  # names that keep their underscore
DOUBLED, HALVED = (95.0, 105.0), (-52.0, -48.0)  # percent
DECIDED = ("faster", "slower")
SAME = ("equivalent", "trivial")
UNDECIDED = ("inconclusive", "estimate_only")


@dataclass(frozen=True)
class _Effect:
    """The comparison of one arm in one row, from ``cell.json``; ``place`` names the row."""

    row: Json
    comparison: Json
    place: str

    @property
    def arm(self) -> str:
        return str(self.comparison["arm"])

    @property
    def percent(self) -> float:
        return float(self.comparison["effect_pct"] or 0.0)

    @property
    def verdict(self) -> str:
        return str(self.comparison["verdict"])

    @property
    def gain(self) -> float:
        """The effect in percent, above 0 if the arm is better."""
        return self.percent if self.row["better"] == "higher" else -self.percent

    @property
    def word(self) -> str:
        """The word for the direction: ``faster``, ``lower``, ``more``."""
        row = self.row
        return change_word(row["metric"], row["unit"], row["better"], self.percent > 0)

    @property
    def size(self) -> str:
        return f"{magnitude_text(self.percent)} % {self.word}"

    @property
    def label(self) -> str:
        return define_metric(self.row["metric"], self.row["unit"]).short_label

    @property
    def values(self) -> str:
        """The medians of baseline and arm, ``215 to 468 ms``.

        Empty if one is missing, or if their quotient contradicts the effect within blocks.
        """
        base, value = (
            self.row["arms"][name]["median"] for name in (self.comparison["baseline"], self.arm)
        )
        low, high = self.comparison["ci_low_pct"], self.comparison["ci_high_pct"]
        if not base or value is None or low is None:
            return ""
        quotient = 100.0 * (value / base - 1.0)
        if not min(low, self.percent / 2) <= quotient <= max(high, self.percent / 2):
            return ""
        unit = self.row["unit"]
        return f"{rounded_text(base, unit)} to {rounded_text(value, unit)} {unit_name(unit)}"


def short_answer(analysis: CellAnalysis) -> str:
    """Return the answer to a cell's question in at most 20 words."""
    return shortest(answer_wordings(analysis))


def answer_wordings(analysis: CellAnalysis) -> list[str]:
    """Return wordings of the answer to a cell's question, the most detailed first."""
    data = analysis.data
    if data.sweep:
        return _best(analysis.json)
    if OUTPUTS in data.metrics:
        full = outputs_answer(analysis)
        return [full, f"{full.partition(' (')[0].partition(':')[0].rstrip('.')}."]
    if not data.treatment_arms:
        return _alone(analysis)
    effects = _effects(analysis)
    failed = [name for name, gate in analysis.gates.items() if gate.status == "fail"]
    if not effects or all(e.verdict == "invalid" for e in effects):
        return [f"No answer: {_no_answer_reason(analysis, failed)}."]
    valid = [e for e in effects if e.verdict != "invalid"]
    if any(arm.out_of_memory for arm in data.arms) and not failed:
        return _out_of_memory(analysis, valid)
    baseline = arm_text(data.baseline)
    return [*_with_outputs(analysis, valid), *_candidates(valid, baseline, "rows")]


def answers_of_cells(analyses: Sequence[CellAnalysis], labels: Sequence[str]) -> list[str]:
    """Return wordings of one answer to the question of several cells, with the effects' range.

    The list is empty unless the cells compare the same arms in the same metric.
    """
    by_cell = [
        [replace(e, place=f"{label}, {e.place}" if len(own) > 1 else label) for e in own]
        for analysis, label in zip(analyses, labels, strict=True)
        for own in [_effects(analysis)]
    ]
    effects = [effect for own in by_cell for effect in own]
    arms = {(one.data.baseline, tuple(one.data.treatment_arms)) for one in analyses}
    metrics = {e.row["metric"] for e in effects}
    special = any(one.data.sweep or OUTPUTS in one.data.metrics for one in analyses)
    if special or len(arms) > 1 or len(metrics) != 1 or not all(by_cell):
        return []
    if all(e.verdict == "invalid" for e in effects):
        return []
    rows = len({id(e.row) for e in effects})
    noun = "cells" if rows == len(analyses) else f"rows of {len(analyses)} cells"
    return _candidates(effects, arm_text(analyses[0].data.baseline), noun)


def _out_of_memory(analysis: CellAnalysis, others: Sequence[_Effect]) -> list[str]:
    """Return answers that name the arms that ran out of memory, as they claim."""
    died = join_names([arm_text(arm.name) for arm in analysis.data.arms if arm.out_of_memory])
    decided = [e for e in others if e.verdict in DECIDED]
    texts = [f"Others: {_extremes(decided)}{_rest(others)}."] if decided else []
    if len(others) <= MAX_NAMED_ARMS or not decided:
        texts = [*_candidates(others, arm_text(analysis.data.baseline), "rows"), *texts]
    return [f"Out of memory: {died}. {text}" for text in texts]


def _with_outputs(analysis: CellAnalysis, effects: Sequence[_Effect]) -> list[str]:
    """Return answers with the best arm's effect and what its outputs are worth.

    These are what its video frames show, or its quality if it scored texts. Empty if it has none.
    """
    decided: dict[str, list[_Effect]] = {}
    for effect in effects:
        if effect.verdict in DECIDED:
            decided.setdefault(effect.arm, []).append(effect)
    if not decided:
        return []
    best = max(decided, key=lambda arm: _middle(decided[arm]))
    first = f"{_capitalised(arm_text(best))} is {_sizes(decided[best])}"
    baseline = arm_text(analysis.data.baseline)
    return [
        text
        for clause in (
            *frames_clauses(analysis.data, best),
            *quality_clauses(analysis.data, best),
        )
        for text in (f"{first} than {baseline}; {clause}.", f"{first}; {clause}.")
    ]


def _no_answer_reason(analysis: CellAnalysis, failed_gates: Sequence[str]) -> str:
    """Return which arms ended their own runs or, if none did, which gates failed."""
    records = analysis.data.records
    failed = [r.arm for r in records if not r.ok and "failed_by" not in r.notes]
    if failed and not any(record.ok for record in records):
        return f"nothing was measured, because {join_names(list(dict.fromkeys(failed)))} failed"
    if not failed_gates:
        return "nothing was measured"
    return f"the gate{'s' * (len(failed_gates) > 1)} {join_names(failed_gates)} failed"


def _effects(analysis: CellAnalysis) -> list[_Effect]:
    """Return the effects in the rows of the most important metric that was measured."""
    cell, arms = analysis.json, analysis.data.treatment_arms
    effects = [
        _Effect(row, comparison, row_name(row))
        for row in cell["rows"]
        if row["primary"] and row["metric"] is not None
        for comparison in row["comparisons"]
        if comparison["arm"] in arms
    ]
    first = next((e.row["metric"] for e in effects if e.verdict != "invalid"), None)
    return [e for e in effects if first is None or e.row["metric"] == first]


def _candidates(effects: Sequence[_Effect], baseline: str, noun: str) -> list[str]:
    """Return wordings of the answer, the most detailed first; :func:`shortest` picks one.

    ``noun``: what an arm's effects are counted by, ``rows`` or ``cells``.
    """
    by_arm: dict[str, list[_Effect]] = {}
    for effect in effects:
        by_arm.setdefault(effect.arm, []).append(effect)
    if len({id(e.row) for e in effects}) == 1 and {e.verdict for e in effects} == {"computed"}:
        return _computed_values(effects)
    if {e.verdict for e in effects} == {"estimate_only"}:
        return [f"Estimate only: {text}" for text in _several(by_arm, baseline, "looks", noun)]
    if len(by_arm) == 1:
        ((arm, own),) = by_arm.items()
        return _one_row(own[0], baseline) if len(own) == 1 else _rows(arm, own, baseline, noun)
    return _several(by_arm, baseline, "is", noun)


def _one_row(effect: _Effect, baseline: str) -> list[str]:
    """Return wordings of the answer for one arm in one row."""
    arm, margin = _capitalised(arm_text(effect.arm)), effect.comparison
    if effect.verdict in DECIDED:
        values = f": {effect.label} {effect.values}" if effect.values else ""
        verb = _verb(effect)
        return [
            f"{arm} {verb} than {baseline}{values}." if verb.startswith("is") else
            f"{arm} {verb} {effect.label} of {baseline}{values.replace(f': {effect.label}', ':')}.",
            f"{arm} {verb}{values}.",
            f"{arm} is {effect.size}.",
        ]  # fmt: skip
    if effect.verdict in SAME:
        ends = (margin["ci_low_pct"], margin["ci_high_pct"])
        bound = max(abs(end) for end in ends if end is not None)
        return [
            f"No difference in {effect.label} between {arm_text(effect.arm)} and {baseline} "
            f"beyond {magnitude_text(bound)} %.",
            f"{arm} makes no difference to {effect.label} beyond {magnitude_text(bound)} %.",
            f"No difference beyond {magnitude_text(bound)} %.",
        ]
    return [f"{text}" for text in _undecided([effect])]


def _computed_values(effects: Sequence[_Effect]) -> list[str]:
    """Return wordings with the computed values of one row: every arm's, or only the extremes.

    A relative difference would be no answer: ``49 % less`` where 14.1 and 7.1 % of RAM are taken.
    """
    first, row = effects[0], effects[0].row
    arms = [str(first.comparison["baseline"]), *(effect.arm for effect in effects)]
    medians = {arm: row["arms"][arm]["median"] for arm in arms}
    known = {arm: value for arm, value in medians.items() if value is not None}
    label, unit = _capitalised(first.label), unit_name(row["unit"])
    each = [f"{arm_text(arm)} {rounded_text(value, row['unit'])}" for arm, value in known.items()]
    low, high = (
        f"{rounded_text(known[arm], row['unit'])} ({arm_text(arm)})"
        for arm in (min(known, key=known.__getitem__), max(known, key=known.__getitem__))
    )
    return [f"{label}: {', '.join(each)} {unit}.", f"{label}: {low} to {high}, in {unit}."]


def _verb(effect: _Effect) -> str:
    """Return ``doubles``, ``halves``, or the effect with a verb, such as ``is 12 % faster``."""
    if DOUBLED[0] <= effect.percent <= DOUBLED[1]:
        return "doubles"
    return "halves" if HALVED[0] <= effect.percent <= HALVED[1] else f"is {effect.size}"


def _rows(arm: str, effects: Sequence[_Effect], baseline: str, noun: str) -> list[str]:
    """Return wordings of the answer for one arm in several rows (``noun``)."""
    name, total = _capitalised(arm_text(arm)), len(effects)
    changed = [e for e in effects if e.verdict in (*DECIDED, "computed")]
    same = [e for e in effects if e.verdict in SAME]
    undecided, rest = [e for e in effects if e.verdict in UNDECIDED], _rest(effects)
    if same and len(same) >= len(changed):
        limits = [abs(e.comparison[k]) for e in same for k in ("ci_low_pct", "ci_high_pct")]
        differs = f", {len(changed)} differ" if changed else ""
        where = _of(len(same), total, noun)
        beyond = f"beyond {magnitude_text(max(limits))} % in {where}{differs}{rest}."
        return [
            f"No difference between {arm_text(arm)} and {baseline} {beyond}",
            f"{name} makes no difference {beyond}",
        ]
    words = {e.word for e in changed}
    if len(words) == 1:
        size = _range(changed)
        where = _of(len(changed), total, noun)
        return [
            f"{name} is {words.pop()} than {baseline} in {where}, by {size} %{rest}.",
            f"{name}: {size} % {changed[0].word} in {where}{rest}.",
        ]
    if changed:
        best, worst = (pick(changed, key=lambda e: e.gain) for pick in (max, min))
        return [
            f"{name} is {best.size} ({best.place}) to {worst.size} ({worst.place}){rest}.",
            f"It depends: {name} is {best.size} to {worst.size}{rest}.",
        ]
    return _undecided(undecided)


def _several(
    by_arm: Mapping[str, Sequence[_Effect]], baseline: str, verb: str, noun: str
) -> list[str]:
    """Return wordings of the answer for several arms, the best arm first.

    ``verb`` is ``is`` for verdicts and ``looks`` for estimates.
    """
    decided = {
        arm: own
        for arm, effects in by_arm.items()
        if (own := [e for e in effects if verb == "looks" or e.verdict in (*DECIDED, "computed")])
    }
    open_arms = {
        arm: effects
        for arm, effects in by_arm.items()
        if arm not in decided and not any(e.verdict in SAME for e in effects)
    }
    several = any(len(effects) > 1 for effects in by_arm.values())
    rest = _rest([effects[0] for effects in open_arms.values()], "arm" if several else "")
    if not decided:
        return _no_change(by_arm, baseline, rest)
    order = sorted(decided, key=lambda arm: -_middle(decided[arm]))
    sizes = {arm: _sizes(decided[arm]) for arm in order}
    places = {
        arm: "" if len(own) == len(by_arm[arm]) else f" ({_of(len(own), len(by_arm[arm]), noun)})"
        for arm, own in decided.items()
    }
    best, *others = order
    name = _capitalised(arm_text(best)) if verb == "is" else arm_text(best)
    first = f"{name} {verb} {sizes[best]}"
    than, where = f"{first} than {baseline}", places[best]
    shown = [f"{than}{where}{rest}.", f"{than}{where}.", f"{first}."]
    if verb == "is" and len(by_arm) > MAX_NAMED_ARMS:
        return [*_most(by_arm, best, baseline, noun), *shown]
    if not others:
        return shown
    named = ", ".join(f"{arm_text(arm)} {sizes[arm]}{places[arm]}" for arm in others)
    all_others = _sizes([effect for arm in others for effect in decided[arm]])
    brief = f"others {all_others}" if len(others) > 1 else f"{arm_text(others[0])} {all_others}"
    return [
        f"{than}{where}, {named}{rest}.",
        f"{than}{where}; {brief}{rest}.",
        f"{than}{where}; {brief}.",
        *shown,
    ]


def _most(
    by_arm: Mapping[str, Sequence[_Effect]], best: str, baseline: str, noun: str
) -> list[str]:
    """Return a wording that counts the arms that differ in the same direction as the best arm.

    Only arms that differ in every row are counted. The list is empty if there are fewer than two.
    """
    word, rows = by_arm[best][0].word, len(by_arm[best])
    alike = [
        arm
        for arm, effects in by_arm.items()
        if all(e.verdict in (*DECIDED, "computed") and e.word == word for e in effects)
    ]
    if best not in alike or len(alike) < 2:
        return []
    count = f"All {len(by_arm)}" if len(alike) == len(by_arm) else f"{len(alike)} of {len(by_arm)}"
    where = f" in {_of(rows, rows, noun)}" if rows > 1 else ""
    lead = f"{arm_text(best)} most: {_range(by_arm[best])} %"
    return [f"{count} arms are {word} than {baseline}{where}, {lead}."]


def _no_change(by_arm: Mapping[str, Sequence[_Effect]], baseline: str, rest: str) -> list[str]:
    effects = [effect for own in by_arm.values() for effect in own]
    same = [e for e in effects if e.verdict in SAME]
    if not same:
        return _undecided(effects)
    limits = [abs(e.comparison[k]) for e in same for k in ("ci_low_pct", "ci_high_pct")]
    arms = join_names([arm_text(arm) for arm in dict.fromkeys(e.arm for e in same)])
    bound = magnitude_text(max(limits))
    return [
        f"{_capitalised(arms)}: no difference from {baseline} beyond {bound} %{rest}.",
        f"No arm differs from {baseline} by more than {bound} %{rest}.",
    ]


def _undecided(effects: Sequence[_Effect]) -> list[str]:
    """Return wordings for undecided rows.

    They give the interval if there is a single row, else the largest of the detectable effects.
    """
    first, c = effects[0], effects[0].comparison
    arms = join_names([arm_text(arm) for arm in dict.fromkeys(e.arm for e in effects)], "or")
    if len(effects) == 1 and c["ci_low_pct"] is not None:
        row = first.row
        ends = [
            f"{magnitude_text(end)} % "
            f"{change_word(row['metric'], row['unit'], row['better'], end > 0)}"
            for end in (c["ci_low_pct"], c["ci_high_pct"])
        ]
        return [
            f"Undecided: {arms} is {ends[0]} to {ends[1]}.",
            f"Undecided whether {arms} differs.",
        ]
    detectable = [e.comparison["mde_pct"] for e in effects if e.comparison["mde_pct"] is not None]
    baseline = arm_text(str(c["baseline"]))
    below = (
        f"; effects below {magnitude_text(max(detectable))} % cannot be seen" if detectable else ""
    )
    verb = "differs" if len({e.arm for e in effects}) == 1 else "differ"
    return [
        f"Undecided whether {arms} {verb} from {baseline}{below}.",
        f"Undecided{below}.",
    ]


def _best(cell: Json) -> list[str]:
    """Return wordings of the answer to a sweep."""
    if not cell["best"] or cell["best"][0]["best"] is None:
        return ["No answer: no setting has a valid result.", "No answer."]
    one, count = cell["best"][0], sum(arm["role"] != "control" for arm in cell["arms"])
    label = define_metric(one["metric"], one["unit"]).short_label
    best, unit = setting_text(one["best"]), unit_name(one["unit"])
    value = f"{rounded_text(one['values'][one['best']], one['unit'])} {unit}"
    if one["withheld"] is not None:
        return [
            f"Estimate only: {best} looks best of {count} for {label} ({value}).",
            f"Estimate only: {best} looks best of {count}.",
            f"Estimate only: one of {count} settings looks best for {label} ({value}).",
        ]
    rivals = len(one["possibly_best"])
    if rivals > 1:
        return [
            f"Undecided: {rivals} of {count} settings may be best for {label}; "
            f"measured best: {best}.",
            f"Undecided: {rivals} of {count} settings may be best for {label}.",
        ]
    word = change_word(one["metric"], one["unit"], one["better"], one["effect_pct"] > 0)
    size = f"{magnitude_text(one['effect_pct'])} % {word}"
    than = setting_text(one["reference"])
    return [
        f"{best} is best: {label} {value}, {size} than {than}.",
        f"{best} is best: {label} {value}, {size}.",
        f"{best} is best of {count}.",
        f"One of {count} settings is best for {label}: {value}.",
    ]


def _alone(analysis: CellAnalysis) -> list[str]:
    """Return wordings of the answer for a cell without an arm to compare."""
    row = next((r for r in analysis.json["rows"] if r["primary"] and r["metric"]), None)
    baseline = analysis.data.baseline
    median = row["arms"][baseline]["median"] if row is not None else None
    if row is None or median is None:
        return [f"Nothing was measured for {arm_text(baseline)}.", "Nothing was measured."]
    label = define_metric(row["metric"], row["unit"]).short_label
    where = "" if row["case"] == "all" else f" in {row['case']}"
    value = f"{rounded_text(median, row['unit'])} {unit_name(row['unit'])}"
    return [
        f"Nothing to compare: {arm_text(baseline)} has {label} {value}{where}.",
        f"Nothing to compare: {label} {value}.",
    ]


def _sizes(effects: Sequence[_Effect]) -> str:
    """Return the size of an arm's effects: ``55 % faster``, ``75.4 to 95.4 % faster``."""
    words = dict.fromkeys(e.word for e in effects)
    return _extremes(effects) if len(words) > 1 else f"{_range(effects)} % {effects[0].word}"


def _extremes(effects: Sequence[_Effect]) -> str:
    """Return the best and the worst effect: ``3 % faster to 12 % slower``."""
    best, worst = (pick(effects, key=lambda e: e.gain) for pick in (max, min))
    return best.size if best is worst else f"{best.size} to {worst.size}"


def _rest(effects: Sequence[_Effect], noun: str = "") -> str:
    """Return the number of effects without an answer: ``; 2 undecided; 1 invalid``, or nothing."""
    counts = {
        word: sum(e.verdict in verdicts for e in effects)
        for word, verdicts in (("undecided", UNDECIDED), ("invalid", ("invalid",)))
    }
    return "".join(
        f"; {count_text(count, noun) if noun else count} {word}"
        for word, count in counts.items()
        if count
    )


def _range(effects: Sequence[_Effect]) -> str:
    sizes = sorted(abs(e.percent) for e in effects)
    low, high = magnitude_text(sizes[0]), magnitude_text(sizes[-1])
    return low if low == high else f"{low} to {high}"


def _middle(effects: Sequence[_Effect]) -> float:
    gains = sorted(e.gain for e in effects)
    return gains[len(gains) // 2]


def _of(part: int, total: int, noun: str) -> str:
    if part < total:
        return f"{part} of {total} {noun}"
    return f"both {noun}" if total == 2 else f"all {total} {noun}"


def shortest(candidates: Sequence[str]) -> str:
    """Return the first candidate of at most 20 words. If all are longer, cut the last one."""
    for text in candidates:
        if len(text.split()) <= MAX_WORDS:
            return text
    return " ".join(candidates[-1].split()[:MAX_WORDS]).rstrip(".,;:") + " …"


def arm_text(arm: str) -> str:
    """Return an arm's name as words: ``seq map`` for ``seq_map``."""
    for name in PROPER_NAMES:
        arm = arm.replace(name, name.replace("_", "\0"))
    return arm.replace("_", " ").replace("\0", "_")


def rounded_text(value: float, unit: str | None) -> str:
    """Write a value with three significant digits: ``2,660``, ``35.8``, ``0.518``."""
    printed = scaled(value, unit)
    digits = 0 if abs(printed) >= 100 or printed == 0 else 1 if abs(printed) >= 10 else 2
    return f"{printed:,.{digits}f}" if abs(printed) >= 1 or printed == 0 else f"{printed:.3g}"


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]
