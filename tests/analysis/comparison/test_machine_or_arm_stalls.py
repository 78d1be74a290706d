"""Stalls of interleaved arms: attribution to the machine or an arm, and the verdicts then."""

import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from planted_cells import caveats, compare_studies

from labkit.analysis.charts.latency_distribution_chart import latency_charts
from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.comparison.machine_or_arm_stalls import (
    UNCLEAR_ALPHA,
    StallAttribution,
    attribute_stalls,
    own_work_bound_pct,
    own_work_limit,
    signed_rank_p,
)
from labkit.analysis.comparison.verdict import Verdict
from labkit.analysis.document.report_parts import CellSource
from labkit.analysis.exports.tool_exports import benchstat, pyperf, vllm
from labkit.analysis.number_format import p_text
from labkit.analysis.robustness.sensitivity_analysis import sensitivity_results
from labkit.analysis.statistics.permutation_test import permutation_test
from labkit.analysis.studies.data_frames import table_columns
from labkit.analysis.studies.metric_history import metric_history
from labkit.analysis.tables.load_test_diagnostics import request_outcomes_section
from labkit.records import Arm, Metric, open_study

BLOCKS = 10
ARM = "seq_map"


def analyse_with_stalls(make_cell, stalls_of, effect=1.0, blocks=BLOCKS, good=None, **options):
    """Analyse interleaved arms with stalls.

    ``stalls_of(arm, block)`` returns the stalled share of its time and the number of stalled steps.
    Metrics are without stalls; ``effect`` is the arm's speed over the baseline's. ``good``: how
    many requests of a run are within the limits, without and with stalls.
    """

    def change(record):
        share, steps = stalls_of(record.arm, record.block)
        cases = []
        for case in record.cases:
            notes, metrics = dict(case.notes), case.metrics
            if good is not None:
                notes["traffic"] = {"requests": 8, "served": 8, "good": good[0]}
                goodput = Metric("goodput_req_s", "req/s", "higher", False, (good[0] / 4.0,))
                metrics = (*metrics, goodput, Metric("wall_s", "s", "lower", False, (4.0,)))
            if share:
                notes["as_measured"] = {
                    m.name: m.repeats[0] * (1 - share if m.better == "higher" else 1 / (1 - share))
                    for m in metrics
                    if m.name != "peak_kv_bytes"
                }
                if good is not None:
                    wall = notes["as_measured"]["wall_s"]
                    notes["as_measured"]["goodput_req_s"] = good[1] / wall
            cases.append(replace(case, metrics=metrics, notes=notes))
        noted = {"steps": steps, "seconds": 5.0 * share, "of_s": 5.0}
        return replace(record, cases=tuple(cases), notes={**record.notes, "stalls": noted})

    cell = make_cell(
        blocks=blocks, runs=1, requests=True, isolation="in_process", repeats=1, noise=0.001,
        effects={ARM: effect}, change=change, **options,
    )  # fmt: skip
    return analyse(cell)


def verdict(analysis, arm=ARM):
    (one,) = [one for row, one in analysis.cell.compared if row.primary and one.arm == arm]
    return one


def test_stalls_of_an_arm_s_own_work_stay_in_its_times(make_cell):
    """An arm stalls for a sixth of its time in every process; without stalls, arms look equal."""
    analysis = analyse_with_stalls(
        make_cell, lambda arm, block: (1 / 6, 20) if arm == ARM else (0.0, 0)
    )
    assert verdict(analysis).verdict == "worse"
    assert verdict(analysis).effect_pct == pytest.approx(-100 / 6, abs=0.5)
    (line,) = [line for line in caveats(analysis) if "stalls" in line]
    assert (
        "were left in the times: the stalls of seq_map may differ" in line
        and "16.7 % of seq_map's" in line
    )
    without = next(s for s in sensitivity_results(analysis) if s.arm == ARM)
    assert without.how.startswith("without stalls")
    assert without.effect_pct == pytest.approx(0, abs=0.5)


