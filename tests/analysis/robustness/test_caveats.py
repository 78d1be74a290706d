"""Caveats, disturbed blocks and sensitivity analyses."""

from dataclasses import replace

import numpy as np
import pytest
from planted_cells import caveats

from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.pages.cell_report_content import CellReport
from labkit.analysis.robustness import sensitivity_analysis
from labkit.analysis.robustness.caveats import ranked_caveats
from labkit.analysis.robustness.disturbed_runs import disturbed_blocks, memory_wait_share
from labkit.analysis.robustness.sensitivity_analysis import probe_correlations, sensitivity_results
from labkit.records import Metric, Record, publish_arm, read_arm


def caveats_text(path):
    return "\n".join(caveats(analyse(path)))


def observed(**samples):
    return lambda record: replace(record, notes={"observer": {"samples": samples}})


def memory_waited(share):
    """Return a change of records: processes waited for memory for a share of the run."""

    def change(record):
        start = {"memory": {"total_us": 7}}
        end = {"memory": {"total_us": 7 + share * 1e7}}
        began, ended = (f"2026-11-20T20:00:{second:02d}.500Z" for second in (10, 20))
        return replace(
            record,
            environment={**record.environment, "pressure": start, "taken": began},
            environment_end={**record.environment_end, "pressure": end, "taken": ended},
        )

    return change


def test_a_quiet_machine_has_no_caveats(make_cell):
    assert caveats_text(make_cell()) == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (observed(foreign_cores=[0.1, 1.5, None]), "other processes used 0.8 cores"),
        (memory_waited(0.12), "waited for memory (up to 12 % of a run)"),
        (observed(memory_pressure_level=[1, 2, 1]), "macOS reported memory pressure"),
        (
            lambda r: replace(r, notes={"removed_environment": ["OMP_NUM_THREADS"]}),
            "removed for all arms: OMP_NUM_THREADS",
        ),
        (
            lambda r: replace(
                r,
                environment={**r.environment, "cpu_ticks": {"user": 0, "steal": 0}},
                environment_end={**r.environment_end, "cpu_ticks": {"user": 90, "steal": 10}},
            ),
            "hypervisor took up to 10 %",
        ),
        (
            lambda r: replace(r, environment={**r.environment, "mhz": 3000 - 400 * r.block}),
            "clock varied from 1,800 to 3,000 MHz",
        ),
        (
            lambda r: replace(
                r, environment={**r.environment, "settings": {"governor": f"g{r.block // 2}"}}
            ),
            "machine settings changed between runs: governor g0 to g1 (b02-",
        ),
        (
            lambda r: replace(r, probe={"before": {"matmul_us": 100.0 * (1 + r.block)}}),
            "own speed varied by",
        ),
    ],
)
def test_each_disturbance_of_the_machine_is_a_caveat(make_cell, change, words):
    assert words in caveats_text(make_cell(change=change))


def test_emulated_kernels_and_a_missing_control_are_caveats(make_cell):
    path = make_cell(control=False)
    assert "no A/A control" in caveats_text(path)
    arm = read_arm(path / "arms" / "seq_map.json")
    attention = {"attention": {"device": "emulated"}}
    engine = {**arm.config["engine"], **attention}
    publish_arm(path, replace(arm, config={**arm.config, "engine": engine}))
    assert "seq_map: the Metal kernels were emulated on a CPU" in caveats_text(path)


def test_a_control_that_differs_is_a_caveat(make_cell):
    def leak(record):
        if record.arm != "control":
            return record
        cases = tuple(
            replace(c, metrics=(replace(c.metrics[0], repeats=(c.metrics[0].repeats[0] * 1.2,)),))
            for c in record.cases
        )
        return replace(record, cases=cases)

    assert "the A/A control differs from the baseline" in caveats_text(make_cell(change=leak))


def slow_at(place, factors):
    """Return a change that slows the runs at one position of each block by a factor per case."""

    def apply(record):
        if record.position != place:
            return record
        cases = tuple(
            replace(c, metrics=tuple(replace(m, repeats=tuple(x * factor for x in m.repeats))
                                     for m in c.metrics))
            for c, factor in zip(record.cases, factors, strict=True)
        )  # fmt: skip
        return replace(record, cases=cases)

    return apply


def test_two_modes_are_reported_with_fishers_p(make_cell):
    text = caveats_text(make_cell(change=slow_at(2, (1.2, 1.0)), noise=0.002))
    assert "two modes 20 % apart in 'decode, 64 reqs, ctx 128'; runs above the gap: " in text
    assert "Fisher's exact test" in text and "no run was dropped" in text


