"""The short text of findings: the answer to a question in at most 20 words, for a title or a card.

A wording consists of pieces. If it is too long, the pieces are left out or shortened that lose
least: intervals and ratios first, the count of rows last. The long text is in
:mod:`labkit.analysis.findings.full_answer`.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    amount_of,
    answer_of,
    differences_of,
    group_by_arm,
    leading_metrics,
)
from labkit.analysis.findings.effect_wording import (
    NO_BASELINE,
    NO_COUNT,
    NO_DETAIL,
    NO_NAMES,
    NO_RATIO,
    Piece,
    amount_text,
    effect_pieces,
    interval_phrase,
    join,
    optional,
    sizes_text,
)
from labkit.analysis.findings.output_quality_sentences import outputs_wordings, worth_clauses
from labkit.analysis.number_format import bound_text, magnitude_text, scaled, unit_name
from labkit.analysis.text_format import join_names
from labkit.config import count_text

MAX_WORDS = 20
MAX_NAMED_ARMS = 3
MAX_FURTHER_METRICS = 2
PROPER_NAMES = ("mlx_lm",)  # names that keep their underscore
Pieces = list[Piece]


def short_answer(findings: Findings) -> str:
    """Return the answer in at most 20 words."""
    return fit(short_pieces(findings))


def fit(*wordings: Pieces) -> str:
    """Return the first wording that fits into 20 words, with the least loss, or cut the last."""
    shortest = ""
    for pieces in wordings:
        forms = []
        for choice in product(*(((0, piece.text), *piece.shorter) for piece in pieces)):
            text = capitalised(f"{join(text for _, text in choice)}.")
            forms.append((sum(loss for loss, _ in choice), len(text.split()), text))
        short = [form for form in forms if form[1] <= MAX_WORDS]
        if short:
            return min(short)[2]
        shortest = min(forms, key=lambda form: form[1])[2]
    return " ".join(shortest.split()[:MAX_WORDS]).rstrip(".,;:") + " …"


def short_pieces(findings: Findings) -> Pieces:
    """Return the answer in pieces."""
    match findings.answer:
        case Answer.best_setting:
            return _best_setting(findings)
        case Answer.outputs:
            full, *shorter = (text.rstrip(".") for text in outputs_wordings(findings))
            return [Piece(full, tuple(enumerate(shorter, start=1)))]
        case Answer.nothing_to_compare:
            return _alone(findings)
        case Answer.none if findings.out_of_memory:
            died = join_names([arm_text(arm) for arm in findings.out_of_memory])
            return [Piece(f"Out of memory, as claimed: {died}")]
        case Answer.none:
            return [Piece(f"No answer: {findings.cause}")]
    if findings.out_of_memory:
        return _out_of_memory(findings)
    condition = [Piece("If nothing drifted:")] if findings.if_no_drift else []
    return [*condition, *_compared(findings)]


def _compared(findings: Findings) -> Pieces:
    """Return the findings on arms in the leading metric, and which more important are undecided."""
    *before, _ = leading_metrics(findings.findings)
    undecided = dict.fromkeys(
        one.metric.short_label
        for one in findings.findings
        if one.metric in before and one.word in UNDECIDED
    )
    text = f"; {join_names(list(undecided))} undecided" if undecided else ""
    return [*_in_leading_metric(findings), optional(text, NO_COUNT)]


def _in_leading_metric(findings: Findings) -> Pieces:
    lead = findings.lead if findings.out_of_memory else findings.of_lead_metric
    groups, answer = group_by_arm(lead), answer_of(lead)
    if answer is Answer.computed and len({one.place for one in lead}) == 1:
        return _computed_values(findings)
    changed = [Group(g.arm, g.metric, g.changed) for g in groups if g.changed]
    best = max(changed, key=lambda group: group.gain) if changed else None
    worth = list(worth_clauses(findings, best.arm)) if best is not None else []
    if best is not None and worth:
        total = next(len(group.all) for group in groups if group.arm == best.arm)
        where = f"in {_of(len(best.all), total, findings.noun)}" if total > 1 else ""
        clause = Piece(f"; {worth[0]}", tuple((1, f"; {text}") for text in worth[1:]))
        worse = [group for group in changed if group.gain * best.gain < 0]
        return [*_effects(best, findings, where), clause, optional(_beside(worse), NO_COUNT)]
    if answer is Answer.estimate:
        return [Piece("Estimate only:"), *_several(groups, findings, UNDECIDED)]
    if len(groups) > 1:
        return _several(groups, findings, (*CHANGED, "computed"))
    return _one_arm(groups[0], findings)


def _beside(groups: Sequence[Group]) -> str:
    """Return the effects of other arms: ``; plan 20.0 % more time``, or nothing."""
    if not groups:
        return ""
    names = arm_text(groups[0].arm) if len(groups) == 1 else "other arms"
    amount = amount_of([one for group in groups for one in group.all])
    return f"; {names} {amount} {groups[0].metric.words.quantity}".rstrip()


def _effects(group: Group, findings: Findings, where: str = "", verb: str | None = None) -> Pieces:
    than, subject = arm_text(findings.baseline), Piece(arm_text(group.arm))
    return [subject, *_pieces(group, than, where, verb)]


def _pieces(group: Group, than: str = "", where: str = "", verb: str | None = None) -> Pieces:
    effects = [one.effect for one in group.all]
    amount, differences = amount_of(group.all), differences_of(group.all)
    return effect_pieces(
        group.metric, effects, than, where, amount=amount, differences=differences, verb=verb
    )


def _one_arm(group: Group, findings: Findings) -> Pieces:
    arm, baseline, total = arm_text(group.arm), arm_text(findings.baseline), len(group.all)
    changed, same, metric = group.those((*CHANGED, "computed")), group.those(SAME), group.metric
    rest, effects = optional(_rest(group.all), NO_COUNT), [one.effect for one in changed]
    if same and len(same) >= len(changed):
        quantity = metric.short_label if any(differences_of(changed)) else metric.words.quantity
        amount = f"{amount_of(changed)} {quantity}".rstrip() if changed else ""
        differs = f"; {amount} in {len(changed)}" if changed else ""
        where = f"in {_of(len(same), total, findings.noun)}" if total > 1 else ""
        return [
            Piece("No difference"), optional(f"in {metric.short_label}", NO_DETAIL),
            optional(f"between {arm} and {baseline}", NO_BASELINE),
            Piece(f"beyond {_largest_bound(same)} %"), Piece(where),
            optional(differs, NO_COUNT), rest,
        ]  # fmt: skip
    if not changed:
        return _undecided(group.all, baseline)
    if total == 1 and (further := _further_metrics(group, findings)):
        return further
    both = min(effects) < 0 < max(effects)
    places = [one.place for one in changed] if both else []
    where = f"in {_of(len(changed), total, findings.noun)}"
    first, alone = changed[0], total == 1
    return [
        Piece(arm),
        *effect_pieces(
            metric, effects, baseline, "" if alone or (both and len(changed) == total) else where,
            amount=amount_of(changed, places) if both else None,
            base=first.base if alone else None,
            differences=differences_of(changed),
            interval=interval_phrase(metric, first.comparison.ci_pct) if alone else "",
        ),
        rest,
    ]  # fmt: skip


def _further_metrics(group: Group, findings: Findings) -> Pieces:
    """Return the effects of one arm that changed several metrics in one row each, else nothing.

    ``pauses 70 % less between tokens at p99 than whole, but waits 14 % more for the first token``.
    """
    first, *others = group_by_arm(findings.measured)
    if not 0 < len(others) <= MAX_FURTHER_METRICS:
        return []
    if any(len(each.all) > 1 or not each.changed for each in (first, *others)):
        return []
    pieces = _effects(first, findings)
    for other in others:
        same_way = (other.gain > 0) == (first.gain > 0)
        pieces += [Piece("and" if same_way else ", but"), *_pieces(other)]
    return pieces


def _several(groups: Sequence[Group], findings: Findings, words: Sequence[str]) -> Pieces:
    """Return the answer for several arms, the best arm first. ``words``: the verdicts to name."""
    named = [Group(g.arm, g.metric, own) for g in groups if (own := g.those(words))]
    without = [group.all[0] for group in groups if not group.those((*words, *SAME))]
    several_rows = any(len(group.all) > 1 for group in groups)
    rest = optional(_rest(without, "arm" if several_rows else ""), NO_COUNT)
    if not named:
        return _no_change(groups, findings, rest)
    best, *others = sorted(named, key=lambda group: -group.gain)
    totals = {group.arm: len(group.all) for group in groups}
    everywhere = sum(len(group.all) for group in named) == sum(totals.values())
    one_way = len({one.effect > 0 for group in named for one in group.all}) == 1
    if words != UNDECIDED and everywhere and one_way:
        price = _price(findings, best.gain > 0)
        if price or len(groups) > MAX_NAMED_ARMS:
            return _all_alike(named, findings, price)
    up = best.all[0].effect > 0

    def where(group: Group) -> str:
        """Return in how many of an arm's rows it differs, or an empty string if in all."""
        some, total = len(group.all), totals[group.arm]
        return f" ({_of(some, total, findings.noun)})" if some < total else ""

    lead = _effects(best, findings, where(best).strip())
    if not others:
        return [*lead, rest]
    each = [f"{arm_text(g.arm)} {_amount_beside(g.all, up)}{where(g)}" for g in others]
    everyone = [one for group in others for one in group.all]
    brief = "others" if len(others) > 1 else arm_text(others[0].arm)
    together = f"; {brief} {_amount_beside(everyone, up)}"
    return [*lead, optional(f", {', '.join(each)}", NO_NAMES, together), rest]


