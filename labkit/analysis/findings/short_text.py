"""The short text of findings: the answer to a question in at most 20 words, for a title or a card.

It leaves out what does not fit: the names of rows, intervals, further metrics, reasons. It names
metrics and arms as people do. The long text is in :mod:`labkit.analysis.findings.long_text`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from labkit.analysis.comparison.best_setting import setting_text
from labkit.analysis.findings.cell_findings import (
    CHANGED,
    SAME,
    UNDECIDED,
    Answer,
    Finding,
    Findings,
    Group,
    answer_of,
    group_by_arm,
)
from labkit.analysis.findings.effect_wording import (
    amount_text,
    effect_phrase,
    interval_phrase,
    range_text,
)
from labkit.analysis.findings.outputs_text import outputs_wordings, worth_clauses
from labkit.analysis.number_format import join_names, magnitude_text, scaled, unit_name
from labkit.config import count_text
from labkit.records.metric_registry import define_metric

MAX_WORDS = 20
MAX_NAMED_ARMS = 3
AT_MEDIAN = "at the median"
PROPER_NAMES = ("mlx_lm",)  # names that keep their underscore


def short_text(findings: Findings) -> str:
    """Return the answer in at most 20 words."""
    return shortest(short_wordings(findings))


def shortest(wordings: Sequence[str]) -> str:
    """Return the first wording of at most 20 words. If all are longer, cut the last one."""
    for text in wordings:
        if len(text.split()) <= MAX_WORDS:
            return text
    return " ".join(wordings[-1].split()[:MAX_WORDS]).rstrip(".,;:") + " …"


def short_wordings(findings: Findings) -> list[str]:
    """Return wordings of the answer, the most detailed first."""
    match findings.answer:
        case Answer.best_setting:
            return [capitalised(text) for text in _best_setting(findings)]
        case Answer.outputs:
            return outputs_wordings(findings)
        case Answer.nothing_to_compare:
            return _alone(findings)
        case Answer.none:
            return [f"No answer: {findings.cause}."]
    wordings = _out_of_memory(findings) if findings.out_of_memory else list(_compared(findings))
    return [capitalised(text) for text in wordings]


def _compared(findings: Findings) -> Iterator[str]:
    """Yield wordings for findings on arms, in the most important metric that has any."""
    lead = findings.lead if findings.out_of_memory else findings.of_lead_metric
    groups, baseline = group_by_arm(lead), arm_text(findings.baseline)
    answer = answer_of(lead)
    if answer is Answer.computed and len({one.place for one in lead}) == 1:
        yield from _computed_values(findings)
        return
    yield from _with_worth(findings, groups)
    if answer is Answer.estimate:
        yield from (f"Estimate only: {text}" for text in _several(groups, findings, estimate=True))
    elif len(groups) > 1:
        yield from _several(groups, findings)
    elif len(groups[0].all) > 1:
        yield from _rows(groups[0], findings)
    else:
        yield from _with_further_metrics(groups[0], findings)
        yield from _one(lead[0], baseline)


def _one(finding: Finding, baseline: str) -> Iterator[str]:
    """Yield wordings for one arm in one row."""
    arm, metric = arm_text(finding.arm), finding.metric
    if finding.word in SAME:
        beyond = f"beyond {magnitude_text(finding.bound)} %"
        yield f"No difference in {metric.short_label} between {arm} and {baseline} {beyond}."
        yield f"{arm} makes no difference to {metric.short_label} {beyond}."
        yield f"No difference {beyond}."
    elif finding.word in UNDECIDED:
        yield from _undecided([finding], baseline)
    else:
        effects, than = [finding.effect], f"than {baseline}"
        for notes in ([interval_phrase(metric, finding.comparison.ci_pct)], []):
            yield f"{arm} {effect_phrase(metric, effects, than, base=finding.base, notes=notes)}."
        amount = amount_text(metric, effects)
        for tail, at, detail in ((than, False, True), ("", False, True), ("", False, False)):
            phrase = effect_phrase(metric, effects, tail, amount=amount, at=at, detail=detail)
            yield f"{arm} {phrase}."


def _with_further_metrics(group: Group, findings: Findings) -> Iterator[str]:
    """Yield wordings for one arm that changed several metrics, all of them decided.

    ``pauses 70 % less between tokens at p99 than whole, but waits 14 % more for the first token``.
    """
    measured = group_by_arm(findings.measured)
    if len(measured) < 2 or any(len(each.changed) != len(each.all) for each in measured):
        return
    if any(len(each.all) > 1 for each in measured):
        return
    first, *others = (each.all[0] for each in measured)
    than, medians = f"than {arm_text(findings.baseline)}", first.metric.words.at == AT_MEDIAN
    short = [(than, False), ("", True)] if medians else [("", True), (than, False)]
    for tail, at in ((than, True), *short, ("", False)):
        text = f"{arm_text(group.arm)} {_percent_phrase(first, tail, at)}"
        for one in others:
            same_way = (one.gain > 0) == (first.gain > 0)
            text += f"{' and' if same_way else ', but'} {_percent_phrase(one, '', at)}"
        yield f"{text}."


def _percent_phrase(one: Finding, tail: str, at: bool) -> str:
    amount = amount_text(one.metric, [one.effect])
    return effect_phrase(one.metric, [one.effect], tail, amount=amount, at=at)


def _rows(group: Group, findings: Findings) -> Iterator[str]:
    """Yield wordings for one arm in several rows."""
    arm, baseline, total = arm_text(group.arm), arm_text(findings.baseline), len(group.all)
    changed, same = group.those((*CHANGED, "computed")), group.those(SAME)
    rest, effects = _rest(group.all), [one.effect for one in changed]
    if same and len(same) >= len(changed):
        beyond = f"beyond {_largest_bound(same)} % in {_of(len(same), total, findings.noun)}"
        label = group.metric.short_label
        differs = ""
        if changed:
            amount, quantity = amount_text(group.metric, effects), group.metric.words.quantity
            quantity = "" if min(effects) < 0 < max(effects) else quantity  # it would be too long
            differs = f"; {f'{amount} {quantity}'.rstrip()} in {len(changed)}"
        yield f"No difference in {label} between {arm} and {baseline} {beyond}{differs}{rest}."
        yield f"{arm} makes no difference to {label} {beyond}{differs}{rest}."
        yield f"{arm}: no difference {beyond}{differs}{rest}."
        yield f"{arm}: no difference {beyond}{rest or differs}."
    elif not changed:
        yield from _undecided(group.all, baseline)
    else:
        places = [one.place for one in changed]
        where, than = f" in {_of(len(changed), total, findings.noun)}", f"than {baseline}"
        if min(effects) < 0 < max(effects):
            where = where if len(changed) < total else ""
            yield from _phrases(arm, group, changed, [f"{than}{where}", where], rest, places)
        yield from _phrases(arm, group, changed, [f"{than}{where}", than, where, ""], rest)


def _phrases(
    arm: str, group: Group, findings: Sequence[Finding], tails: Sequence[str], end: str,
    places: Sequence[str] = (),
) -> Iterator[str]:  # fmt: skip
    """Yield wordings of an arm's effects with each of these tails, with and without details."""
    effects = [one.effect for one in findings]
    amount = amount_text(group.metric, effects, places)
    for tail, (words, at) in product(tails, ((None, True), (amount, True), (amount, False))):
        if words or not places:
            phrase = effect_phrase(group.metric, effects, tail.strip(), amount=words, at=at)
            yield f"{arm} {phrase}{end}."