def test_modes_of_many_rows_are_one_line_with_their_number_and_the_worst(make_cell):
    factors = (1.1, 1.3, 1.2, 1.15)
    text = caveats_text(make_cell(cases=tuple("abcd"), change=slow_at(2, factors), noise=0.002))
    (line,) = [line for line in text.splitlines() if "modes" in line]
    assert line.startswith(
        "the runs form two modes in 4 rows, the widest 30 % apart in 'b'; runs above "
    )
    assert "smallest p of all rows" in line


def test_two_modes_of_the_only_arm_are_reported_without_a_test(make_cell):
    def slow_block(record):
        return slow_at(record.position, (1.2, 1.0))(record) if record.block % 2 else record

    alone = make_cell(effects={}, control=False, runs=1, blocks=8, change=slow_block, noise=0.002)
    (line,) = [line for line in caveats_text(alone).splitlines() if "modes" in line]
    assert line.endswith("; runs above the gap: binary_search 4 of 8; no run was dropped")


def test_a_control_that_differs_in_many_rows_is_one_line(make_cell):
    def leak(record):
        return slow_at(record.position, (1.2, 1.3))(record) if record.arm == "control" else record

    (line,) = [line for line in caveats_text(make_cell(change=leak)).splitlines() if "A/A" in line]
    assert line.startswith("the A/A control differs from the baseline in 2 rows, above all in ")


def test_a_row_of_all_requests_is_named_by_its_metric(make_cell):
    def leak(record):
        return slow_at(record.position, (0.8,))(record) if record.arm == "control" else record

    path = make_cell(requests=True, identity="tokens", noise=0.002, change=leak)
    assert "differs from the baseline in 'total_tok_s' (adjusted p" in caveats_text(path)
    slow = make_cell("s/cell", requests=True, identity="tokens", noise=0.002,
                     change=slow_at(2, (0.8,)))  # fmt: skip
    assert "% apart in 'total_tok_s'; runs above the gap: " in caveats_text(slow)


def test_two_metrics_of_a_case_are_told_apart(make_cell):
    def leak(record):
        cases = tuple(
            replace(c, metrics=(*c.metrics, *(
                replace(m, name="single_dispatch_us", repeats=tuple(
                    x * (1.2 if record.arm == "control" else 1.0) for x in m.repeats))
                for m in c.metrics)))
            for c in record.cases
        )  # fmt: skip
        return replace(record, cases=cases)

    text = caveats_text(make_cell(cases=("a",), change=leak))
    assert "differs from the baseline in 'a: single_dispatch_us' (adjusted p" in text


def test_skipped_rows_of_one_reason_are_one_line(make_cell):
    path = make_cell(cases=("a", "b", "c"), skipped={"b": "too large", "c": "too large"})
    assert caveats_text(path) == "2 rows skipped (b; c): too large"


def test_a_noisy_control_withholds_verdicts_and_is_a_caveat(make_cell):
    def shaky(record):
        if record.arm != "control":
            return record
        factor = 1.2 if record.block % 2 else 0.85
        cases = tuple(
            replace(c, metrics=tuple(replace(m, repeats=tuple(x * factor for x in m.repeats))
                                     for m in c.metrics))
            for c in record.cases
        )  # fmt: skip
        return replace(record, cases=cases)

    path = make_cell(change=shaky, effects={"seq_map": 1.0}, noise=0.002)
    analysis = analyse(path)
    one = next(one for one in analysis.cell.comparisons if one.arm == "seq_map")
    assert (one.verdict, one.reason) == ("inconclusive", "noise exceeds margin")
    assert "because the A/A control varies by more than ±2 %" in caveats_text(path)


def with_probe(slow_block=None, follow=True):
    """Return a change that slows some processes by 5 %, and their probes too if ``follow``."""

    def apply(record):
        slow = 1.05 if (record.block + record.position) % 3 == 0 else 1.0
        metrics = []
        for case in record.cases:
            values = tuple(
                replace(m, repeats=tuple(x * slow for x in m.repeats)) for m in case.metrics
            )
            metrics.append(replace(case, metrics=values))
        other = 1 + 0.01 * ((7 * record.block + 3 * record.position) % 5)
        probe = 100.0 * (slow if follow else other) * (1.5 if record.block == slow_block else 1.0)
        return replace(record, cases=tuple(metrics), probe={"before": {"matmul_us": probe}})

    return apply


