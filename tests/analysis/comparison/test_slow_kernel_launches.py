"""Slow launches of a kernel's arms: what tells them from the machine's, and the verdicts then."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from planted_cells import compare_studies

from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.comparison.observations import MetricRow, RunValue, log_values
from labkit.analysis.comparison.slow_kernel_launches import restrict, slow_launch_p
from labkit.analysis.comparison.verdict import Verdict
from labkit.analysis.findings.verdict_sentences import as_measured_text, verdict_sentences
from labkit.analysis.model.result_row import Comparison
from labkit.analysis.robustness.sensitivity_analysis import sensitivity_results
from labkit.analysis.statistics.permutation_test import permutation_test

ARM = "seq_map"


def analyse_rounds(make_cell, factor, note=None, rounds=32, short=(), **options):
    """Analyse interleaved launches; ``factor(arm, block)`` multiplies an arm's rounds.

    ``note`` does the same for the mean of each round's launches, where the fastest counts. The
    blocks ``short`` have two rounds.
    """

    def change(record):
        cases = []
        for case in record.cases:
            times = np.array(case.metrics[0].repeats)
            kept = slice(2 if record.block in short else None)
            fastest = tuple((times * factor(record.arm, record.block))[kept])
            notes = {**case.notes}
            if note is not None:
                means = (times * note(record.arm, record.block))[kept]
                notes["as_measured"] = {case.metrics[0].name: means.tolist()}
            metrics = (replace(case.metrics[0], repeats=fastest), *case.metrics[1:])
            cases.append(replace(case, metrics=metrics, notes=notes))
        return replace(record, cases=tuple(cases))

    cell = make_cell(
        blocks=10, runs=1, isolation="in_process", repeats=rounds, noise=0.004,
        effects={ARM: 1.0}, change=change, **options,
    )  # fmt: skip
    return analyse(cell)


def now_and_then(typical, slow, every, rounds=32):
    """Return factors of an arm's launches: every n-th of all is slow, the first at random."""

    def factor(arm, block):
        if arm != ARM:
            return 1.0
        slow_ones = np.random.default_rng([every, block]).random(rounds) < 1 / every
        return np.where(slow_ones, slow, typical)

    return factor


def verdicts(analysis):
    return [one for row, one in analysis.cell.compared if row.primary and one.arm == ARM]


@pytest.mark.parametrize(
    ("typical", "slow", "every", "word", "reason"),
    [
        (0.95, 1.45, 10, "inconclusive", "slow launches of seq_map may differ"),  # the same mean
        (0.95, 3.8, 60, "inconclusive", ""),
        (1.0, 1.5, 10, "inconclusive", "slow launches of seq_map may differ"),
        (0.8, 1.6, 40, "better", None),  # a better mean, too
        (0.95, 0.95, 10, "better", None),
    ],
)
def test_a_faster_arm_has_a_faster_mean(make_cell, typical, slow, every, word, reason):
    analysis = analyse_rounds(make_cell, now_and_then(typical, slow, every))
    for one in verdicts(analysis):
        assert one.effect_pct == pytest.approx(100 * (typical - 1), abs=0.6)
        assert one.verdict == word
        assert reason is None or (reason in one.reason and "mean of all launches" in one.reason)
    means = [s for s in sensitivity_results(analysis) if s.how == "mean of all launches"]
    assert len(means) == 2 * len(verdicts(analysis))  # the arm's, and the control's


@pytest.mark.parametrize("short", [(9,), (0, 5, 7)])
def test_blocks_of_few_rounds_do_not_hide_the_slow_launches_of_the_others(make_cell, short):
    """The plan of a study whose time is over gives a case a round or two."""
    analysis = analyse_rounds(make_cell, now_and_then(0.95, 1.45, 10), short=short)
    for one in verdicts(analysis):
        assert one.verdict == "inconclusive" and "slow launches of seq_map may" in one.reason