def _several(groups: Sequence[Group], findings: Findings, estimate: bool = False) -> Iterator[str]:
    """Yield wordings for several arms, the best arm first."""
    words = UNDECIDED if estimate else (*CHANGED, "computed")
    decided = [
        Group(group.arm, group.metric, own) for group in groups if (own := group.those(words))
    ]
    open_arms = [g for g in groups if not g.those((*words, *SAME))]
    rest = _rest([group.all[0] for group in open_arms], "arm" if _has_rows(groups) else "")
    if not decided:
        yield from _no_change(groups, findings, rest)
        return
    best, *others = sorted(decided, key=lambda group: -group.gain)
    baseline, totals = arm_text(findings.baseline), {g.arm: len(g.all) for g in groups}
    if not estimate:
        yield from _most(groups, best, findings)
    than = f"than {baseline}{_where(best, totals[best.arm], findings.noun)}"
    effects = [one.effect for one in best.all]
    amount, up = amount_text(best.metric, effects), max(effects) > 0
    first = [
        f"{arm_text(best.arm)} "
        + effect_phrase(best.metric, effects, than, amount=amount, at=at, detail=detail)
        for at, detail in ((True, True), (False, True), (False, False))
    ]
    named = ", ".join(
        f"{arm_text(group.arm)} {_like(group, group.all, up)}"
        f"{_where(group, totals[group.arm], findings.noun)}"
        for group in others
    )
    if others:
        yield from (f"{text}, {named}{rest}." for text in first)
        together = _like(best, [one for group in others for one in group.all], up)
        brief = "others" if len(others) > 1 else arm_text(others[0].arm)
        yield from (f"{text}; {brief} {together}{rest}." for text in first)
        yield from (f"{text}; {brief} {together}." for text in first)
    yield from (f"{text}{rest}." for text in first)
    yield from (f"{text}." for text in first)


