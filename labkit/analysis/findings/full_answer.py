"""The long text of findings: the whole answer to a cell's question, the same in every format.

If the question is about outputs, the text first says whether they are as claimed. Then follow the
decided effects and their sizes, the undecided rows with their smallest detectable effects, the
computed values, and what the arms' predictions or frames are worth. An inconclusive row is given no
direction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from labkit.analysis.comparison.best_setting import setting_text
from labkit.analysis.findings.cell_findings import (
    CHANGED,
    SAME,
    UNDECIDED,
    Answer,
    Finding,
    Findings,
    Group,
    amount_of,
    answer_of,
    differences_of,
    group_by_arm,
)
from labkit.analysis.findings.effect_wording import (
    amount_text,
    effect_phrase,
    interval_phrase,
    size_text,
    value_with_unit,
)
from labkit.analysis.findings.output_quality_sentences import (
    frames_sentences,
    outputs_wordings,
    quality_sentences,
)
from labkit.analysis.findings.verdict_sentences import as_measured_text
from labkit.analysis.model.cell_model import BestInRow
from labkit.analysis.model.result_row import row_name
from labkit.analysis.number_format import bound_text, magnitude_text
from labkit.analysis.text_format import join_names
from labkit.config import count_text

MAX_NAMED_ROWS = 3  # if there are more rows, their number and the extremes are given
MAX_NAMED_SETTINGS = 3


def long_text(findings: Findings) -> str:
    """Return the whole answer to a cell's question."""
    if findings.answer is Answer.best_setting:
        return _best_settings(findings)
    if findings.answer is Answer.nothing_to_compare:
        return _noise(findings)
    sentences = outputs_wordings(findings)[:1] if findings.outputs is not None else []
    if findings.measured or not (sentences or findings.computed):
        sentences.append(_measured(findings))
    sentences += _computed(findings)
    sentences += quality_sentences(findings)
    sentences += frames_sentences(findings)
    return " ".join(sentences)


def _measured(findings: Findings) -> str:
    results, baseline = findings.measured, findings.baseline
    missing = f"; not measured: {_first_names(findings.missing)}" if findings.missing else ""
    answer, groups = answer_of(results), group_by_arm(results)
    if not results:
        return f"No answer: {findings.cause}{missing}."
    if answer is Answer.none:
        return f"No answer: {_invalid_arms(results)}."
    if answer is Answer.undecided:
        return f"Not decided: {_not_decided(results, baseline)}{missing}."
    where = "In the emulator" if findings.emulated else "On this machine"
    if findings.if_no_drift:
        where = "If nothing drifted between the arms' runs"
    if answer is Answer.estimate:
        estimates = [one for one in results if one.word in UNDECIDED]
        where = f"Estimate only ({_reason(estimates)})"
    stated = UNDECIDED if answer is Answer.estimate else CHANGED
    if len(findings.arms) == 1:
        sign = ":" if answer is Answer.estimate else "," if findings.if_no_drift else ""
        return f"{where}{sign} {_arm_clause(groups, baseline, stated)}{missing}."
    arms = dict.fromkeys(group.arm for group in groups)
    clauses = [_arm_clause([g for g in groups if g.arm == arm], "", stated) for arm in arms]
    return f"{where}, against {baseline}: {'; '.join(clauses)}{missing}."


def _arm_clause(groups: Sequence[Group], baseline: str, stated: Sequence[str]) -> str:
    """Return one arm's clauses, one per metric, on the effects of ``stated`` verdicts."""
    first, *others = groups
    clauses = [_metric_clause(first.arm, first, baseline, stated, bool(others))]
    clauses += [_metric_clause("it", group, "", stated, True) for group in others]
    return "; ".join(clauses)