@pytest.mark.parametrize(
    ("rounds", "slow"),
    [([3] * 6 + [1] * 4, True), ([9] * 5 + [2] * 5, False), ([3] * 4, True), ([1, 9], False)],
)
def test_slow_launches_show_in_as_many_processes_as_a_claim_needs(rounds, slow):
    arms = {
        arm: [RunValue(block, 0, "", 1.0, (1.0,) * n) for block, n in enumerate(rounds)]
        for arm in ("base", "arm")
    }
    row = MetricRow("case", "us", "us", "lower", True, paired_baseline="base", arms=arms)
    assert row.has_slow_launches is slow
    assert slow_launch_p(row, "base", "arm", range(len(rounds))) == 1.0
    assert slow_launch_p(row, "base", "arm", ()) == 1.0


def test_launches_of_which_the_fastest_counts_are_judged_by_all(make_cell):
    """A launch that is slow now and then is never the fastest of three."""
    mean = now_and_then(0.95, 1.25, 4)
    hidden = analyse_rounds(make_cell, now_and_then(0.95, 0.95, 4), name="hidden")
    noted = analyse_rounds(make_cell, now_and_then(0.95, 0.95, 4), mean, name="noted")
    assert {one.verdict for one in verdicts(hidden)} == {"better"}
    for one, before in zip(verdicts(noted), verdicts(hidden), strict=True):
        assert one.verdict == "inconclusive"
        assert one.effect_pct == before.effect_pct
    lines = [line for line in verdict_sentences(noted.cell, "tokens") if f"{ARM}:" in line]
    assert lines and all("% as measured" in line for line in lines)


@pytest.mark.parametrize(
    ("effect", "directed", "text"),
    [
        (None, True, ""),
        (12.5, True, "; 12.5 % as measured"),
        (-2.0, True, "; −2.0% as measured"),
        (12.5, False, "; +12.5% as measured"),
    ],
)
def test_the_effect_as_measured_has_a_sign_where_the_sentence_has_no_direction_for_it(
    effect, directed, text
):
    one = Comparison("a", "base", effect_pct=10.0, as_measured_pct=effect)
    assert as_measured_text(one, directed) == text


def test_the_rule_only_takes_words_away():
    better, same = Verdict("better"), Verdict("equivalent")
    assert restrict(better, "a", 0.2, (-3.0, -1.0), pytest.fail) == better
    assert restrict(better, "a", 0.2, (-3.0, 0.1), pytest.fail).word == "inconclusive"
    assert restrict(same, "a", 0.2, (-0.3, 0.1), pytest.fail) == same
    assert restrict(better, "a", 0.05, (-3.0, -1.0), lambda: better) == better
    assert restrict(better, "a", 0.05, (-3.0, -1.0), lambda: same).word == "inconclusive"
    assert restrict(same, "a", 0.05, (-0.3, 0.1), lambda: Verdict("trivial")) == same
    undecided = Verdict("inconclusive", "noise")
    assert restrict(undecided, "a", 0.001, (-3.0, 1.0), pytest.fail) == undecided


def simulated_row(rng, processes, rounds, typical=0.0, slow=0.0, every=1, clustered=False):
    """Return a row of two arms with launches that the machine slows, and one arm's own.

    ``clustered``: in half of the processes the machine slows a tenth of one arm's launches.
    """
    shape = (processes, 2, rounds)
    logs = rng.normal(0, 0.02, shape) + rng.normal(0, 0.02, (processes, 1, rounds))
    logs += rng.normal(0, 0.005, (processes, 2, 1))
    logs += (rng.random(shape) < 0.02) * rng.exponential(0.4, shape)
    logs[:, 1] += typical + slow * (rng.random((processes, rounds)) < 1 / every)
    if clustered:
        chosen = rng.integers(4, size=processes)[:, None] == np.arange(2)
        logs += 0.41 * (chosen[:, :, None] & (rng.random(shape) < 0.1))
    arms = {
        arm: [RunValue(p, 0, "", 1.0, tuple(np.exp(x))) for p, x in enumerate(logs[:, a])]
        for a, arm in enumerate(("base", "arm"))
    }
    return MetricRow(
        "case", "us", "us", "lower", True, paired_baseline="base", arms=arms,
        over_rounds="middle_half",
    )  # fmt: skip