def _like(group: Group, findings: Sequence[Finding], up: bool) -> str:
    """Return the amount of other effects; ``more`` or ``less`` is left out if it was just said."""
    effects = [one.effect for one in findings]
    if all((effect > 0) == up for effect in effects):
        return f"{range_text(effects)} %"
    return amount_text(group.metric, effects)


def _where(group: Group, total: int, noun: str) -> str:
    """Return in how many of an arm's rows it differs, or an empty string if in all."""
    return f" ({_of(len(group.all), total, noun)})" if len(group.all) < total else ""


def _has_rows(groups: Sequence[Group]) -> bool:
    return any(len(group.all) > 1 for group in groups)


def _most(groups: Sequence[Group], best: Group, findings: Findings) -> Iterator[str]:
    """Yield wordings that count the arms that differ in the same direction as the best one.

    Only arms that differ in every row are counted. There are no wordings for fewer than two, nor
    for few arms unless they pay for it in another metric.
    """
    alike = [
        group
        for group in groups
        if len(group.those((*CHANGED, "computed"))) == len(group.all)
        and all((one.effect > 0) == (best.all[0].effect > 0) for one in group.all)
    ]
    if len(alike) < 2 or best.arm not in [group.arm for group in alike]:
        return
    metric, better = best.metric, best.gain > 0
    extreme = best if better else min(alike, key=lambda group: group.gain)
    total = len(groups)
    count = "Both" if total == 2 else f"All {total}"
    count = count if len(alike) == total else f"{len(alike)} of {total}"
    where = f" in {_of(len(best.all), len(best.all), findings.noun)}" if _has_rows(groups) else ""
    effects = [one.effect for group in alike for one in group.all]
    amount, verb = amount_text(metric, effects), metric.words.verb
    lead = f"({'best' if better else 'worst'}: {arm_text(extreme.arm)})"
    than = f"than {arm_text(findings.baseline)}{where}"
    rest = [e for g in groups if g not in alike for e in g.those((*CHANGED, "computed"))]
    others = f", the others {_like(best, rest, max(effects) > 0)}" if rest else ""
    price = _price_of_all(findings, [group.arm for group in alike], better)
    ends = [f" {lead}{price}", price] if price else []
    ends += [f" {lead}{others}", others] if len(groups) > MAX_NAMED_ARMS else []
    for end, (at, detail) in product(ends, ((True, True), (False, True), (False, False))):
        phrase = effect_phrase(
            metric, effects, than, amount=amount, verb=verb, at=at, detail=detail
        )
        yield f"{count} arms {phrase}{end}."