def _metric_clause(
    subject: str, group: Group, baseline: str, stated: Sequence[str], named: bool
) -> str:
    """Return one arm's clause on one metric; ``named``: whether undecided rows need its name."""
    changed, same, total = group.those(stated), group.those(SAME), len(group.all)
    clauses, metric = [], f" in {group.metric.label}"
    if same and len(same) >= len(changed):
        text = f"{subject} {_unchanged(same, baseline)}{metric}"
        share = "" if len(same) == total else f" ({len(same)} of {total} rows)"
        more = f"{share}; it differs more" if len(same) + len(changed) < total else ", except"
        text += f"{more} in {_exceptions(group, changed)}" if changed else share
        clauses.append(text)
    elif changed:
        text = f"{subject} {_changes(group, changed, baseline)}"
        rest = f" and {_unchanged(same, '')}{_in_rows(same, total)}" if same else ""
        clauses.append(f"{text}{rest}")
    undecided = () if stated is UNDECIDED else group.those(UNDECIDED)
    for word, rows in (("undecided", undecided), ("invalid", group.those(("invalid",)))):
        if rows:
            reason = f": {_reason(rows)}" if word == "invalid" else _detectable(rows)
            names = _first_names([one.place for one in rows])
            where = f" in {count_text(len(rows), 'row')} ({names})" if len(rows) < total else ""
            start = "" if clauses else f"{subject} is "
            clauses.append(f"{start}{word}{metric if named else ''}{where}{reason}")
    return "; ".join(clauses)


def _unchanged(same: Sequence[Finding], baseline: str) -> str:
    limit = bound_text(max(one.bound for one in same))
    return f"differs{f' from {baseline}' if baseline else ''} by at most {limit} %"


def _exceptions(group: Group, changed: Sequence[Finding]) -> str:
    """Return the rows that differ with their effects, the largest first."""
    if len(changed) > MAX_NAMED_ROWS:
        return f"{count_text(len(changed), 'row')} ({amount_of(changed)})"
    order = sorted(changed, key=lambda one: -abs(one.effect))
    return join_names([f"{one.place} ({amount_of([one])})" for one in order])


def _changes(group: Group, changed: Sequence[Finding], baseline: str) -> str:
    """Return the changes with a verb: ``takes 4.1 to 8.0 % less time than x in all 3 rows``."""
    total = len(group.all)
    if total == 1:
        (one,) = changed
        where = "" if one.place == group.metric.name else f"in {one.place}"
        known = one.comparison.ci_pct if one.word in CHANGED else None
        interval = interval_phrase(one.metric, known, one.comparison.level)
        interval += as_measured_text(one.comparison, True)
        options = {"base": one.base, "interval": interval, "differences": differences_of([one])}
        return effect_phrase(one.metric, [one.effect], baseline, where, **options)
    by_direction: dict[bool, list[Finding]] = {}
    for one in changed:
        by_direction.setdefault(one.effect > 0, []).append(one)
    parts: list[str] = []
    for findings in by_direction.values():
        few = len(findings) < min(3, total)
        names = f" ({join_names([one.place for one in findings])})" if few else ""
        where = f"{_in_rows(findings, total)}{names}"
        if parts:
            parts.append(f"{amount_of(findings)}{where}")
        else:
            effects, of_zero = [one.effect for one in findings], differences_of(findings)
            where = where.strip()
            parts = [effect_phrase(group.metric, effects, baseline, where, differences=of_zero)]
    return " and ".join(parts)


def _not_decided(results: Sequence[Finding], baseline: str) -> str:
    """Return a clause for a cell without decided rows: the rows, and the detectable effect."""
    undecided = [one for one in results if one.word != "invalid"]
    invalid = [one for one in results if one.word == "invalid"]
    facts = ((one.arm, one.place, one.metric.label) for one in undecided)
    arms, rows, metrics = (list(dict.fromkeys(names)) for names in zip(*facts, strict=True))
    where = f"in {metrics[0]}" if len(metrics) == 1 else ""
    if len(rows) > 1:
        where = f"{where} in any of {len(rows)} rows".strip()
    elif rows[0] != undecided[0].metric.name:
        where += f" in {rows[0]}"
    text = f"whether {join_names(arms, 'or')} differs from {baseline} {where}"
    text += _detectable(undecided)
    return f"{text}; {_invalid_arms(invalid)}" if invalid else text


