"""Findings in words: the long text, the short text (at most 20 words) and the chip of each kind."""

from dataclasses import replace

import pytest
from planted_cells import planted_cell

from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.findings.cell_findings import (
    Finding,
    Findings,
    OutputsFinding,
    merge_findings,
    plan_findings,
)
from labkit.analysis.findings.effect_wording import Piece, optional
from labkit.analysis.findings.full_answer import long_text
from labkit.analysis.findings.output_quality_sentences import PickedFrames
from labkit.analysis.findings.short_answer import MAX_WORDS, arm_text, fit, short_answer
from labkit.analysis.findings.verdict_sentences import control_sentence, summary_verdict
from labkit.analysis.model.cell_model import BestInRow
from labkit.analysis.model.result_row import ArmValues, Comparison, Row
from labkit.records.metric_registry import metric_definition

KERNEL, REQUESTS, WAIT = "dispatch_us", "total_tok_s", "ttft_p50_ms"


def one(word, effect=0.0, ci=None, place="a", metric=KERNEL, arm="map", mde=None, base=None,
        value=None, reason=None, unit=None):  # fmt: skip
    """Return a finding on an arm; its row is all requests if the place is None."""
    definition = metric_definition(metric, unit)
    low, high = ci or (None, None)
    comparison = Comparison(arm, "search", effect, low, high, 0.95, mde_pct=mde, verdict=word,
                            reason=reason)  # fmt: skip
    arms = {"search": ArmValues(base), arm: ArmValues(value)}
    row = Row("all", metric, definition.unit, definition.better, True, None, arms, (comparison,))
    return Finding(row, comparison, place or metric, word == "computed")


def better(effect=-4.1, low=-5.0, high=-3.2, **options):
    return one("better", effect, (low, high), **options)


def worse(effect=2.5, low=2.1, high=3.0, **options):
    return one("worse", effect, (low, high), **options)


def same(bound=1.2, **options):
    return one("equivalent", 0.1, (-bound / 2, bound), **options)


def unseen(mde=6.8, **options):
    return one("inconclusive", -3.0, mde=mde, reason="smallest detectable effect", **options)


def few(effect, **options):
    return one("estimate_only", effect, reason="2 blocks of 2: a claim needs 3", **options)


def from_zero(difference, **options):
    """Return a finding on an arm whose baseline has a goodput of 0."""
    finding = one("better", None, metric="goodput_req_s", base=0.0, value=difference, **options)
    return replace(finding, comparison=replace(finding.comparison, difference=difference))


def invalid(**options):
    return one("invalid", -9.0, reason="vacuous: resolver.map stayed 0", **options)


def cell(*findings, arms=(), **options):
    names = arms or tuple(dict.fromkeys(finding.arm for finding in findings))
    return Findings(tuple(names), "search", findings, **options)


def rows(*findings):
    """Return a cell of one arm with a row for each finding, named a, b, ..."""
    return cell(*(replace(f, place="abcdefghij"[i]) for i, f in enumerate(findings)))


def computed(values, metric, place=None):
    """Return a cell of computed values by arm, the baseline's first."""
    (_, base), *others = values.items()
    findings = [
        one("computed", 100 * (v / base - 1), None, place, metric, arm, base=base, value=v)
        for arm, v in others
    ]
    return cell(*findings)


def without_base(place=None, **values):
    """Return a cell of computed values by arm, of which the baseline has none."""
    return cell(*(
        one("computed", None, None, place, "kv_waste_pct", arm, value=value)
        for arm, value in values.items()
    ))  # fmt: skip


def setting(**options):
    known = {"case": "all", "metric": REQUESTS, "unit": "tok/s", "better": "higher", "level": 0.95,
             "values": {"n=1": 900.0, "n=2": 1000.0, "n=4": 990.0}, "excluded": {}, "best": "n=2",
             "reference": "n=1", "effect_pct": 11.1, "ci_low_pct": 8.0, "ci_high_pct": 14.0,
             "possibly_best": ("n=2",), "withheld": None}  # fmt: skip
    one_row = BestInRow(**known | options)
    return Findings(("n=2", "n=4"), "n=1", best=(one_row,), num_settings=3)


WASTED = {"metric": "kv_waste_pct", "unit": "%", "better": "lower", "level": None,
          "effect_pct": -100.0, "ci_low_pct": None, "ci_high_pct": None}  # fmt: skip