def _price_of_all(findings: Findings, arms: Sequence[str], better: bool) -> str:
    """Return a clause on a second metric in which all these arms differ the other way, or nothing.

    ``, but take more time per output token``.
    """
    lead = findings.lead[0].metric
    second = next((one.metric for one in findings.measured if one.metric != lead), None)
    own = [one for one in findings.measured if one.metric == second and one.arm in arms]
    if second is None or not all(one.word == ("worse" if better else "better") for one in own):
        return ""
    word = second.words.more if own[0].effect > 0 else second.words.less
    return f", but {effect_phrase(second, [], amount=word, verb=second.words.verb, at=False)}"


def _no_change(groups: Sequence[Group], findings: Findings, rest: str) -> Iterator[str]:
    """Yield wordings for several arms of which none is known to differ."""
    baseline = arm_text(findings.baseline)
    same = [one for group in groups for one in group.those(SAME)]
    if not same:
        yield from _undecided([one for group in groups for one in group.all], baseline)
        return
    arms = join_names([arm_text(arm) for arm in dict.fromkeys(one.arm for one in same)])
    bound, label = _largest_bound(same), same[0].metric.short_label
    yield f"{arms}: no difference from {baseline} in {label} beyond {bound} %{rest}."
    yield f"{arms}: no difference from {baseline} beyond {bound} %{rest}."
    yield f"No arm differs from {baseline} in {label} by more than {bound} %{rest}."


def _undecided(findings: Sequence[Finding], baseline: str) -> Iterator[str]:
    """Yield wordings for undecided rows.

    They give the interval if there is a single row, else the largest of the detectable effects.
    """
    arms = join_names([arm_text(arm) for arm in dict.fromkeys(one.arm for one in findings)], "or")
    one, interval = findings[0], findings[0].comparison.ci_pct
    if len(findings) == 1 and interval is not None:
        for tail, at in ((f"than {baseline}", True), (f"than {baseline}", False), ("", False)):
            amount = amount_text(one.metric, interval)
            phrase = effect_phrase(one.metric, interval, tail, amount=amount, at=at)
            yield f"Undecided: {arms} {phrase}."
        yield f"Undecided whether {arms} differs."
        return
    known = [one.comparison.mde_pct for one in findings if one.comparison.mde_pct is not None]
    below = f"; effects below {magnitude_text(max(known))} % cannot be seen" if known else ""
    label = one.metric.short_label
    yield f"Undecided whether {arms} differs from {baseline} in {label}{below}."
    yield f"Undecided whether {arms} differs from {baseline}{below}."
    yield f"Undecided{below}."


def _computed_values(findings: Findings) -> Iterator[str]:
    """Yield the computed values of one row: every arm's, or only the extremes.

    A relative difference would be no answer: ``49 % less`` where 14.1 and 7.1 % of RAM are taken.
    """
    first = findings.lead[0]
    values = {findings.baseline: first.base} | {one.arm: one.value for one in findings.lead}
    known = {arm: value for arm, value in values.items() if value is not None}
    label, unit = first.metric.short_label, first.metric.unit
    texts = {arm: rounded_text(value, unit) for arm, value in known.items()}
    each = ", ".join(f"{arm_text(arm)} {text}" for arm, text in texts.items())
    yield f"{label}: {each} {unit_name(unit)}."
    ends = (pick(known, key=lambda arm: known[arm]) for pick in (min, max))
    low, high = (f"{texts[arm]} ({arm_text(arm)})" for arm in ends)
    yield f"{label}: {low} to {high}, in {unit_name(unit)}."


def _with_worth(findings: Findings, groups: Sequence[Group]) -> Iterator[str]:
    """Yield the best arm's effect and what its frames or predictions are worth, if known."""
    decided = [Group(g.arm, g.metric, g.changed) for g in groups if g.changed]
    if not decided:
        return
    best = max(decided, key=lambda group: group.gain)
    effects, than = [one.effect for one in best.all], f"than {arm_text(findings.baseline)}"
    amount = amount_text(best.metric, effects)
    clauses = worth_clauses(findings, best.arm)
    for clause, (tail, detail) in product(clauses, ((than, True), (than, False), ("", False))):
        phrase = effect_phrase(best.metric, effects, tail, amount=amount, detail=detail)
        yield f"{arm_text(best.arm)} {phrase}; {clause}."