def share_of_slow(rng, studies, processes, rounds, **options):
    rows = (simulated_row(rng, processes, rounds, **options) for _ in range(studies))
    return np.mean([slow_launch_p(r, "base", "arm", range(processes)) <= 0.05 for r in rows])


@pytest.mark.parametrize(
    ("processes", "rounds", "share"), [(6, 32, 0.6), (10, 16, 0.85), (10, 96, 0.95)]
)
def test_equal_launches_seldom_differ_and_own_slow_ones_are_seen(processes, rounds, share):
    rng = np.random.default_rng([processes, rounds])
    assert share_of_slow(rng, 200, processes, rounds) <= 0.07
    assert share_of_slow(rng, 200, processes, rounds, clustered=True) <= 0.07
    seen = share_of_slow(rng, 60, processes, rounds, typical=-0.05, slow=0.41, every=10)
    assert seen >= share


def test_an_arm_with_the_same_mean_is_seldom_called_faster():
    """One launch of twenty takes twice as long: without the rule, all 100 studies say faster."""
    rng, claims, faster = np.random.default_rng(5), 0, 0
    for _ in range(100):
        row = simulated_row(rng, 8, 32, -np.log1p(0.05), np.log(2), 20)
        pair = [log_values(row, arm, range(8)) for arm in ("base", "arm")]
        mean = replace(row, over_rounds="mean")
        by_mean = [log_values(mean, arm, range(8)) for arm in ("base", "arm")]
        effects = tuple(float((arm - base).mean()) for base, arm in (pair, by_mean))
        word = "better" if permutation_test(*by_mean) <= 0.05 and effects[1] < 0 else "inconclusive"
        faster += permutation_test(*pair) <= 0.05 and effects[0] < 0
        p = slow_launch_p(row, "base", "arm", range(8))
        kept = restrict(Verdict("better"), "arm", p, effects, lambda word=word: Verdict(word))
        claims += kept.word == "better"
    assert faster == 100 and claims <= 25


def p_of(slow):
    """Return the p of a row whose launches take twice as long where ``slow``: bool [p, 2, r]."""
    arms = {
        arm: [RunValue(p, 0, "", 1.0, tuple(np.where(x, 2.0, 1.0))) for p, x in enumerate(each)]
        for arm, each in zip(("base", "arm"), slow.transpose(1, 0, 2), strict=True)
    }
    row = MetricRow("case", "us", "us", "lower", True, paired_baseline="base", arms=arms)
    return slow_launch_p(row, "base", "arm", range(len(slow)))


def test_only_launches_slower_than_the_other_arm_s_of_the_round_count():
    slow = np.zeros((8, 2, 32), bool)
    assert p_of(slow) == 1
    slow[:, 1, ::8] = True
    assert p_of(slow) == 2 * 0.5**8
    slow[:, 0, ::8] = True  # the machine slowed both
    assert p_of(slow) == 1
    slow[:, 1, 2::8] = True
    assert p_of(slow) == 2 * 0.5**8
    slow[:, 0, 1::8] = True
    assert p_of(slow) == 1


def test_one_process_in_which_an_arm_is_slow_for_a_while_shows_nothing():
    slow = np.zeros((8, 2, 32), bool)
    slow[3, 1, :12] = True
    assert p_of(slow) == 1
    slow[2:7, 1, 20:22] = True
    assert p_of(slow) == 2 * 0.5**5  # of five processes


@pytest.mark.parametrize(("fastest_of", "word"), [((3, 3), "equivalent"), ((3, 1), "invalid")])
def test_launches_that_were_timed_differently_are_not_compared(make_cell, fastest_of, word):
    """An arm may import another revision of labkit, which times launches in its own way."""

    def change(record):
        of = fastest_of[record.arm == ARM]
        cases = (replace(c, notes={**c.notes, "fastest_of": of}) for c in record.cases)
        return replace(record, cases=tuple(cases))

    analysis = analyse(make_cell(blocks=10, runs=1, noise=0.004, effects={ARM: 1.0}, change=change))
    found = verdicts(analysis)
    assert {one.verdict for one in found} == {word}
    reason = "launches were timed differently: the fastest of 1 in seq_map, of 3 in binary_search"
    assert word != "invalid" or all(reason in (one.reason or "") for one in found)