def _detectable(undecided: Sequence[Finding]) -> str:
    """Return the range of undecided rows' smallest detectable effects, or why they are so."""
    known = [(one.comparison.mde_pct, one.place) for one in undecided if one.comparison.mde_pct]
    if not known:
        return f" ({_reason(undecided)})"
    (low, low_row), (high, high_row) = min(known), max(known)
    text = f"; the smallest detectable effect is {magnitude_text(low)} %"
    if magnitude_text(low) == magnitude_text(high):
        return text
    if low_row == high_row:
        return f"{text} to {magnitude_text(high)} %"
    return f"{text} ({low_row}) to {magnitude_text(high)} % ({high_row})"


def _invalid_arms(results: Sequence[Finding]) -> str:
    reasons: dict[str, list[str]] = {}
    for arm in dict.fromkeys(one.arm for one in results):
        reasons.setdefault(_reason([one for one in results if one.arm == arm]), []).append(arm)
    return "; ".join(
        f"{join_names(arms)} {'is' if len(arms) == 1 else 'are'} invalid: {reason}"
        for reason, arms in reasons.items()
    )


def _reason(findings: Sequence[Finding]) -> str:
    reasons = list(dict.fromkeys(str(one.comparison.reason) for one in findings))
    others = len(reasons) - 1
    return f"{reasons[0]} (and {count_text(others, 'other cause')})" if others else reasons[0]


def _computed(findings: Findings) -> Iterator[str]:
    for name in dict.fromkeys(one.metric.name for one in findings.computed):
        own = [one for one in findings.computed if one.metric.name == name]
        metric = own[0].metric
        start = f"{metric.label[:1].upper()}{metric.label[1:]} (computed)"
        if own[0].place == name:
            known = own[0].base
            base = "none" if known is None else value_with_unit(known, metric.unit)
            values = [f"{one.arm} {_value_and_difference(one)}" for one in own]
            yield f"{start}: {', '.join([f'{findings.baseline} {base}', *values])}."
        else:
            parts = (f"{group.arm} {_computed_range(group)}" for group in group_by_arm(own))
            yield f"{start}, against {findings.baseline}: {'; '.join(parts)}."


def _value_and_difference(one: Finding) -> str:
    """Return a computed value and its difference: ``9.7 % (50.2 points less)``."""
    if one.value is None:
        return "unknown"
    value = value_with_unit(one.value, one.metric.unit)
    return value if one.base is None else f"{value} ({_difference(one, one.base, one.value, '')})"


def _computed_range(group: Group) -> str:
    """Return an arm's differences over cases: ``189 steps (95.0 %) fewer (a), the same (b)``."""
    names: dict[str, list[str]] = {}
    pairs = [(one, one.base, one.value) for one in group.all]
    known = [(o, base, value) for o, base, value in pairs if base is not None and value is not None]
    for one, base, value in sorted(known, key=lambda each: each[2] - each[1]):
        size = value_with_unit(abs(value - base), one.metric.unit)
        names.setdefault(_difference(one, base, value, size), []).append(one.place)
    where = {t: p[0] if len(p) == 1 else count_text(len(p), "row") for t, p in names.items()}
    few = [f"{text} ({place})" for text, place in where.items()]
    few = [f"{few[0]} to {few[-1]}"] if len(few) > MAX_NAMED_ROWS else few
    unknown = len(pairs) - len(known)
    return ", ".join([*few, *([f"unknown in {count_text(unknown, 'row')}"] if unknown else [])])


def _difference(one: Finding, base: float, value: float, size: str) -> str:
    """Return ``50.2 points less`` or ``the same``; ``size``: shown beside a percentage."""
    if value == base:
        return "the same"
    word = one.metric.words.more if value > base else one.metric.words.less
    if base <= 0 or one.metric.unit.startswith("%"):
        return f"{size_text(one.metric.unit, value - base)} {word}"
    percent = f"{magnitude_text(100 * (value / base - 1))} %"
    return f"{size} ({percent}) {word}" if size else f"{percent} {word}"