def _out_of_memory(findings: Findings) -> list[str]:
    """Return wordings that name the arms that ran out of memory, as they claim."""
    died = join_names([arm_text(arm) for arm in findings.out_of_memory])
    decided = [one for one in findings.lead if one.word in CHANGED]
    texts = []
    if len(findings.lead) <= MAX_NAMED_ARMS or not decided:
        texts = [capitalised(text) for text in _compared(findings)]
    if decided:
        amount = amount_text(decided[0].metric, [one.effect for one in decided])
        quantity = decided[0].metric.words.quantity
        text = f"Others: {amount} {quantity}".rstrip()
        texts += [f"{text}{_rest(findings.lead)}.", f"{text}."]
    return [f"Out of memory: {died}. {text}" for text in texts]


def _best_setting(findings: Findings) -> Iterator[str]:
    """Yield wordings of the answer to a sweep, by its first row."""
    count = findings.num_settings
    one = findings.best[0] if findings.best else None
    if one is None or one.best is None or one.reference is None or one.effect_pct is None:
        yield "No answer: no setting has a valid result."
        return
    metric, best = define_metric(one.metric, one.unit), setting_text(one.best)
    label = metric.short_label
    value = f"{rounded_text(one.values[one.best], one.unit)} {unit_name(one.unit)}"
    if one.withheld is not None:
        yield f"Estimate only: {best} looks best of {count} for {label} ({value})."
        yield f"Estimate only: {best} looks best of {count}."
        yield f"Estimate only: one of {count} settings looks best for {label} ({value})."
        return
    rivals = len(one.possibly_best)
    if rivals > 1:
        text = f"Undecided: {rivals} of {count} settings may be best for {label}"
        yield from (f"{text}; measured best: {best}.", f"{text}.")
        return
    amount, than = amount_text(metric, [one.effect_pct]), setting_text(one.reference)
    yield f"{best} is best: {label} {value}, {amount} than {than}."
    yield f"{best} is best: {label} {value}, {amount}."
    yield f"{best} is best of {count}: {label} {value}."
    yield f"One of {count} settings is best for {label}: {value}."


def _alone(findings: Findings) -> list[str]:
    """Return wordings of the answer for a cell without an arm to compare."""
    baseline = arm_text(findings.baseline)
    if findings.alone is None:
        return [f"Nothing was measured for {baseline}.", "Nothing was measured."]
    row, median = findings.alone
    label = row.definition.short_label
    where = "" if row.case == "all" else f" in {row.case}"
    value = f"{rounded_text(median, row.unit)} {unit_name(row.unit)}"
    return [
        f"Nothing to compare: {baseline} has {label} {value}{where}.",
        f"Nothing to compare: {label} {value}.",
    ]


def _rest(findings: Sequence[Finding], noun: str = "") -> str:
    """Return the number of findings without an answer: ``; 2 undecided; 1 invalid``, or nothing."""
    counts = {
        word: sum(one.word in words for one in findings)
        for word, words in (("undecided", UNDECIDED), ("invalid", ("invalid",)))
    }
    return "".join(
        f"; {count_text(count, noun) if noun else count} {word}"
        for word, count in counts.items()
        if count
    )


def _largest_bound(findings: Sequence[Finding]) -> str:
    return magnitude_text(max(one.bound for one in findings))


def _of(part: int, total: int, noun: str) -> str:
    if part < total:
        return f"{part} of {total} {noun}"
    return f"both {noun}" if total == 2 else f"all {total} {noun}"


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


def capitalised(text: str) -> str:
    """Return a text with its first letter as a capital."""
    return text[:1].upper() + text[1:]