def test_tables_and_exports_have_the_times_that_are_judged(make_cell, tmp_path):
    """An arm's own stalls stay in its times, and so in those of every table, file and chart."""
    analysis = analyse_with_stalls(
        make_cell, lambda arm, block: (1 / 6, 20) if arm == ARM else (0.0, 0), good=(8, 5)
    )
    (speed,) = (row for row in analysis.rows if row.primary)
    (delay,) = (row for row in analysis.rows if row.metric == "ttft_p50_ms")
    speeds, delays = ([one.value for one in row.arms[ARM]] for row in (speed, delay))
    assert max(speeds) < 450 and min(delays) > 45  # with stalls
    runs = table_columns(open_study(tmp_path / "study"), "runs")
    lines = zip(runs["arm"], runs["metric"], runs["value"], strict=True)
    assert [value for arm, metric, value in lines if (arm, metric) == (ARM, speed.metric)] == speeds
    lines = re.findall(rf"arm={ARM}-2 1 (\S+) total_tok_s", benchstat([analysis]))
    assert list(map(float, lines)) == speeds
    benchmarks = {
        one["metadata"]["name"]: [value for run in one["runs"] for value in run["values"]]
        for one in json.loads(pyperf([analysis]))["benchmarks"]
    }
    assert benchmarks[f"ttft_p50_ms [{ARM}]"] == pytest.approx([ms / 1e3 for ms in delays])
    (history,) = (s for s in metric_history(tmp_path, "total_tok_s") if s.arm == ARM)
    assert history.points[0].value == pytest.approx(np.median(speeds))
    table = request_outcomes_section.parts(CellSource(analysis))[0].table
    headings = [column.heading for column in table.columns]
    counts = {line: table.cells(line)[headings.index("within the limits")] for line in table.lines}
    assert counts == {"binary_search": "80", ARM: "50"}


def test_times_of_single_requests_are_said_to_be_without_stalls(make_cell):
    def own(arm, block):
        return (1 / 6, 20) if arm == ARM else (0.0, 0)

    for stalls_of, note in ((own, True), (random_stalls, False)):
        analysis = analyse_with_stalls(make_cell, stalls_of, name=f"study/{note}")
        assert all(("times" in run) is note for run in json.loads(vllm([analysis])))
        captions = [caption for caption, _ in latency_charts(analysis)]
        assert captions and all(("without stalls" in text) is note for text in captions)


def random_stalls(arm, block):
    """Return stalls of a machine that hits any arm at random."""
    rng = np.random.default_rng([7, block, len(arm)])
    return float(0.1 * rng.random()), 3


def test_the_machine_s_stalls_are_removed(make_cell):
    analysis = analyse_with_stalls(make_cell, random_stalls, effect=0.9)
    assert verdict(analysis).verdict == "worse"
    assert verdict(analysis).effect_pct == pytest.approx(-10, abs=0.3)
    assert not any("stalls" in line for line in caveats(analysis))
    whole = next(s for s in sensitivity_results(analysis) if s.arm == ARM)
    assert whole.how.startswith("with stalls (")
    assert whole.ci_pct[1] - whole.ci_pct[0] > 4


def test_removed_stalls_bound_a_claim_of_equivalence(make_cell):
    """Removed stalls may be an arm's own work; metrics without stalls keep their verdict."""
    analysis = analyse_with_stalls(make_cell, random_stalls)
    one = verdict(analysis)
    assert analysis.comparisons[0][ARM].equivalence.p < 0.05
    assert one.verdict == "inconclusive" and "may be the arm's own work" in one.reason
    small = analyse_with_stalls(
        make_cell, lambda arm, block: (random_stalls(arm, block)[0] / 20, 1), name="small"
    )
    assert verdict(small).verdict in ("equivalent", "trivial")
    memory = [
        one
        for row, one in analysis.cell.compared
        if row.metric == "peak_kv_bytes" and one.arm == ARM
    ]
    assert memory and all("stalls" not in (one.reason or "") for one in memory)