@pytest.fixture
def changed(make_cell):
    """Return the words and reasons of the change from one study's launches to another's.

    A study is given by the factors of its launches, and those of their means, if these differ.
    """
    made = []

    def change(*factors):
        made.append(factors)
        studies = [
            [analyse_rounds(partial(make_cell, f"{len(made)}-{i}/cell"), *of_study)]
            for i, of_study in enumerate(factors)
        ]
        changes = compare_studies(*studies, 2.0).changes
        own = [one.comparison for one in changes if one.arm == ARM]
        return {one.verdict for one in own}, " ".join(str(one.reason) for one in own)

    return change


QUIET, SLOW = now_and_then(1.0, 1.0, 10), now_and_then(1.0, 1.5, 10)


@pytest.mark.parametrize(
    "slow", [(SLOW,), (QUIET, SLOW)], ids=["every launch counts", "the fastest of three counts"]
)
def test_slow_launches_of_one_study_leave_its_change_undecided(changed, slow):
    quiet = (QUIET,) * len(slow)
    words, reasons = changed(quiet, slow)
    assert words == {"inconclusive"}
    assert "slow launches of seq_map in the new study may differ" in reasons
    assert "by the mean of all launches the change is +3.7%" in reasons
    assert changed(slow, quiet)[0] == {"inconclusive"}
    assert changed(slow, slow)[0] == {"inconclusive"}  # the means vary by too much
    assert changed(quiet, quiet)[0] == {"equivalent"}


def test_slow_launches_count_if_the_other_study_timed_no_rounds(changed):
    few = (lambda arm, block: 1.0, None, 2)
    for studies in (few, (SLOW,)), ((SLOW,), few):
        words, reasons = changed(*studies)
        assert words == {"inconclusive"} and "slow launches of seq_map in the " in reasons


def test_the_mean_launch_must_change_by_more_than_the_machine(make_cell):
    """The typical change exceeds the machine's 10 %, that of the mean does not."""

    def analysed(name, factor, probe):
        def make(*args, change, **options):
            before = {"matmul_us": 100.0 * probe}
            probed = lambda record: replace(change(record), probe={"before": before})  # noqa: E731
            return make_cell(*args, change=probed, **options)

        return [analyse_rounds(partial(make, f"{name}/cell"), factor)]

    slow_but_faster = now_and_then(0.8, 1.6, 8)
    old = analysed("old", QUIET, 1.0)
    for name, probe, word in ("same", 1.0, "better"), ("slower", 1.1, "inconclusive"):
        changes = compare_studies(old, analysed(name, slow_but_faster, probe), 2.0).changes
        own = [one.comparison for one in changes if one.arm == ARM]
        assert {one.verdict for one in own} == {word}
        assert word == "better" or all("by the mean of all" in str(one.reason) for one in own)


def test_the_mean_launch_is_compared_with_the_control_s_mean(changed):
    def once(factor_of_control):
        def factor(arm, block):
            factors = np.ones(96)
            factors[0] = {ARM: 1.35, "control": factor_of_control}.get(arm, 1.0)
            return factors if arm == ARM or block % 2 else 1.0

        return factor

    old = (lambda arm, block: 1.0, None, 96)
    assert changed(old, (once(1.0), None, 96))[0] == {"equivalent"}
    words, reasons = changed(old, (once(9.0), None, 96))
    assert words == {"inconclusive"} and "slow launches of seq_map in the new study" in reasons


def test_a_change_that_the_means_confirm_keeps_its_word_whatever_is_slow(changed):
    slow_but_faster = now_and_then(0.8, 1.2, 10)
    assert changed((QUIET,), (slow_but_faster,))[0] == {"better"}
    assert changed((slow_but_faster,), (QUIET,))[0] == {"worse"}