def test_probe_adjustment_is_shown_where_it_correlates(make_cell, monkeypatch):
    analysis = analyse(make_cell("a/x", change=with_probe(), effects={"seq_map": 0.98}))
    results = [s for s in sensitivity_results(analysis) if s.arm == "seq_map" and s.row == 0]
    assert len(results) == 1 and results[0].how.startswith("probe-adjusted (correlation 0.9")
    plain = analysis.comparisons[0]["seq_map"]
    assert results[0].p <= plain.p and results[0].effect_pct == pytest.approx(-2.0, abs=0.6)
    narrow, wide = (x.ci_pct[1] - x.ci_pct[0] for x in (results[0], plain))
    assert narrow < wide
    known = {abs(value) for _, value in probe_correlations(analysis)}
    for limit, shown in ((max(known), True), (np.nextafter(max(known), 1), False)):
        monkeypatch.setattr(sensitivity_analysis, "MIN_CORRELATION", limit)
        assert bool(sensitivity_results(analysis)) is shown
    monkeypatch.undo()
    blind = analyse(make_cell("a/y", change=with_probe(follow=False)))
    assert sensitivity_results(blind) == []
    assert all(abs(value) < 0.5 for _, value in probe_correlations(blind))
    (line,) = CellReport(blind).noise
    assert "The correlation of the metric's noise with the arm-blind probe is" in line


def test_no_correlation_is_given_for_rows_with_a_run_that_has_no_probe(make_cell):
    def without_one(record):
        record = with_probe()(record)
        return replace(record, probe={}) if record.run.startswith("b01-p01") else record

    analysis = analyse(make_cell("a/x", change=without_one))
    assert probe_correlations(analysis) == [] and sensitivity_results(analysis) == []


def test_results_without_disturbed_blocks_are_shown_beside_the_verdicts(make_cell):
    analysis = analyse(make_cell(change=with_probe(slow_block=1, follow=False)))
    assert set(disturbed_blocks(analysis.data.records)) == {1}
    assert any(
        line.startswith("Block 1 was disturbed (b01-") for line in CellReport(analysis).noise
    )
    results = [s for s in sensitivity_results(analysis) if "without disturbed blocks (1)" in s.how]
    assert {s.blocks for s in results} == {3}
    assert analysis.comparisons[0]["seq_map"].blocks == 4


def test_an_interval_has_the_level_of_the_verdict_s_own(make_cell):
    """It is that of the look which decided the row, also of a probe-adjusted interval."""

    def lengths(name, stopped, change):
        looks = [{"blocks": 4, "alpha": 0.01}, {"blocks": 8, "alpha": 0.04}]
        taken = {"blocks": 4, "alpha": 0.01, "decided": False, "stopped": stopped}
        design = {"looks_taken": [taken]}
        path = make_cell(name, blocks=8, looks=looks, change=change, design=design)
        results = sensitivity_results(analyse(path))
        return [s.ci_pct[1] - s.ci_pct[0] for s in results if s.arm == "seq_map"]

    for name, change in (("probe", with_probe()), ("slow", with_probe(1, follow=False))):
        now = lengths(f"{name}/now", [], change)
        then = lengths(f"{name}/then", ["prefill, 8 × 512"], change)
        assert then[0] == now[0] and then[1] > 1.1 * now[1]


@pytest.mark.parametrize("runs", ["all", "binary_search", "seq_map", "control"])
def test_a_disturbed_block_is_excluded_from_every_arm(make_cell, runs):
    """Even if only one arm's runs were disturbed, no arm keeps the block's values."""

    def disturb(record):
        slow = record.block == 1 and runs in ("all", record.arm)
        return replace(record, probe={"before": {"matmul_us": 150.0 if slow else 100.0}})

    options = {"blocks": 6, "noise": 0.02}
    results = sensitivity_results(analyse(make_cell("a/whole", change=disturb, **options)))
    without = analyse(
        make_cell("a/without", change=lambda r: None if r.block == 1 else disturb(r), **options)
    )
    assert [(s.row, s.arm) for s in results] == [
        (row, arm) for row in (0, 1) for arm in ("seq_map", "control")
    ]
    for result in results:
        expected = without.comparisons[result.row][result.arm]
        assert result.how == "without disturbed blocks (1)" and result.blocks == 5
        assert result.effect_pct == pytest.approx(expected.effect_pct)
        assert result.p == pytest.approx(expected.p)


OBSERVED = [
    ({"foreign_cores": [0.1, 1.4]}, "other processes used 0.8 cores"),
    ({"memory_pressure_level": [1, 4]}, "memory pressure"),
    ({"thermal_level": [0, 2]}, "heat slowed the CPU"),
    ({"mhz": [1500.0, 1600.0]}, "the clock was at 1,550 MHz"),
]