def test_the_bound_on_an_arm_s_own_work_is_never_rounded_down():
    stalls = StallAttribution({}, {ARM: 1.04})
    restricted = stalls.restrict(Verdict("equivalent"), ARM, 1.0, lambda: Verdict("equivalent"))
    assert restricted.word == "inconclusive" and "but up to 1.1 % may be" in restricted.reason


def test_unclear_stalls_allow_only_a_verdict_that_they_do_not_change(make_cell):
    """Two of ten processes lost less than the baseline: p = 0.02."""

    def stalls_of(arm, block):
        return (0.05 if arm == ARM and block > 0 else 0.01 if arm == ARM else 0.02, 3)

    large = analyse_with_stalls(make_cell, stalls_of, effect=0.9, blocks=7)
    assert large.data.stalls.unclear_reasons
    assert verdict(large).verdict == "worse"
    assert any("seq_map is better or worse only if" in line for line in caveats(large))
    small = analyse_with_stalls(make_cell, stalls_of, effect=1.02, blocks=7, name="small")
    assert verdict(small).p_adjusted <= 0.05
    assert verdict(small).verdict == "inconclusive"
    assert "may be the arm's own work" in verdict(small).reason


def stalled_runs(processes, slow_arms, left_out=()):
    """Return records in which some arms stall in every process, without the runs ``left_out``."""
    return [
        SimpleNamespace(
            arm=arm,
            block=block,
            outcome="ok",
            known_notes={"stalls": {"steps": 9 * slow, "seconds": 0.5 * slow + 0.01, "of_s": 5.0}},
        )
        for block in range(processes)
        for arm in ("base", "a", "b")
        for slow in (int(arm in slow_arms),)
        if (arm, block) not in left_out
    ]


THREE_ARMS = [Arm("base", "baseline", {}, {}), *(Arm(name, "arm", {}, {}) for name in "ab")]


@pytest.mark.parametrize(
    ("processes", "reversed_rank", "own"),
    [(10, 0, True), (10, 1, False), (9, 0, True), (8, 0, False), (6, 0, False)],
)
def test_the_limit_of_an_arm_s_own_work_is_divided_among_the_arms(processes, reversed_rank, own):
    """p is the smallest, or the second smallest; two arms are tested."""
    runs = stalled_runs(processes, {"a"})
    for run in runs[: 3 * reversed_rank]:  # a process in which a stalls by a little less
        run.known_notes["stalls"]["seconds"] = 0.005 if run.arm == "a" else 0.01
        run.known_notes["stalls"]["steps"] = 0 if run.arm == "a" else 1
    p = (2 + 2 * reversed_rank) / 2**processes
    found = attribute_stalls(runs, THREE_ARMS)
    assert (2 * p <= own_work_limit(processes, 2)) is (found.kept_reason is not None) is own
    assert own or math.isinf(found.own_work_bounds_pct["a"])
    assert f"p = {p_text(p)}" in (found.kept_reason or found.unclear_reasons["a"])


def test_processes_too_few_to_show_own_work_leave_better_and_worse_open():
    """A limit out of reach is not a test passed: with two arms, 8 processes cannot show it."""
    assert [own_work_limit(n, 1) for n in (6, 7, 8, 9, 10)] == [0, 0, 2 / 2**8, 0.005, 0.005]
    assert own_work_limit(8, 2) == 0 and own_work_limit(9, 2) == 4 / 2**9
    found = attribute_stalls(stalled_runs(8, {"a"}), THREE_ARMS)
    assert found.unclear_reasons["b"].startswith("8 processes are too few")
    better, same = Verdict("better"), Verdict("equivalent")
    assert found.restrict(better, "b", 2.0, lambda: better) == better
    assert found.restrict(better, "b", 2.0, lambda: same).word == "inconclusive"
    assert found.restrict(same, "b", 2.0, lambda: better) == same