def _amount_beside(findings: Sequence[Finding], up: bool) -> str:
    """Return the amount of other effects; ``more`` or ``less`` is left out if it was just said."""
    effects = [one.effect for one in findings]
    if all((effect > 0) == up for effect in effects):
        return sizes_text(findings[0].metric, effects, differences_of(findings))
    return amount_of(findings)


def _all_alike(groups: Sequence[Group], findings: Findings, price: Pieces) -> Pieces:
    """Return the answer if all arms differ in the same direction in all rows."""
    better, rows = groups[0].gain > 0, len(groups[0].all)
    extreme = (max if better else min)(groups, key=lambda group: group.gain)
    count = "Both" if len(groups) == 2 else f"All {len(groups)}"
    every = Group(f"{count} arms", extreme.metric, tuple(o for g in groups for o in g.all))
    where = f"in {_of(rows, rows, findings.noun)}" if rows > 1 else ""
    lead = f"({'best' if better else 'worst'}: {arm_text(extreme.arm)})"
    pieces = _effects(every, findings, where, extreme.metric.words.verb)
    return [*pieces, optional(lead, NO_RATIO), *price]


def _price(findings: Findings, better: bool) -> Pieces:
    """Return a second metric in which all arms differ the other way: ``, but take more time``."""
    lead = findings.lead[0].metric
    second = next((one.metric for one in findings.measured if one.metric != lead), None)
    own = [one for one in findings.measured if one.metric == second]
    if second is None or any(one.word != ("worse" if better else "better") for one in own):
        return []
    words = second.words
    word = words.more if own[0].effect > 0 else words.less
    return [Piece(join([", but", words.verb, word, words.quantity, words.detail]))]