@pytest.mark.parametrize(("samples", "reason"), OBSERVED)
def test_the_observer_s_samples_name_a_disturbed_block(make_cell, samples, reason):
    def apply(record):
        own_samples = samples if record.block == 2 and record.position == 1 else {"mhz": [2000.0]}
        return replace(record, notes={**record.notes, "observer": {"samples": own_samples}})

    disturbances = disturbed_blocks(analyse(make_cell(change=apply)).data.records)
    ((text, during_arm),) = disturbances.pop(2)
    assert not disturbances and text.startswith("b02-p01-") and text.endswith(reason)
    # What other processes took, no arm can cause; the rest was read while one ran.
    assert during_arm is ("foreign_cores" not in samples)


def test_disturbances_that_an_arm_may_have_caused_are_marked(make_cell):
    def apply(record):
        own_samples = {"mhz": [1500.0 if record.block == 2 else 2000.0]}
        return replace(record, notes={**record.notes, "observer": {"samples": own_samples}})

    def both(record):
        """Disturb the machine in block 1 and in the hot block."""
        slow = 150.0 if record.block in (1, 2) else 100.0
        return replace(apply(record), probe={"before": {"matmul_us": slow}})

    hot, mixed = (
        sensitivity_results(analyse(make_cell(f"a/{change.__name__}", change=change)))
        for change in (apply, both)
    )
    slow = sensitivity_results(analyse(make_cell("a/slow", change=with_probe(1, follow=False))))
    assert {s.how for s in slow} == {"without disturbed blocks (1)"}
    words = "; an arm may have caused the disturbance"
    assert {s.how for s in hot} == {f"without disturbed blocks (2){words}"}
    assert {s.how for s in mixed} == {f"without disturbed blocks (1, 2){words}"}


def test_waiting_is_a_share_of_the_process_and_not_of_a_run_s_part_of_it():
    record = memory_waited(0.09)(Record("a", "arm", 0, 0, 1, "ok", "2026-11-20T20:00:00Z"))
    assert memory_wait_share(record) == pytest.approx(0.09)
    third = replace(record, notes={"together": ["a", "b", "c"]}, seconds={"total": 10 / 3})
    assert memory_wait_share(third) == pytest.approx(0.09)


def test_waiting_for_memory_names_a_disturbed_block(make_cell):
    def apply(record):
        return memory_waited(0.09 if (record.block, record.position) == (2, 1) else 0.04)(record)

    disturbances = disturbed_blocks(analyse(make_cell(change=apply)).data.records)
    ((text, during_arm),) = disturbances.pop(2)
    assert not disturbances and text.endswith("processes waited for memory 9 % of the time")
    assert during_arm


def test_throttling_and_a_hot_machine_disturb_their_blocks(make_cell):
    def apply(record):
        end = {"throttled": 5 + (record.block == 0 and record.position == 0)}
        if record.block == 3:
            return replace(record, environment_end={**record.environment_end, "thermal": "serious"})
        return replace(
            record,
            environment={**record.environment, "thermal": {"throttled": 5}},
            environment_end={**record.environment_end, "thermal": end},
        )

    path = make_cell(change=apply)
    assert set(disturbed_blocks(analyse(path).data.records)) == {0, 3}
    assert "heat slowed the CPU in" in caveats_text(path)


@pytest.mark.parametrize(("blocks", "runs", "known"), [(8, 1, True), (2, 2, True), (1, 1, False)])
def test_a_correlation_needs_enough_degrees_of_freedom(make_cell, blocks, runs, known):
    """Each block costs a degree of freedom."""
    path = make_cell(change=with_probe(), blocks=blocks, runs=runs, effects={"seq_map": 1.0})
    correlations = probe_correlations(analyse(path))
    assert bool(correlations) is known
    assert all(value > 0.5 for _, value in correlations)


@pytest.mark.parametrize(
    ("metric", "requests", "text"),
    [
        ("ttft_p99_ms", 99, "ttft_p99_ms of 99 requests in a run: the p99 of fewer than 100"),
        ("ttft_p99_ms", 100, None),
        ("ttft_p50_ms", 8, None),
    ],
)
def test_a_p99_of_few_requests_is_said_to_be_that_of_the_slowest(make_cell, metric, requests, text):
    def change(record):
        (case,) = record.cases
        metrics = (*case.metrics, Metric("ttft_p99_ms", "ms", "lower", False, (90.0,)))
        notes = {"requests": [case.notes["requests"][0]] * requests}
        return replace(record, cases=(replace(case, metrics=metrics, notes=notes),))

    cell = make_cell(requests=True, metrics=[metric], change=change)
    lines = [line for line in ranked_caveats(analyse(cell)).could_change if "p99" in line]
    assert [line.startswith(text) for line in lines] == [True] * (text is not None)