def test_an_arm_is_compared_over_the_processes_that_it_shares_with_the_baseline():
    """One that ran out of memory, or that a look dropped, takes none from the others."""
    always = attribute_stalls(stalled_runs(10, {"a"}), THREE_ARMS)
    never = attribute_stalls(
        stalled_runs(10, {"a"}, left_out={("b", n) for n in range(10)}), THREE_ARMS
    )
    assert always.kept_reason == never.kept_reason and "p = 0.002" in never.kept_reason
    assert never.stalled_pct == {name: always.stalled_pct[name] for name in ("base", "a")}
    no_baseline = {("base", n) for n in range(10)}
    assert attribute_stalls(stalled_runs(10, {"a"}, left_out=no_baseline), THREE_ARMS) is None
    dropped = {("b", n) for n in range(7, 10)}
    assert attribute_stalls(stalled_runs(10, {"a"}, left_out=dropped), THREE_ARMS).kept_reason
    of_b = attribute_stalls(stalled_runs(10, {"b"}, left_out=dropped), THREE_ARMS)
    assert of_b.kept_reason is None  # 7 processes: p = 0.016, and two arms
    assert math.isinf(of_b.own_work_bounds_pct["b"]) and of_b.own_work_bounds_pct["a"] < 1
    too_few = {("b", n) for n in range(5, 10)}
    assert "with so few processes" in attribute_stalls(
        stalled_runs(10, {"b"}, left_out=too_few), THREE_ARMS
    ).kept_reason  # fmt: skip


@pytest.mark.parametrize("unknown", ["base", "b"])
def test_where_the_stalls_of_a_measured_arm_are_not_known_all_times_have_theirs(unknown):
    """A server's times are never without stalls."""
    runs = stalled_runs(10, {"a"})
    for run in runs:
        if run.arm == unknown:
            run.known_notes["stalls"].clear()
    found = attribute_stalls(runs, THREE_ARMS)
    assert found.kept_reason == f"those of {unknown} are not known"
    assert unknown not in found.stalled_pct and found.own_work_bounds_pct == {}


def test_stalls_of_few_processes_are_not_removed(make_cell):
    analysis = analyse_with_stalls(
        make_cell, lambda arm, block: (0.1, 2) if arm == ARM else (0.0, 0), blocks=5
    )
    assert verdict(analysis).effect_pct == pytest.approx(-10, abs=0.5)
    assert any("with so few processes" in line for line in caveats(analysis))


def test_two_studies_are_compared_both_with_stalls_or_both_without(make_cell):
    """The arm of the new study is slower only by its own work."""

    def own(arm, block):
        return (1 / 6, 20) if arm == ARM else (0.0, 0)

    old = analyse_with_stalls(make_cell, random_stalls, name="old/ablation=seq_map")
    new = analyse_with_stalls(make_cell, own, name="new/ablation=seq_map")
    comparison = compare_studies([old], [new], 2.0)
    assert any("stalls" in line for line in comparison.caveats)
    (change,) = (c for c in comparison.changes if c.row.primary and c.arm == ARM)
    assert change.comparison.effect_pct == pytest.approx(-16.7, abs=3)
    same_stalls = analyse_with_stalls(
        make_cell, random_stalls, effect=0.9, name="again/ablation=seq_map"
    )
    comparison = compare_studies([old], [same_stalls], 2.0)
    assert not any("stalls" in line for line in comparison.caveats)
    (change,) = (c for c in comparison.changes if c.row.primary and c.arm == ARM)
    assert change.comparison.effect_pct == pytest.approx(-10, abs=0.3)


def test_arms_without_stalls_have_no_caveat_about_them(make_cell):
    analysis = analyse_with_stalls(make_cell, lambda arm, block: (0.0, 0))
    assert analysis.data.stalls is None and analysis.alternative_rows == ()
    assert not any("stalls" in second.how for second in sensitivity_results(analysis))


def test_separate_processes_have_no_stall_attribution(make_cell):
    cell = make_cell(blocks=4, runs=2, requests=True, change=lambda r: replace(
        r, notes={**r.notes, "stalls": {"steps": 3, "seconds": 1.0, "of_s": 5.0}}))  # fmt: skip
    assert analyse(cell).data.stalls is None