def _noise(findings: Findings) -> str:
    known = [one for one in findings.noise if one.comparison.effect_pct is not None]
    if not known:
        return f"No arms to compare: {findings.baseline} is the only one."
    largest = max(known, key=lambda one: abs(one.effect))
    return (
        f"No arms to compare: two identical copies of {findings.baseline} measured up to "
        f"{magnitude_text(largest.effect)} % apart ({largest.place}){_detectable(known)}."
    )


def _best_settings(findings: Findings) -> str:
    if not findings.best:
        return "No answer: nothing was measured."
    clauses = [_best_setting(one, findings) for one in findings.best]
    failed = list(dict.fromkeys(arm for one in findings.best for arm in one.excluded))
    missing = f" No valid result: {_settings(failed)}." if failed else ""
    return f"{clauses[0][0].upper()}{'; '.join(clauses)[1:]}.{missing}"


def _best_setting(one: BestInRow, findings: Findings) -> str:
    metric, count = one.definition, findings.num_settings
    metrics = {other.metric for other in findings.best}
    named = len(findings.best) > 1 and one.case != "all"
    where = f"in {row_name(one, metrics) if named else metric.label}"
    if one.is_computed:
        return _best_computed(one, where)
    if one.best is None or one.reference is None or one.effect_pct is None:
        return f"no answer {where}: {one.withheld}"
    best, settings = setting_text(one.best), count_text(count, "setting")
    than, base = setting_text(one.reference), one.values.get(one.reference)
    if one.withheld is not None:
        phrase = effect_phrase(metric, [one.effect_pct], than, base=base)
        return (
            f"not decided: which of {settings} is best {where}; an estimate only "
            f"({one.withheld}): {best} {phrase}"
        )
    low, high = one.ci_low_pct or 0.0, one.ci_high_pct or 0.0
    if low * high > 0:
        interval = interval_phrase(metric, (low, high), one.level)
        lead = effect_phrase(metric, [one.effect_pct], than, base=base, interval=interval)
    else:
        confidence = f"{100 * (one.level or 0.0):g} % interval"
        amount = amount_text(metric, (low, high))
        lead = effect_phrase(metric, [one.effect_pct], than, amount=amount, interval=confidence)
    rivals = [arm for arm in one.possibly_best if arm != one.best]
    if not rivals:
        return f"on this machine {best} is the best of {settings} {where}: it {lead}"
    all_alike = len(rivals) + 1 == count
    how = "cannot be told apart" if all_alike else "may be the best"
    which = settings if all_alike else f"{len(rivals) + 1} of {settings}"
    text = f"not decided: {which} {how} {where}; the best measured, {best}, {lead}"
    if all_alike:
        return text
    if rivals == [one.reference]:
        return f"{text}, the only one not told apart from it"
    return f"{text}; not told apart from it: {_settings(rivals)}"


def _best_computed(one: BestInRow, where: str) -> str:
    best, other = (
        value_with_unit(one.values[str(arm)], one.unit) for arm in (one.best, one.reference)
    )
    settings = count_text(len(one.values), "setting")
    if len(one.possibly_best) == len(one.values):
        return f"{where} (computed), {settings} do not differ: {best}"
    verb = "is" if len(one.possibly_best) == 1 else "are"
    winners = f"{_settings(one.possibly_best)} {verb} the best of {settings}"
    return f"{where} (computed), {winners}: {best}; {setting_text(str(one.reference))} has {other}"


def _settings(arms: Sequence[str]) -> str:
    if len(arms) > MAX_NAMED_SETTINGS:
        return f"{len(arms)} settings, marked ~ in the table"
    return "; ".join(map(setting_text, arms))


def _in_rows(findings: Sequence[Finding], total: int) -> str:
    if len(findings) == total:
        return " in both rows" if total == 2 else f" in all {total} rows"
    return f" in {len(findings)} of {total} rows"


def _first_names(names: Sequence[str]) -> str:
    rest = len(names) - MAX_NAMED_ROWS
    return "; ".join([*names[:MAX_NAMED_ROWS], *([f"{rest} more"] if rest > 0 else [])])