ROBUST = "bitwise", "pass", "", {}
CASES = {  # findings, the long text, the short text, the chip
    "one row": (
        cell(better(-55.0, -57.5, -52.4)),
        "On this machine map takes 55.0 % less time per launch than search in a (2.2 times as "
        "fast; 95 % interval 52.4 to 57.5 %).",
        "Map takes 55.0 % less time per launch than search (2.2 times as fast; interval 52.4 to "
        "57.5 %).",
        "better: less time",
    ),
    "one row, little changed": (
        cell(better(arm="seq_map")),
        "On this machine seq_map takes 4.1 % less time per launch than search in a (95 % "
        "interval 3.2 to 5.0 %).",
        "Seq map takes 4.1 % less time per launch than search (interval 3.2 to 5.0 %).",
        "better: less time",
    ),
    "one row, longer": (
        cell(worse(112.0, 111.0, 113.0, metric="e2e_p50_ms", place=None, base=240.0)),
        "On this machine map takes 268.8 ms more per request at the median than search (112 %; "
        "95 % interval 111 to 113 %).",
        "Map takes 268.8 ms more per request at the median than search (112 %; interval 111 to "
        "113 %).",
        "worse: more time",
    ),
    "tokens": (
        cell(better(12.0, 8.0, 16.0, metric=REQUESTS, place=None)),
        "On this machine map processes 12.0 % more tokens per second than search (95 % interval "
        "8.0 to 16.0 %).",
        "Map processes 12.0 % more tokens per second than search (interval 8.0 to 16.0 %).",
        "better: more tokens",
    ),
    "a share, in points, with its interval in percent": (
        cell(better(5.5, 2.2, 9.3, metric="shape_repeated_pct", place=None, base=71.25)),
        "On this machine map repeats 3.9 points more of its shapes than search (relative: 5.5 %; "
        "95 % interval 2.2 to 9.3 %).",
        "Map repeats 3.9 points more of its shapes than search (relative: 5.5 %; interval 2.2 to "
        "9.3 %).",
        "better: repeats more",
    ),
    "seven times the tokens": (
        cell(better(660.0, 594.0, 796.0, metric="output_tok_s", place=None)),
        "On this machine map serves 660 % more output tokens per second than search (7.6 times "
        "as many; 95 % interval 594 to 796 %).",
        "Map serves 660 % more output tokens per second than search (7.6 times as many; "
        "interval 594 to 796 %).",
        "better: more output tokens",
    ),
    "a wait in milliseconds": (
        cell(better(-12.0, -13.0, -11.0, metric=WAIT, place=None, base=250.0)),
        "On this machine map waits 30.00 ms less for the first token at the median than search "
        "(12.0 %; 95 % interval 11.0 to 13.0 %).",
        "Map waits 30.00 ms less for the first token at the median than search (12.0 %).",
        "better: waits less",
    ),
    "memory": (
        cell(better(-8.0, -9.0, -7.0, metric="peak_kv_bytes", place=None, base=2.0**25)),
        "On this machine map uses 2.56 MiB less KV memory at its peak than search (8.0 %; 95 % "
        "interval 7.0 to 9.0 %).",
        "Map uses 2.56 MiB less KV memory at its peak than search (8.0 %; interval 7.0 to 9.0 "
        "%).",
        "better: less KV memory",
    ),
    "a metric of a user's own": (
        cell(better(12.0, 8.0, 16.0, metric="hits", unit="hits")),
        "On this machine map measures 12.0 % higher in hits than search in a (95 % interval 8.0 "
        "to 16.0 %).",
        "Map measures 12.0 % higher in hits than search (interval 8.0 to 16.0 %).",
        "better: higher",
    ),
    "the same": (
        cell(same(place=None, metric=REQUESTS)),
        "On this machine map differs from search by at most 1.2 % in throughput.",
        "No difference in throughput between map and search beyond 1.2 %.",
        "equivalent: no difference",
    ),
    "a bound is never rounded down": (
        cell(one("equivalent", 0.1, (-1.136, 0.9))),
        "On this machine map differs from search by at most 1.2 % in time per launch.",
        "No difference in time per launch between map and search beyond 1.2 %.",
        "equivalent: no difference",
    ),
    "inside the margin": (
        rows(same(), one("trivial", -0.3, (-0.9, -0.1))),
        "On this machine map differs from search by at most 1.2 % in time per launch.",
        "No difference in time per launch between map and search beyond 1.2 % in both rows.",
        "equivalent: no difference",
    ),
    "undecided, with its interval": (
        cell(one("inconclusive", 1.0, (-0.8, 2.1), mde=4.0)),
        "Not decided: whether map differs from search in time per launch in a; the smallest "
        "detectable effect is 4.0 %.",
        "Undecided: map takes 0.8 % less to 2.1 % more time per launch than search.",
        "inconclusive: undecided",
    ),
    "undecided rows": (
        rows(unseen(6.8), unseen(35.9), unseen(9.0)),
        "Not decided: whether map differs from search in time per launch in any of 3 rows; the "
        "smallest detectable effect is 6.8 % (a) to 35.9 % (b).",
        "Undecided whether map differs from search in time per launch; effects below 35.9 % "
        "may go unseen.",
        "inconclusive: undecided",
    ),
    "all rows one way": (
        rows(better(), better(-8.0, -9.0, -7.0), better(-6.0, -7.0, -5.0)),
        "On this machine map takes 4.1 to 8.0 % less time per launch than search in all 3 rows.",
        "Map takes 4.1 to 8.0 % less time per launch than search in all 3 rows.",
        "better: less time",
    ),
    "both ways": (
        rows(better(), better(-8.0, -9.0, -7.0), worse()),
        "On this machine map takes 4.1 to 8.0 % less time per launch than search in 2 of 3 rows "
        "(a and b) and 2.5 % more in 1 of 3 rows (c).",
        "Map takes 8.0 % less (b) to 2.5 % more (c) time per launch than search.",
        "mixed: mixed",
    ),
    "more changed than not": (
        rows(better(), better(), same(), unseen()),
        "On this machine map takes 4.1 % less time per launch than search in 2 of 4 rows (a and "
        "b) and differs by at most 1.2 % in 1 of 4 rows; undecided in 1 row (d); the smallest "
        "detectable effect is 6.8 %.",
        "Map takes 4.1 % less time per launch than search in 2 of 4 rows; 1 undecided.",
        "better: less time in 2 of 4 rows",
    ),
    "the same but for one row": (
        rows(same(), same(), better()),
        "On this machine map differs from search by at most 1.2 % in time per launch, except in "
        "c (4.1 % less).",
        "No difference between map and search beyond 1.2 % in 2 of 3 rows; 4.1 % less time in 1.",
        "better: less time in 1 of 3 rows",
    ),
    "the same but for two": (
        rows(same(), same(), same(), worse(6.0, 5.0, 7.0), better()),
        "On this machine map differs from search by at most 1.2 % in time per launch, except in "
        "d (6.0 % more) and e (4.1 % less).",
        "No difference beyond 1.2 % in 3 of 5 rows; 4.1 % less to 6.0 % more time in 2.",
        "mixed: mixed",
    ),
    "the same but for many": (
        rows(
            *[same()] * 4, *(better(-3.0 - i, -9.0, -2.0) for i in range(4))
        ),
        "On this machine map differs from search by at most 1.2 % in time per launch, except in "
        "4 rows (3.0 to 6.0 % less).",
        "No difference beyond 1.2 % in 4 of 8 rows; 3.0 to 6.0 % less time in 4.",
        "better: less time in 4 of 8 rows",
    ),
    "the same, open and invalid": (
        rows(same(), unseen(6.8), unseen(35.9), invalid()),
        "On this machine map differs from search by at most 1.2 % in time per launch (1 of 4 "
        "rows); undecided in 2 rows (b; c); the smallest detectable effect is 6.8 % (b) to 35.9 "
        "% (c); invalid in 1 row (d): vacuous: resolver.map stayed 0.",
        "No difference between map and search beyond 1.2 % in 1 of 4 rows; 2 undecided; 1 "
        "invalid.",
        "equivalent: no difference in 1 of 4 rows",
    ),
    "two metrics that agree": (
        cell(
            better(660.0, 594.0, 796.0, metric="output_tok_s", place=None, arm="paged"),
            better(-82.3, -83.7, -80.7, metric=WAIT, place=None, arm="paged", base=94.4),
        ),
        "On this machine paged serves 660 % more output tokens per second than search (7.6 "
        "times as many; 95 % interval 594 to 796 %); it waits 77.69 ms less for the first token "
        "at the median (82.3 %; 95 % interval 80.7 to 83.7 %).",
        "Paged serves 660 % more output tokens per second than search and waits 82.3 % less for "
        "the first token.",
        "better: more output tokens, waits less",
    ),
    "one metric at the cost of another": (
        cell(
            better(-70.2, -72.4, -67.1, metric="itl_chunk_p99_ms", place=None, base=48.1,
                   arm="c256"),
            worse(13.5, 4.9, 18.6, metric="ttft_p99_ms", place=None, base=45.0, arm="c256"),
        ),
        "On this machine c256 pauses 33.77 ms less between tokens at p99 than search (70.2 %; "
        "95 % interval 67.1 to 72.4 %); it waits 6.08 ms more for the first token at p99 (13.5 "
        "%; 95 % interval 4.9 to 18.6 %).",
        "C256 pauses 70.2 % less between tokens at p99, but waits 13.5 % more for the first "
        "token at p99.",
        "mixed: mixed",
    ),
    "every arm at the cost of another metric": (
        cell(
            *(better(60.0 * i, 50.0, 200.0, metric="output_tok_s", place=None, arm=f"b{i}")
              for i in (1, 2)),
            *(worse(25.0 * i, 20.0, 60.0, metric="tpot_excl_first_p50_ms", place=None, base=3.0,
                    arm=f"b{i}") for i in (1, 2)),
        ),
        "On this machine, against search: b1 serves 60.0 % more output tokens per second (1.6 "
        "times as many; 95 % interval 50.0 to 200 %); it takes 0.75 ms more per output token at "
        "the median (25.0 %; 95 % interval 20.0 to 60.0 %); b2 serves 120 % more output tokens "
        "per second (2.2 times as many; 95 % interval 50.0 to 200 %); it takes 1.50 ms more per "
        "output token at the median (50.0 %; 95 % interval 20.0 to 60.0 %).",
        "Both arms serve 60.0 to 120 % more output tokens than search, but take more time per "
        "output token.",
        "mixed: mixed",
    ),
    "several arms": (
        cell(
            better(-9.0, -10.0, -8.0), same(arm="plan"), unseen(4.0, arm="grid"),
            better(-7.0, -8.0, -6.0, place="b"), same(0.9, arm="plan", place="b"),
            unseen(5.5, arm="grid", place="b"),
        ),
        "On this machine, against search: map takes 7.0 to 9.0 % less time per launch in both "
        "rows; plan differs by at most 1.2 % in time per launch; grid is undecided; the "
        "smallest detectable effect is 4.0 % (a) to 5.5 % (b).",
        "Map takes 7.0 to 9.0 % less time per launch than search; 1 arm undecided.",
        "better: less time in 2 of 6 comparisons",
    ),
    "several arms, one way": (
        cell(better(-50.0, -51.0, -49.0), better(arm="plan")),
        "On this machine, against search: map takes 50.0 % less time per launch in a (2.0 times "
        "as fast; 95 % interval 49.0 to 51.0 %); plan takes 4.1 % less time per launch in a (95 "
        "% interval 3.2 to 5.0 %).",
        "Map takes 50.0 % less time per launch than search, plan 4.1 %.",
        "better: less time",
    ),
    "many arms": (
        cell(*(better(-10.0 * i, -60.0, -5.0, arm=f"a{i}") for i in range(1, 6))),
        "On this machine, against search: a1 takes 10.0 % less time per launch in a (95 % "
        "interval 5.0 to 60.0 %); a2 takes 20.0 % less time per launch in a (95 % interval 5.0 "
        "to 60.0 %); a3 takes 30.0 % less time per launch in a (95 % interval 5.0 to 60.0 %); "
        "a4 takes 40.0 % less time per launch in a (1.7 times as fast; 95 % interval 5.0 to "
        "60.0 %); a5 takes 50.0 % less time per launch in a (2.0 times as fast; 95 % interval "
        "5.0 to 60.0 %).",
        "All 5 arms take 10.0 to 50.0 % less time per launch than search (best: a5).",
        "better: less time",
    ),
    "several arms, none decided": (
        cell(unseen(4.0), unseen(3.0, arm="plan")),
        "Not decided: whether map or plan differs from search in time per launch in a; the "
        "smallest detectable effect is 3.0 % to 4.0 %.",
        "Undecided whether map or plan differs from search in time per launch; effects below "
        "4.0 % may go unseen.",
        "inconclusive: undecided",
    ),
    "several arms, none differs": (
        cell(same(), same(1.0, arm="plan")),
        "On this machine, against search: map differs by at most 1.2 % in time per launch; plan "
        "differs by at most 1.0 % in time per launch.",
        "Map and plan: no difference from search in time per launch beyond 1.2 %.",
        "equivalent: no difference",
    ),
    "several arms, partly undecided": (
        cell(
            same(), unseen(4.0, arm="plan"), unseen(5.0, arm="grid"),
            unseen(3.0, place="b"), same(1.0, arm="plan", place="b"),
            unseen(5.5, arm="grid", place="b"),
        ),
        "On this machine, against search: map differs by at most 1.2 % in time per launch (1 of 2 "
        "rows); undecided in 1 row (b); the smallest detectable effect is 3.0 %; plan differs by "
        "at most 1.0 % in time per launch (1 of 2 rows); undecided in 1 row (a); the smallest "
        "detectable effect is 4.0 %; grid is undecided; the smallest detectable effect is 5.0 % "
        "(a) to 5.5 % (b).",
        "Map and plan: no difference from search beyond 1.2 % in 2 of 6 comparisons; 1 arm "
        "undecided.",
        "equivalent: no difference in 2 of 6 comparisons",
    ),
    "an undecided metric before a decided one": (
        cell(
            unseen(place=None, metric=REQUESTS),
            better(-12.0, -14.0, -10.0, place=None, metric=WAIT, base=100.0),
        ),
        "On this machine map is undecided in throughput; the smallest detectable effect is 6.8 %; "
        "it waits 12.00 ms less for the first token at the median (12.0 %; 95 % interval 10.0 to "
        "14.0 %).",
        "Map waits 12.00 ms less for the first token at the median than search (12.0 %); "
        "throughput undecided.",
        "better: waits less in 1 of 2 rows",
    ),
    "estimates": (
        rows(few(-50.2), few(3.0)),
        "Estimate only (2 blocks of 2: a claim needs 3): map takes 50.2 % less time per launch "
        "than search in 1 of 2 rows (a) (2.0 times as fast) and 3.0 % more in 1 of 2 rows (b).",
        "Estimate only: map takes 50.2 % less to 3.0 % more time per launch than search.",
        "estimate_only: estimate only",
    ),
    "estimates of several arms": (
        cell(few(-20.0, arm="float16"), few(-10.0), invalid(arm="plan")),
        "Estimate only (2 blocks of 2: a claim needs 3), against search: float16 takes 20.0 % "
        "less time per launch in a; map takes 10.0 % less time per launch in a; plan is "
        "invalid: vacuous: resolver.map stayed 0.",
        "Estimate only: float16 takes 20.0 % less time per launch than search, map 10.0 %; 1 "
        "invalid.",
        "estimate_only: estimate only",
    ),
    "invalid": (
        replace(rows(invalid(), invalid()), cause="the gate engaged failed"),
        "No answer: map is invalid: vacuous: resolver.map stayed 0.",
        "No answer: the gate engaged failed.",
        "invalid: no answer",
    ),
    "invalid and open": (
        cell(invalid(), unseen(4.0, arm="plan")),
        "Not decided: whether plan differs from search in time per launch in a; the smallest "
        "detectable effect is 4.0 %; map is invalid: vacuous: resolver.map stayed 0.",
        "Undecided whether map or plan differs from search in time per launch; effects below "
        "4.0 % may go unseen.",
        "inconclusive: undecided",
    ),
    "nothing measured": (
        cell(arms=("map",), cause="nothing was measured", missing=("huge",)),
        "No answer: nothing was measured; not measured: huge.",
        "No answer: nothing was measured.",
        "invalid: no answer",
    ),
    "a row without measurements": (
        cell(same(), missing=("huge",)),
        "On this machine map differs from search by at most 1.2 % in time per launch; not "
        "measured: huge.",
        "No difference in time per launch between map and search beyond 1.2 %.",
        "equivalent: no difference",
    ),
    "in the emulator": (
        cell(same(), emulated=True),
        "In the emulator map differs from search by at most 1.2 % in time per launch.",
        "No difference in time per launch between map and search beyond 1.2 %.",
        "equivalent: no difference",
    ),
    "out of memory": (
        cell(better(), invalid(arm="padded"), out_of_memory=("padded",)),
        "On this machine, against search: map takes 4.1 % less time per launch in a (95 % "
        "interval 3.2 to 5.0 %); padded is invalid: vacuous: resolver.map stayed 0.",
        "Out of memory: padded. Map takes 4.1 % less time per launch than search (interval 3.2 "
        "to 5.0 %).",
        "better: less time in 1 of 2 comparisons",
    ),
    "nothing but out of memory": (
        cell(
            replace(
                invalid(arm="padded"),
                comparison=replace(
                    invalid(arm="padded").comparison, reason="out of memory, as claimed"
                ),
            ),
            out_of_memory=("padded",),
            cause="out of memory, as claimed",
        ),
        "No answer: padded is invalid: out of memory, as claimed.",
        "Out of memory, as claimed: padded.",
        "invalid: no answer",
    ),
    "computed": (
        computed({"search": 59.9, "a": 9.7, "b": 59.9}, "kv_waste_pct"),
        "Wasted KV memory (computed): search 59.9 %, a 9.7 % (50.2 points less), b 59.9 % (the "
        "same).",
        "Wasted KV memory: search 59.9, a 9.70, b 59.9 %.",
        "computed: computed",
    ),
    "computed, of a baseline without a value": (
        without_base(a=1.7, b=None),
        "Wasted KV memory (computed): search none, a 1.7 %, b unknown.",
        "Wasted KV memory: a 1.70 %.",
        "computed: computed",
    ),
    "computed rows, some without a value": (
        cell(
            *computed({"search": 5.0, "a": 1.7}, "kv_waste_pct", "x").findings,
            *without_base("y", a=1.7).findings, *without_base("z", a=None).findings,
        ),
        "Wasted KV memory (computed), against search: a 3.3 points less (x), unknown in 2 rows.",
        "A wastes 66.0 % less of its KV memory than search in 1 of 3 rows.",
        "computed: computed",
    ),
    "computed rows": (
        cell(
            *computed({"search": 199.0, "a": 10.0}, "row_steps", "x").findings,
            *computed({"search": 199.0, "a": 199.0}, "row_steps", "y").findings,
        ),
        "Number of steps of a row (computed), against search: a 189 steps (95.0 %) fewer (x), "
        "the same (y).",
        "A takes up to 95.0 % fewer steps than search in both rows.",
        "computed: computed",
    ),
    "outputs": (
        cell(arms=("map",), outputs=OutputsFinding(*ROBUST)),
        "The outputs of map are bit-identical to those of search.",
        None,
        "equivalent: as claimed",
    ),
    "outputs that differ": (
        cell(
            arms=("map",), outputs=OutputsFinding("tokens", "fail", "they differ", {"map": (1, 8)})
        ),
        "The outputs are not as claimed (tokens): they differ (map: 1 of 8 differ).",
        None,
        "invalid: not as claimed",
    ),
    "frames": (
        cell(
            better(-95.0, -96.0, -94.0, metric="decode_ms"),
            frames={"search": PickedFrames(12, 18, 0, 0, 0.0),
                    "map": PickedFrames(4, 18, 0, 0, 9.0)},
        ),
        "On this machine map takes 95.0 % less time to decode a clip's frames than search in a "
        "(20 times as fast; 95 % interval 94.0 to 96.0 %). Of 18 planted events the frames "
        "show: search 12; map 4.",
        "Map takes 95.0 % less time than search; it shows 4 of 18 planted events, search 12.",
        "better: less time",
    ),
    "frames of several clips": (
        cell(
            better(-50.0, -51.0, -49.0, metric="decode_ms", place="a"),
            unseen(metric="decode_ms", place="b"), unseen(metric="decode_ms", place="c"),
            frames={"search": PickedFrames(0, 0, 67, 70, 0.0),
                    "map": PickedFrames(0, 0, 44, 70, 0.0)},
        ),
        "On this machine map takes 50.0 % less time to decode a clip's frames than search in 1 of "
        "3 rows (a) (2.0 times as fast); undecided in 2 rows (b; c); the smallest detectable "
        "effect is 6.8 %. Of 70 questions a model answers correctly: search 67; map 44.",
        "Map takes 50.0 % less time in 1 of 3 rows; 44 of 70 answers are correct, search 67.",
        "better: less time in 1 of 3 rows",
    ),
    "frames of several arms": (
        cell(
            better(-95.0, -96.0, -94.0, metric="decode_ms"),
            worse(20.0, 19.0, 21.0, metric="decode_ms", arm="plan"),
            frames={"search": PickedFrames(12, 18, 0, 0, 0.0),
                    "map": PickedFrames(4, 18, 0, 0, 9.0)},
        ),
        "On this machine, against search: map takes 95.0 % less time to decode a clip's frames in "
        "a (20 times as fast; 95 % interval 94.0 to 96.0 %); plan takes 20.0 % more time to "
        "decode a clip's frames in a (95 % interval 19.0 to 21.0 %). Of 18 planted events the "
        "frames show: search 12; map 4.",
        "Map takes 95.0 % less time; it shows 4 of 18 planted events, search 12; plan 20.0 % more "
        "time.",
        "mixed: mixed",
    ),
    "no arm": (
        Findings((), "search", noise=(one("inconclusive", -14.3, mde=30.0, arm="control"),),
                           alone=one("", metric=REQUESTS, place=None, base=500.0).row),
        "No arms to compare: two identical copies of search measured up to 14.3 % apart (a); "
        "the smallest detectable effect is 30.0 %.",
        "Nothing to compare: search has throughput 500 tok/s.",
        "none: nothing to compare",
    ),
    "a baseline of 0 in one of several rows": (
        rows(from_zero(0.42), better(12.0, 8.0, 16.0, metric="goodput_req_s"), from_zero(1.5)),
        "On this machine map serves 12.0 % and 0.42 to 1.50 req/s more goodput than search in all "
        "3 rows.",
        "Map serves 12.0 % and 0.42 to 1.50 req/s more goodput than search in all 3 rows.",
        "better: more requests within the limits",
    ),
    "a baseline of 0 in rows of both directions": (
        rows(from_zero(1.5), worse(-100.0, -100.0, -90.0, metric="goodput_req_s")),
        "On this machine map serves 1.50 req/s more goodput than search in 1 of 2 rows (a) and "
        "100 % fewer in 1 of 2 rows (b).",
        "Map serves 100 % fewer (b) to 1.50 req/s more (a) goodput than search.",
        "mixed: mixed",
    ),
    "a baseline of 0 for several arms": (
        cell(from_zero(1.5), from_zero(0.5, arm="seq"), from_zero(0.25, arm="tree")),
        "On this machine, against search: map serves 1.50 req/s more goodput in a; seq serves 0.5 "
        "req/s more goodput in a; tree serves 0.25 req/s more goodput in a.",
        "Map serves 1.50 req/s more goodput than search, seq 0.5 req/s, tree 0.25 req/s.",
        "better: more requests within the limits",
    ),
    "a baseline of 0 and little change elsewhere": (
        rows(from_zero(1.5), same(metric="goodput_req_s"), same(metric="goodput_req_s")),
        "On this machine map differs from search by at most 1.2 % in goodput, except in a (1.50 "
        "req/s more).",
        "No difference between map and search beyond 1.2 % in 2 of 3 rows; 1.50 req/s more goodput "
        "in 1.",
        "better: more requests within the limits in 1 of 3 rows",
    ),
    "a sweep": (
        setting(),
        "On this machine n=2 is the best of 3 settings in throughput: it processes 11.1 % more "
        "tokens per second than n=1 (95 % interval 8.0 to 14.0 %).",
        "Best is n=2: throughput 1,000 tok/s, 11.1 % more than n=1.",
        "better: best setting known",
    ),
    "a sweep, two metrics of a case": (
        replace(setting(), best=tuple(
            one for metric in (REQUESTS, "output_tok_s")
            for one in setting(case="chat", metric=metric).best
        )),
        "On this machine n=2 is the best of 3 settings in chat: total_tok_s: it processes 11.1 % "
        "more tokens per second than n=1 (95 % interval 8.0 to 14.0 %); on this machine n=2 is "
        "the best of 3 settings in chat: output_tok_s: it serves 11.1 % more output tokens per "
        "second than n=1 (95 % interval 8.0 to 14.0 %).",
        "Best is n=2: throughput 1,000 tok/s, 11.1 % more than n=1.",
        "better: best setting known",
    ),
    "a sweep with rivals": (
        setting(possibly_best=("n=2", "n=4"), reference="n=4",
                                       effect_pct=1.0, ci_low_pct=-2.0, ci_high_pct=4.0),
        "Not decided: 2 of 3 settings may be the best in throughput; the best measured, n=2, "
        "processes 2.0 % fewer to 4.0 % more tokens per second than n=4 (95 % interval), the "
        "only one not told apart from it.",
        "Undecided: 2 of 3 settings may be best for throughput; measured best: n=2.",
        "inconclusive: undecided",
    ),
    "a sweep of computed values": (
        setting(**WASTED, values={"n=1": 30.0, "n=2": 0.0, "n=4": 12.0}),
        "In wasted KV memory (computed), n=2 is the best of 3 settings: 0.0 %; n=1 has 30.0 %.",
        "Best is n=2: wasted KV memory 0 %; n=1 30.0 %.",
        "better: best setting known",
    ),
    "a sweep of equal computed values": (
        setting(**WASTED, values={"n=1": 30.0, "n=2": 0.0, "n=4": 0.0},
                possibly_best=("n=2", "n=4")),
        "In wasted KV memory (computed), n=2; n=4 are the best of 3 settings: 0.0 %; n=1 has "
        "30.0 %.",
        "Best are 2 of 3 settings: wasted KV memory 0 %; n=1 30.0 %.",
        "better: best setting known",
    ),
    "a sweep's estimate": (
        setting(withheld="2 of 3 blocks are done"),
        "Not decided: which of 3 settings is best in throughput; an estimate only (2 of 3 "
        "blocks are done): n=2 processes 11.1 % more tokens per second than n=1.",
        "Estimate only: n=2 looks best of 3 for throughput (1,000 tok/s).",
        "estimate_only: estimate only",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_findings_has_its_words(case):
    findings, long, short, chip = CASES[case]
    assert long_text(findings) == long
    assert short_answer(findings) == (short or long)
    assert len(short_answer(findings).split()) <= MAX_WORDS
    summary = summary_verdict(findings)
    assert f"{summary.kind}: {summary.text}" == chip


def test_no_text_calls_a_time_faster():
    """A time that fell by 55 % is not "55 % faster"."""
    texts = [text for findings, *_ in CASES.values() for text in (long_text(findings),
             short_answer(findings), summary_verdict(findings).text)]  # fmt: skip
    assert not [text for text in texts if {"faster", "slower"} & set(text.split())]


def test_cells_of_the_same_arms_and_metric_are_merged():
    """A headline of several cells has its size: it was "faster in all 3 cells"."""
    cells = [cell(better(-20.0)), cell(better(-50.0)), cell(worse(25.0))]
    labels = ["n=1", "n=2", "n=4"]
    assert short_answer(merge_findings(cells[:2], labels[:2])) == (
        "Map takes 20.0 to 50.0 % less time per launch than search in both cells."
    )
    assert short_answer(merge_findings(cells, labels)) == (
        "Map takes 50.0 % less (n=2) to 25.0 % more (n=4) time per launch than search."
    )
    second = (
        [unseen(metric=REQUESTS), better(metric=WAIT)],
        [unseen(metric=REQUESTS), same(metric=WAIT)],
    )
    assert short_answer(merge_findings([cell(*own) for own in second], labels[:2])) == (
        "No difference in TTFT p50 beyond 1.2 % in 1 of 2 cells; 4.1 % less in 1; throughput "
        "undecided."
    )
    broken = replace(cell(invalid()), cause="the gate engaged failed")
    assert short_answer(merge_findings([cells[0], broken], labels[:2])) == (
        "Map takes 20.0 % less time per launch than search in 1 of 2 cells; 1 invalid."
    )
    assert merge_findings([cells[0], cell(better(metric="decode_ms"))], labels[:2]) is None
    assert merge_findings([cells[0], cell(better(arm="other"))], labels[:2]) is None
    assert merge_findings([broken, broken], labels[:2]) is None


def test_an_arm_that_ran_out_of_memory_as_claimed_in_all_cells_is_not_called_invalid():
    died = cell(better(), invalid(arm="padded"), out_of_memory=("padded",))
    assert short_answer(merge_findings([died, died], ["n=1", "n=2"])) == (
        "Out of memory: padded. Map takes 4.1 % less time per launch than search in both cells."
    )
    assert merge_findings([died, replace(died, out_of_memory=())], ["n=1", "n=2"]) is None


def test_a_computed_value_below_1_keeps_its_digits():
    """It said "a 0.0 MiB, b 0.0 MiB (50.0 % more)"."""
    small = computed({"search": 0.02 * 2**20, "a": 0.03 * 2**20}, "peak_kv_bytes")
    text = "Peak KV memory (computed): search 0.02 MiB, a 0.03 MiB (50.0 % more)."
    assert long_text(small) == text


def test_the_control_s_widest_interval_is_never_rounded_down():
    known = {"arm": "copy", "effect_pct": 0.1, "p": 0.5, "ci_low_pct": -1.849, "ci_high_pct": 1.2}
    row = {"metric": "e2e_ms", "primary": True, "comparisons": [known]}
    cell = planted_cell([row], arms=[{"name": "copy", "role": "control"}])
    assert control_sentence(cell).endswith("; widest interval ±1.9 %")


def test_findings_are_planned_from_the_verdicts_on_primary_rows(make_cell):
    planned = plan_findings(
        analyse(make_cell(effects={"seq_map": 0.5}, skipped={"prefill, 8 × 512": "big"}))
    )
    assert (planned.arms, planned.missing) == (("seq_map",), ("prefill, 8 × 512",))
    assert {finding.word for finding in planned.findings} == {"better"}
    assert planned.noise and not planned.cause and not planned.computed
    first = planned.findings[0]
    assert first.value < first.base and first.gain == -first.effect > 45


def test_a_failed_gate_leaves_no_answer(make_cell, make_array):
    def differ(record):
        if record.arm != "seq_map":
            return record
        cases = tuple(replace(c, outputs=make_array([9] * 64, [9] * 16)) for c in record.cases)
        return replace(record, cases=cases)

    planned = plan_findings(analyse(make_cell(change=differ)))
    assert short_answer(planned) == "No answer: the gate identical failed."
    assert long_text(planned).startswith("No answer: seq_map is invalid: ")


def test_several_failed_gates_are_all_named(make_cell):
    def fail(record):
        return replace(record, outcome="oom", detail="no room", cases=())

    one_arm = make_cell(change=lambda r: fail(r) if r.arm == "seq_map" else r)
    planned = plan_findings(analyse(one_arm))
    assert short_answer(planned) == "No answer: the gates healthy, engaged and identical failed."
    nothing = plan_findings(analyse(make_cell("b/x", change=fail)))
    text = "No answer: nothing was measured, because seq_map, control and binary_search failed."
    assert long_text(nothing) == short_answer(nothing) == text


def test_a_computed_metric_gets_no_test_and_what_varies_does(make_cell):
    analysis = analyse(make_cell("d/x", requests=True, metrics=["peak_kv_bytes"]))
    assert analysis.data.design.metrics == ("peak_kv_bytes",) and analysis.all_computed
    assert long_text(plan_findings(analysis)) == (
        "Peak KV memory (computed): binary_search 16 MiB, seq_map 16 MiB (the same)."
    )
    row = next(r for r in analysis.cell.to_json()["rows"] if r["metric"] == "peak_kv_bytes")
    assert {c["verdict"] for c in row["comparisons"]} == {"computed"}
    assert all(c["p"] is None and c["ci_low_pct"] is None for c in row["comparisons"])

    def vary(record):
        first = record.cases[0]
        metrics = tuple(
            replace(m, repeats=(2.0**24 + record.block + record.position,))
            if m.name == "peak_kv_bytes"
            else m
            for m in first.metrics
        )
        return replace(record, cases=(replace(first, metrics=metrics),))

    varied = analyse(make_cell("e/x", requests=True, metrics=["peak_kv_bytes"], change=vary))
    assert not varied.all_computed and "computed" not in long_text(plan_findings(varied))


def test_a_question_about_outputs_is_answered_by_the_gate(make_cell):
    same_outputs = analyse(make_cell("f/x", requests=True, metrics=["outputs"]))
    assert short_answer(plan_findings(same_outputs)) == (
        "The outputs of seq_map are bit-identical to those of binary_search."
    )

    def differ(record):
        case = record.cases[0]
        first, *rest = case.outputs["requests"]
        if record.arm != "seq_map":
            return record
        requests = [{**first, "tokens": [99, *first["tokens"][1:]]}, *rest]
        changed = {**case.outputs, "digest": "0" * 64, "requests": requests}
        return replace(record, cases=(replace(case, outputs=changed),))

    other = analyse(make_cell("g/x", requests=True, metrics=["outputs"], change=differ))
    text = long_text(plan_findings(other))
    assert text.startswith("The outputs are not as claimed (bitwise): ")
    assert text.endswith("(seq_map: 1 of 8 differ).")


def test_a_metric_that_no_run_gives_is_named(make_cell):
    analysis = analyse(make_cell("h/x", requests=True, metrics=["kv_waste_pct"]))
    assert long_text(plan_findings(analysis)) == (
        "No answer: nothing was measured; not measured: kv_waste_pct."
    )


def test_a_text_loses_as_little_as_possible():
    long, extra = Piece(" ".join(["word"] * 18)), optional("one two", 2, "three")
    assert fit([long, extra]).endswith("word one two.")
    assert fit([long, extra, optional("one more", 1)]).endswith("word one two.")
    assert fit([long, optional("one two", 4), optional(", one more", 1)]).endswith(" one two.")
    cut = fit([long, long])
    assert len(cut.split()) == MAX_WORDS + 1 and cut.endswith("word …")
    assert fit([long, long], [Piece("short")]) == "Short."


@pytest.mark.parametrize(
    ("name", "text"),
    [("seq_map", "seq map"), ("mlx_lm", "mlx_lm"), ("mlx_lm_batch", "mlx_lm batch")],
)
def test_names_are_written_as_words(name, text):
    assert arm_text(name) == text


@pytest.mark.parametrize(
    ("value", "text"), [(2659.9, "2,660"), (35.84, "35.8"), (0.51832, "0.518"), (0.0, "0")]
)
def test_values_have_three_significant_digits(value, text):
    found = Findings((), "search", alone=one("", place=None, base=value).row)
    assert f" {text} µs" in short_answer(found)