def test_the_signed_rank_test_ranks_shares_and_steps():
    """The p is exact: the share of 2^8 sign patterns with as extreme a rank sum."""
    unstalled, stalled = np.zeros((8, 2)), np.zeros((8, 2))
    stalled[:, 0] = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 90.0]
    assert (
        signed_rank_p(unstalled, stalled) == signed_rank_p(unstalled, stalled[:, ::-1]) == 2 / 2**8
    )
    stalled[7, 0] = -0.1  # ranks 1.5 for both of 0.1: the sum is 36 - 2 * 1.5
    assert signed_rank_p(unstalled, stalled) == 6 / 2**8


def test_the_bound_matches_the_signed_rank_test():
    """For n = 10 and two-sided 0.2, the tabulated critical value is 14."""
    slower = np.array([0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12])
    averages = np.sort([(x + y) / 2 for i, x in enumerate(slower) for y in slower[i:]])
    bound = own_work_bound_pct(np.zeros(10), 1 - np.exp(-slower))
    assert bound == pytest.approx(100 * np.expm1(averages[-15]))
    assert own_work_bound_pct(1 - np.exp(-slower), np.zeros(10)) == pytest.approx(
        -100 * np.expm1(-averages[-15])
    )


def machine(kind, rng, processes):
    """Return the stalls of two arms, [processes, arms] each: log slowdown, and stalled steps."""
    mean = 25 if kind == "busy" else 0.1 if kind == "rare" else 2.5
    steps = rng.poisson(mean, (processes, 2))
    draw = {
        "few": lambda k: rng.exponential(0.01, k),
        "busy": lambda k: rng.exponential(0.008, k),
        "heavy": lambda k: (0.003 * rng.pareto(1.2, k)).clip(0, 2),
        "rare": lambda k: rng.exponential(0.3, k),
    }[kind]
    return np.log1p([[draw(k).sum() for k in pair] for pair in steps]), steps.astype(float)


def decide(speeds, slower, steps):
    """Return the p of a study with one arm, and whether stalls count as the machine's."""
    share = 1 - np.exp(-slower)
    stalled = np.stack([share, steps], axis=2)
    p, limit = signed_rank_p(stalled[:, 0], stalled[:, 1]), own_work_limit(len(speeds), 1)
    passed = p > UNCLEAR_ALPHA and own_work_bound_pct(share[:, 0], share[:, 1]) <= 2.0
    without, with_stalls = (
        permutation_test(values[:, [0]], values[:, [1]]) for values in (speeds, speeds - slower)
    )
    if p <= limit:
        return with_stalls, passed
    return max(without, with_stalls) if p <= UNCLEAR_ALPHA or not limit else without, passed


@pytest.mark.parametrize("processes", [6, 8, 10])
@pytest.mark.parametrize("kind", ["few", "busy", "heavy", "rare"])
def test_equal_arms_with_stalls_are_called_different_in_at_most_6_percent(kind, processes):
    rng = np.random.default_rng([processes, len(kind)])
    wrong = 0
    for _ in range(800):
        p, _ = decide(rng.normal(0, 0.01, (processes, 2)), *machine(kind, rng, processes))
        wrong += p <= 0.05
    assert wrong / 800 <= 0.065


@pytest.mark.parametrize("kind", ["few", "busy", "heavy", "rare"])
def test_own_work_of_three_percent_is_seldom_missed(kind):
    rng = np.random.default_rng(len(kind))
    passed = 0
    for _ in range(300):
        slower, steps = machine(kind, rng, 10)
        slower[:, 1] += 0.03
        steps[:, 1] += 1
        passed += decide(rng.normal(0, 0.01, (10, 2)), slower, steps)[1]
    assert passed / 300 <= 0.03


def test_old_records_without_measured_times_are_analysed_unchanged(make_cell):
    def change(record):
        return replace(record, notes={**record.notes, "stalls": {"steps": 3, "seconds": 1.0}})

    cell = make_cell(blocks=8, runs=1, requests=True, isolation="in_process", repeats=1,
                     change=change)  # fmt: skip
    assert analyse(cell).data.stalls is None
    json.dumps(analyse(cell).cell.to_json())