def _no_change(groups: Sequence[Group], findings: Findings, rest: Piece) -> Pieces:
    baseline = arm_text(findings.baseline)
    same = [one for group in groups for one in group.those(SAME)]
    if not same:
        return _undecided([one for group in groups for one in group.all], baseline)
    total = sum(len(group.all) for group in groups)
    share = f"in {len(same)} of {total} comparisons" if len(same) < total else ""
    arms = join_names([arm_text(arm) for arm in dict.fromkeys(one.arm for one in same)])
    brief = "No difference" if share else "No difference of any arm"
    return [
        optional(f"{arms}: no difference", NO_NAMES, brief),
        optional(f"from {baseline}", NO_BASELINE),
        optional(f"in {same[0].metric.short_label}", NO_DETAIL),
        Piece(f"beyond {_largest_bound(same)} %"),
        Piece(share),
        rest,
    ]


def _undecided(findings: Sequence[Finding], baseline: str) -> Pieces:
    """Return the interval of one undecided row, or the largest detectable effect of several."""
    arms = join_names([arm_text(arm) for arm in dict.fromkeys(one.arm for one in findings)], "or")
    one, interval = findings[0], findings[0].comparison.ci_pct
    if len(findings) == 1 and interval is not None:
        amount = amount_text(one.metric, interval)
        phrase = effect_pieces(one.metric, interval, baseline, amount=amount)
        return [Piece(f"Undecided: {arms}"), *phrase]
    known = [one.comparison.mde_pct for one in findings if one.comparison.mde_pct is not None]
    below = f"; effects below {magnitude_text(max(known))} % may go unseen" if known else ""
    return [
        optional(f"Undecided whether {arms} differs", NO_COUNT, "Undecided"),
        optional(f"from {baseline}", NO_BASELINE),
        optional(f"in {one.metric.short_label}", NO_DETAIL),
        Piece(below),
    ]


def _computed_values(findings: Findings) -> Pieces:
    """Return the computed values of one row: every arm's, or only the extremes.

    A relative difference would be no answer: ``49 % less`` where 14.1 and 7.1 % of RAM are taken.
    """
    first = findings.lead[0]
    values = {findings.baseline: first.base} | {one.arm: one.value for one in findings.lead}
    known = sorted((value, arm) for arm, value in values.items() if value is not None)
    unit = first.metric.unit
    texts = {arm: _rounded_text(value, unit) for value, arm in known}
    each = ", ".join(f"{arm_text(arm)} {texts[arm]}" for arm in values if arm in texts)
    low, high = (f"{texts[known[end][1]]} ({arm_text(known[end][1])})" for end in (0, -1))
    full, brief = f"{each} {unit_name(unit)}", f"{low} to {high}, in {unit_name(unit)}"
    return [Piece(f"{first.metric.short_label}:"), optional(full, NO_NAMES, brief)]


def _out_of_memory(findings: Findings) -> Pieces:
    died = join_names([arm_text(arm) for arm in findings.out_of_memory])
    start = Piece(f"Out of memory: {died}.")
    decided = [one for one in findings.lead if one.word in CHANGED]
    if len(findings.lead) <= MAX_NAMED_ARMS or not decided:
        first, *others = _compared(findings)
        return [start, Piece(capitalised(first.text), first.shorter), *others]
    metric, rest = decided[0].metric, optional(_rest(findings.lead), NO_DETAIL)
    quantity = metric.short_label if any(differences_of(decided)) else metric.words.quantity
    return [start, Piece(f"Others: {amount_of(decided)} {quantity}".rstrip()), rest]


def _best_setting(findings: Findings) -> Pieces:
    count = findings.num_settings
    one = min(findings.best, key=lambda each: each.withheld is not None, default=None)
    if one is None or one.best is None or one.reference is None:
        return [Piece("No answer: no setting has a valid result")]
    metric, best = one.definition, setting_text(one.best)
    value, other = (
        f"{_rounded_text(one.values[arm], one.unit)} {unit_name(one.unit)}"
        for arm in (one.best, one.reference)
    )
    if one.withheld is not None:
        name = optional(best, NO_NAMES, "one setting")
        label = optional(f"for {metric.short_label} ({value})", NO_DETAIL)
        return [Piece("Estimate only:"), name, Piece(f"looks best of {count}"), label]
    rivals, than = len(one.possibly_best), setting_text(one.reference)
    if one.is_computed:
        start = f"best is {best}" if rivals == 1 else f"best are {rivals} of {count} settings"
        worse = f"; {than} {other}" if one.reference not in one.possibly_best else ""
        return [Piece(f"{start}: {metric.short_label} {value}"), optional(worse, NO_DETAIL)]
    if rivals > 1:
        start = f"Undecided: {rivals} of {count} settings may be best for {metric.short_label}"
        return [Piece(start), optional(f"; measured best: {best}", NO_DETAIL)]
    return [
        optional(f"best is {best}:", NO_NAMES, f"one of {count} settings is best:"),
        Piece(f"{metric.short_label} {value}"),
        optional(f", {amount_text(metric, [one.effect_pct or 0.0])}", NO_DETAIL),
        optional(f"than {than}", NO_RATIO),
    ]


def _alone(findings: Findings) -> Pieces:
    baseline = arm_text(findings.baseline)
    row = findings.alone
    median = None if row is None else row.median(findings.baseline)
    if row is None or median is None:
        return [Piece(f"Nothing was measured for {baseline}")]
    value = f"{_rounded_text(median, row.unit)} {unit_name(row.unit)}"
    where = "" if row.case == "all" else f"in {row.case}"
    return [
        Piece("Nothing to compare:"),
        optional(f"{baseline} has", NO_BASELINE),
        Piece(f"{row.definition.short_label} {value}"),
        optional(where, NO_DETAIL),
    ]


def _rest(findings: Sequence[Finding], noun: str = "") -> str:
    """Return the number of findings without an answer: ``; 2 undecided; 1 invalid``, or nothing."""
    text = ""
    for word, words in (("undecided", UNDECIDED), ("invalid", ("invalid",))):
        if count := sum(one.word in words for one in findings):
            text += f"; {count_text(count, noun) if noun else count} {word}"
    return text


def _largest_bound(findings: Sequence[Finding]) -> str:
    return bound_text(max(one.bound for one in findings))


def _of(part: int, total: int, noun: str) -> str:
    if part < total:
        return f"{part} of {total} {noun}"
    return f"both {noun}" if total == 2 else f"all {total} {noun}"


def arm_text(arm: str) -> str:
    """Return an arm's name as words: ``seq map`` for ``seq_map``."""
    for name in PROPER_NAMES:
        arm = arm.replace(name, name.replace("_", "\0"))
    return arm.replace("_", " ").replace("\0", "_")


def _rounded_text(value: float, unit: str | None) -> str:
    """Write a value with three significant digits: ``2,660``, ``35.8``, ``0.518``."""
    printed = scaled(value, unit)
    digits = 0 if abs(printed) >= 100 or printed == 0 else 1 if abs(printed) >= 10 else 2
    return f"{printed:,.{digits}f}" if abs(printed) >= 1 or printed == 0 else f"{printed:.3g}"


def capitalised(text: str) -> str:
    """Return a text with its first letter as a capital."""
    return text[:1].upper() + text[1:]
