"""Whole cells from records: the fields of cell.json, the gates and the verdicts."""

import io
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from planted_cells import caveats, planted_cell, section_table
from rich.console import Console

from labkit.analysis import analyse_cell, exit_code, load, write_study
from labkit.analysis.comparison import validity_gates
from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.comparison.verdict import target_effect_pct
from labkit.analysis.findings import verdict_sentences as verdict_sentences_module
from labkit.analysis.findings.verdict_sentences import verdict_sentences
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.pages.terminal_report import print_cell
from labkit.analysis.statistics.power import (
    alpha_share,
    blocks_needed,
    degrees_of_freedom,
    mde_pct,
)
from labkit.analysis.tables.validity_tables import failures_section
from labkit.records import Arm, RecordError

CELL = {
    "schema_version",
    "cell",
    "question",
    "arms",
    "design",
    "gates",
    "rows",
    "failures",
    "environment",
    "published",
    "scale",
}
ROW = {"case", "metric", "unit", "better", "primary", "skipped", "arms", "comparisons"}
ARM_ROW = {"median", "q1", "q3", "n", "runs"}
COMPARISON = {
    "arm",
    "baseline",
    "effect_pct",
    "ci_low_pct",
    "ci_high_pct",
    "level",
    "ci_raw_low_pct",
    "ci_raw_high_pct",
    "p",
    "p_adjusted",
    "p_floor",
    "mde_pct",
    "alpha_row",
    "sd",
    "wins",
    "blocks",
    "verdict",
    "reason",
}
DECODE = "decode, 64 reqs, ctx 128"


def comparison_of(cell, arm="seq_map", row=0):
    return next(c for c in cell["rows"][row]["comparisons"] if c["arm"] == arm)


def test_cell_json_has_the_documented_fields(make_cell):
    cell = analyse_cell(make_cell(skipped={"prefill, 8 × 512": "too large"}))
    assert set(cell) == CELL
    assert {"seed", "blocks", "runs_per_block", "order", "looks", "alpha", "margin_pct"} <= set(
        cell["design"]
    )
    assert [a["name"] for a in cell["arms"]] == ["binary_search", "seq_map", "control"]
    assert [a["role"] for a in cell["arms"]] == ["baseline", "arm", "control"]
    assert cell["arms"][1]["counters"]["resolver.seq_map"] == 5
    assert set(cell["gates"]) == {"healthy", "engaged", "identical"}
    for row in cell["rows"]:
        assert set(row) == ROW
        assert all(set(values) == ARM_ROW for values in row["arms"].values())
        assert all(set(c) == COMPARISON for c in row["comparisons"])
    assert cell["rows"][1]["skipped"] == "too large"
    assert cell["rows"][1]["metric"] == "dispatch_us"
    assert cell["rows"][1]["arms"]["seq_map"]["median"] is None
    json.dumps(cell, allow_nan=False)
    runs = cell["rows"][0]["arms"]["seq_map"]["runs"]
    assert len(runs) == 8 and runs[0]["file"].startswith("runs/b00-p")
    assert len(cell["design"]["order"]) == 4
    assert sorted(cell["design"]["order"][0]) == sorted(2 * ["binary_search", "seq_map", "control"])


def test_numbers_do_not_depend_on_a_cpu_s_last_bits(make_cell, monkeypatch):
    from labkit.analysis.comparison import observations

    path = make_cell()
    one = analyse_cell(path)
    log = np.log
    monkeypatch.setattr(observations.np, "log", lambda x: log(x) * (1 + 2.0**-51))
    assert json.dumps(analyse_cell(path)["rows"]) == json.dumps(one["rows"])


def test_a_sentence_looks_at_no_other_row(make_cell, monkeypatch):
    """1,000 rows took two seconds when every sentence looked for the blocks in all of them."""
    cell, seen = analyse_cell(make_cell()), []
    labels = verdict_sentences_module.relabellings
    monkeypatch.setattr(
        verdict_sentences_module, "relabellings", lambda *args: seen.append(args) or labels(*args)
    )
    assert len(verdict_sentences(Cell.from_json(cell), "bitwise")) > 1 and len(seen) == 1


@pytest.mark.parametrize("has_it", ["seq_map", "binary_search"])
def test_a_computed_value_that_an_arm_lacks_is_not_undecided(make_cell, has_it):
    """As the peak of KV memory of a server that does not report it."""

    def limit(record):
        if record.arm != has_it:
            return replace(record, cases=(replace(record.cases[0], metrics=()),))
        metric = replace(record.cases[0].metrics[0], name="ceiling_pct", unit="% of RAM",
                         better="higher", repeats=(60.0,))  # fmt: skip
        return replace(record, cases=(replace(record.cases[0], metrics=(metric,)),))

    cell = analyse_cell(make_cell(requests=True, claims=False, change=limit, control=False))
    (row,) = (row for row in cell["rows"] if row["metric"] == "ceiling_pct")
    assert [c["verdict"] for c in row["comparisons"]] == ["computed"]
    typed = next(one for one in Cell.from_json(cell).rows if one.metric == "ceiling_pct")
    phrases = verdict_sentences_module.cell_phrases(Cell.from_json(cell), "none")
    sentence = verdict_sentences_module.verdict_sentence(phrases, typed, typed.comparisons[0])
    assert sentence in (
        "seq_map: 60.0 % of RAM, binary_search has none (computed)",
        "seq_map: unknown (computed)",
    )


def test_a_planted_effect_is_named_with_its_interval(make_cell):
    cell = analyse_cell(make_cell(effects={"seq_map": 0.95}))
    c = comparison_of(cell)
    assert c["verdict"] == "better"
    assert c["ci_low_pct"] < -5.0 < c["ci_high_pct"] < 0
    assert c["p"] == pytest.approx(2 / 1296) == c["p_floor"]
    assert (c["wins"], c["blocks"]) == (4, 4)
    assert comparison_of(cell, "control")["verdict"] in ("equivalent", "trivial")
    line = verdict_sentences(Cell.from_json(cell), "bitwise")[0]
    assert (
        "seq_map takes 4.8 % less time per launch (adjusted 95 % CI 4.3 to 5.6 %, adjusted p = "
        "0.0015; " in line
    )
    assert line.endswith("alone 4.4 to 5.5 %, p = 0.0015 (exact); 4 blocks); outputs bit-identical")


def test_the_direction_of_better_decides_better_or_worse(make_cell):
    slower = analyse_cell(make_cell("a/x", effects={"seq_map": 1.05}))
    assert comparison_of(slower)["verdict"] == "worse" and comparison_of(slower)["effect_pct"] > 0
    serving = analyse_cell(make_cell("a/y", effects={"seq_map": 1.05}, requests=True))
    assert serving["rows"][0]["metric"] == "total_tok_s" and serving["rows"][0]["primary"]
    assert (
        comparison_of(serving)["verdict"] == "better" and comparison_of(serving)["effect_pct"] > 0
    )
    ttft = next(i for i, r in enumerate(serving["rows"]) if r["metric"] == "ttft_p50_ms")
    assert comparison_of(serving, row=ttft)["verdict"] == "better"
    assert comparison_of(serving, row=ttft)["effect_pct"] < 0


def test_no_effect_is_equivalent_with_its_bound(make_cell):
    cell = analyse_cell(make_cell(effects={"seq_map": 1.0}, noise=0.004))
    c = comparison_of(cell)
    assert c["verdict"] == "equivalent"
    assert c["reason"].startswith("any difference is within ±0.")
    assert (
        "equivalent: any difference is within ±0."
        in verdict_sentences(Cell.from_json(cell), "bitwise")[0]
    )


def test_a_small_but_certain_effect_is_trivial(make_cell):
    c = comparison_of(analyse_cell(make_cell(effects={"seq_map": 0.99}, noise=0.001)))
    assert c["verdict"] == "trivial" and c["p"] < 0.05


def test_noise_is_inconclusive_with_the_detectable_effect(make_cell):
    cell = analyse_cell(make_cell(effects={"seq_map": 1.0}, noise=0.04, margin_pct=2.0))
    c = comparison_of(cell)
    assert c["verdict"] == "inconclusive"
    assert f"smallest detectable effect: {c['mde_pct']:.1f} %; a new study of about" in c["reason"]
    # Both at the level that is left to the row.
    assert c["mde_pct"] == pytest.approx(mde_pct(c["sd"], 4, 2, c["alpha_row"]))
    target = target_effect_pct(c["effect_pct"])
    share = alpha_share(c["alpha_row"], 4, 2, 0.05)
    need = blocks_needed(c["sd"], 2, 0.05, target, share, degrees_of_freedom(4, 2))
    assert f"about {need} blocks would detect {abs(target):g} %" in c["reason"]
    assert (
        "inconclusive: smallest detectable effect"
        in verdict_sentences(Cell.from_json(cell), "bitwise")[0]
    )


def test_noise_beyond_the_margin_withholds_equivalence(make_cell):
    from labkit.analysis.comparison.arm_comparison import DecisionCriteria
    from labkit.analysis.comparison.verdict import judge
    from labkit.analysis.model.result_row import Comparison
    from labkit.analysis.statistics.equivalence_test import Equivalence

    criteria = DecisionCriteria(2, 0.05, 2.0)
    flat = Comparison("b", "a", 0.1, -1.0, 1.0, p=0.8, p_adjusted=0.8, p_floor=2 / 1296,
                      blocks=4, equivalence=Equivalence(0.01, 0.9))  # fmt: skip
    loud = replace(flat, ci_raw_low_pct=-3.0, ci_raw_high_pct=1.0)
    # Wider for there being other rows, which are not noise of this one.
    one_of_many = replace(flat, ci_low_pct=-3.0, ci_raw_low_pct=-1.5, ci_raw_high_pct=0.5)
    assert judge(flat, "lower", criteria, [], flat).word == "equivalent"
    assert judge(flat, "lower", criteria, [], one_of_many).word == "equivalent"
    withheld = judge(flat, "lower", criteria, [], loud)
    assert (withheld.word, withheld.reason) == ("inconclusive", "noise exceeds margin")
    certain = replace(flat, p=0.01, p_adjusted=0.01, ci_low_pct=0.02)
    assert judge(certain, "lower", criteria, [], flat).word == "trivial"
    assert judge(certain, "lower", criteria, [], loud).word == "inconclusive"
    far = replace(
        certain, effect_pct=9.0, ci_low_pct=8.0, ci_high_pct=9.9,
        equivalence=Equivalence(0.9, 9.9),
    )  # fmt: skip
    assert judge(far, "lower", criteria, [], loud).word == "worse"
    assert judge(far, "higher", criteria, [], None).word == "better"


@pytest.mark.parametrize(("blocks", "runs"), [(2, 2), (3, 1), (5, 1)])
def test_too_few_blocks_are_estimate_only_whatever_the_numbers(make_cell, blocks, runs):
    cell = analyse_cell(make_cell(blocks=blocks, runs=runs, effects={"seq_map": 0.5}))
    c = comparison_of(cell)
    assert c["verdict"] == "estimate_only" and c["effect_pct"] == pytest.approx(-50, abs=2)
    assert "estimate only" in verdict_sentences(Cell.from_json(cell), "bitwise")[0]
    assert any("estimate only" in line for line in caveats(analyse(make_cell(
        "again/x", blocks=blocks, runs=runs))))  # fmt: skip


def test_three_blocks_of_two_and_six_of_one_may_claim(make_cell):
    for name, blocks, runs in (("a", 3, 2), ("b", 6, 1)):
        cell = analyse_cell(make_cell(name, blocks=blocks, runs=runs, effects={"seq_map": 0.8}))
        assert comparison_of(cell)["verdict"] == "better"


def test_an_alpha_out_of_reach_claims_nothing(make_cell):
    c = comparison_of(analyse_cell(make_cell(alpha=0.001, effects={"seq_map": 0.5})))
    assert c["verdict"] == "estimate_only" and c["mde_pct"] is None and c["ci_low_pct"] is None
    assert "cannot reach p = 0.001" in c["reason"]


def test_vacuous_arm_is_invalid_and_named(make_cell):
    def zero(record):
        if record.arm == "seq_map" and record.block == 1:
            return replace(record, counters={**record.counters, "resolver.seq_map": 0.0})
        return record

    path = make_cell(change=zero)
    cell = analyse_cell(path)
    assert cell["gates"]["engaged"]["status"] == "fail"
    reason = cell["gates"]["engaged"]["reasons"][0]
    assert "seq_map" in reason and "resolver.seq_map is 0 in b01-" in reason
    c = comparison_of(cell)
    assert c["verdict"] == "invalid" and "vacuous" in c["reason"]
    assert cell["rows"][0]["arms"]["seq_map"]["median"] > 0
    assert comparison_of(cell, "control")["verdict"] != "invalid"
    assert exit_code(path.parent) == 1


def test_outcome_vacuous_counts_for_engaged_and_keeps_medians(make_cell):
    def vacuous(record):
        if record.arm != "seq_map":
            return record
        detail = "the claimed counter resolver.seq_map stayed 0"
        return replace(record, outcome="vacuous", detail=detail, counters={"engine.paged": 1.0})

    cell = analyse_cell(make_cell(change=vacuous))
    assert cell["gates"]["engaged"]["status"] == "fail"
    assert cell["gates"]["healthy"]["status"] == "pass"
    assert (
        comparison_of(cell)["verdict"] == "invalid" and "vacuous" in comparison_of(cell)["reason"]
    )
    assert cell["rows"][0]["arms"]["seq_map"]["n"] == 8
    assert len(cell["failures"]) == 8


def test_an_arm_without_claims_must_run_its_engine(make_cell):
    assert analyse_cell(make_cell("a/x", claims=False))["gates"]["engaged"] == {
        "status": "unclaimed",
        "reasons": [],
    }

    def other(record):
        return replace(record, counters={"engine.mlx_lm": 3.0})

    gate = analyse_cell(make_cell("a/y", claims=False, change=other))["gates"]["engaged"]
    assert gate["status"] == "fail" and "engine.paged is 0" in gate["reasons"][0]


def test_a_claim_on_the_engine_alone_is_a_claim():
    arms = (Arm("x", "baseline", {}, {"engine": {"name": "mlx_lm"}}, "none", ("engine.mlx_lm",)),)
    ran = SimpleNamespace(arm="x", run="r", outcome="ok", counters={"engine.mlx_lm": 1.0})
    assert validity_gates.engaged([ran], arms).status == "pass"


@pytest.mark.parametrize("role", ["arm", "control"])
def test_an_arm_that_never_ran_passes_no_gate(role):
    arms = tuple(
        Arm(name, role, {}, {"engine": {"name": "paged"}}, "tokens", ("kernel.tiled",))
        for name, role in (("x", "baseline"), ("y", role))
    )
    counters = {"engine.paged": 1.0, "kernel.tiled": 1.0}
    outputs = (SimpleNamespace(outputs={}, notes={}),)
    ran = SimpleNamespace(
        arm="x", run="b0-x", outcome="ok", ok=True, counters=counters, cases=outputs
    )
    failed = SimpleNamespace(
        arm="y", run="b0-y", outcome="crashed", ok=False, counters={}, cases=()
    )
    report = SimpleNamespace(reference="b0-x", differences=(), agreement=())
    for gate in (
        validity_gates.engaged([ran, failed], arms),
        validity_gates.identical(report, arms, [ran, failed], 0.05),
    ):
        assert gate.status == "fail" and gate.reasons == ["y has no successful run"]


def test_the_run_that_failed_is_named_and_not_those_in_its_process():
    def run(name, arm, notes):
        return SimpleNamespace(
            run=name, arm=arm, outcome="crashed", detail="KeyError: 'x' (mine.py:3)",
            known_notes=notes, environment={}, environment_end={}, counters={}, block=0,
    )  # fmt: skip

    records = [
        run("b00-p00-base", "base", {"failed_by": "b00-p01-mine", "log": "runs/b00-p00-base.log"}),
        run("b00-p01-mine", "mine", {"log": "runs/b00-p00-base.log"}),
        run("b00-p02-control", "control", {"failed_by": "b00-p01-mine"}),
    ]
    gate = validity_gates.healthy(records)
    assert gate.reasons == [
        "b00-p01-mine: crashed: KeyError: 'x' (mine.py:3); this ended the runs of base, control "
        "in the same process; log: runs/b00-p00-base.log"
    ]
    assert gate.cause("base") == "run b00-p01-mine failed (crashed)"
    assert (
        len(validity_gates.healthy(records[:1]).reasons) == 1
    )  # without the other's record it is named


def test_failed_run_fails_health_its_block_and_every_verdict(make_cell):
    def crash(record):
        if record.block == 2 and record.arm == "seq_map":
            return replace(record, outcome="crashed", detail="SIGSEGV", cases=(), counters={})
        return record

    path = make_cell(change=crash)
    cell = analyse_cell(path)
    assert cell["gates"]["healthy"]["status"] == "fail"
    assert "crashed: SIGSEGV" in cell["gates"]["healthy"]["reasons"][0]
    c = comparison_of(cell)
    assert c["verdict"] == "invalid" and c["blocks"] == 3 and c["effect_pct"] is not None
    assert comparison_of(cell, "control")["verdict"] == "invalid"
    assert [f["outcome"] for f in cell["failures"]] == ["crashed", "crashed"]
    assert cell["gates"]["engaged"]["status"] == "pass"
    assert exit_code(path.parent) == 1


def test_swap_growth_and_a_changed_host_fail_health(make_cell):
    def swapping(record):
        return replace(
            record,
            environment={**record.environment, "swap": {"used_bytes": 0}},
            environment_end={"swap": {"used_bytes": 1 << 30}},
        )

    gate = analyse_cell(make_cell("a/x", change=swapping))["gates"]["healthy"]
    assert gate["status"] == "fail" and "swap grew by 1024 MiB" in gate["reasons"][0]

    def moved(record):
        return replace(record, environment={"host": "h1" if record.block else "h0"})

    gate = analyse_cell(make_cell("a/y", change=moved))["gates"]["healthy"]
    assert gate["status"] == "fail" and "different hosts" in gate["reasons"][0]


def test_an_unfinished_cell_is_analysed_with_a_caveat_and_exits_1(make_cell):
    path = make_cell(change=lambda r: None if r.block == 3 and r.position > 2 else r)
    cell = analyse_cell(path)
    assert comparison_of(cell)["blocks"] == 3
    assert any("3 of 4 blocks" in line for line in caveats(analyse(path)))
    assert exit_code(path.parent) == 1


def test_a_cell_without_runs_fails_the_healthy_gate(make_cell):
    path = make_cell(change=lambda r: None)
    cell = analyse_cell(path)
    assert cell["rows"] == [] and cell["gates"]["healthy"]["status"] == "fail"
    assert exit_code(path.parent) == 1
    write_study(path.parent, plots=False)


def test_good_study_exits_0_whatever_the_verdicts(make_cell):
    make_cell("s/a", effects={"seq_map": 1.1})
    path = make_cell("s/b", effects={"seq_map": 1.0}, noise=0.05)
    assert exit_code(path.parent) == 0


def test_an_even_count_of_repeats_gives_the_geometric_middle(make_cell):
    odd = analyse_cell(make_cell("a/odd", repeats=3, noise=0.0, effects={"seq_map": 1.0}))
    even = analyse_cell(make_cell("a/even", repeats=2, noise=0.0, effects={"seq_map": 1.0}))
    assert odd["rows"][0]["arms"]["seq_map"]["median"] == 322.6 * 1.001
    assert even["rows"][0]["arms"]["seq_map"]["median"] == pytest.approx(
        322.6 * (1.0 * 1.001) ** 0.5
    )


def test_values_without_a_logarithm_are_inconclusive(make_cell):
    def zero(record):
        case = record.cases[0]
        metric = replace(case.metrics[0], repeats=(0.0,))
        return replace(record, cases=(replace(case, metrics=(metric,)), record.cases[1]))

    cell = analyse_cell(make_cell(change=zero))
    assert (
        comparison_of(cell)["verdict"] == "inconclusive"
        and comparison_of(cell)["effect_pct"] is None
    )
    assert comparison_of(cell, row=1)["verdict"] == "better"


def test_each_of_several_arms_is_compared_with_the_baseline(make_cell):
    cell = analyse_cell(make_cell(effects={"seq_map": 0.9, "identity": 1.1, "third": 1.0}))
    words = {c["arm"]: c["verdict"] for c in cell["rows"][0]["comparisons"]}
    assert words["seq_map"] == "better" and words["identity"] == "worse"
    assert all(c["baseline"] == "binary_search" for c in cell["rows"][0]["comparisons"])
    c = comparison_of(cell)
    assert c["p_adjusted"] == pytest.approx(3 * c["p"])


def test_a_look_s_interval_uses_its_own_alpha(make_cell):
    looks = [{"blocks": 4, "alpha": 0.01}, {"blocks": 8, "alpha": 0.04}]
    wide = comparison_of(analyse_cell(make_cell("a/x", looks=looks)))
    narrow = comparison_of(analyse_cell(make_cell("a/y")))
    assert wide["ci_low_pct"] < narrow["ci_low_pct"]
    early = comparison_of(analyse_cell(make_cell("a/z", blocks=3, looks=looks)))
    assert early["verdict"] == "estimate_only"


def test_a_broken_record_is_refused_by_name(make_cell):
    path = make_cell()
    record = sorted((path / "runs").glob("*.json"))[3]
    record.write_text(record.read_text()[:100])
    with pytest.raises(RecordError, match=record.name):
        analyse_cell(path)


def test_load_gives_a_frame_of_runs(make_cell):
    path = make_cell(skipped={"prefill, 8 × 512": "too large"})
    frame = load(path.parent)
    values = frame[frame.metric == "dispatch_us"]
    assert len(values) == 24 and set(values.arm) == {"binary_search", "seq_map", "control"}
    assert (frame[frame.case == "prefill, 8 × 512"].skipped == "too large").all()
    median = analyse_cell(path)["rows"][0]["arms"]["seq_map"]["median"]
    assert values[values.arm == "seq_map"].value.median() == pytest.approx(median)
    assert len(load(path)) == len(frame)


def test_the_question_s_metrics_are_primary_and_one_family(make_cell):
    alone = analyse(make_cell("a/x", requests=True))
    assert [row.metric for row in alone.rows if row.primary] == ["total_tok_s"]
    asked = analyse(make_cell("b/x", requests=True, metrics=["ttft_p50_ms", "output_tok_s"]))
    assert [row.metric for row in asked.rows if row.primary] == ["ttft_p50_ms", "output_tok_s"]
    assert [row.metric for row in asked.cell.rows][:2] == ["ttft_p50_ms", "output_tok_s"]
    one, both = (
        next(c for r, c in zip(a.rows, a.comparisons, strict=True) if r.metric == "output_tok_s")
        for a in (analyse(make_cell("c/x", requests=True, metrics=["output_tok_s"])), asked)
    )
    assert one["seq_map"].alpha_row > both["seq_map"].alpha_row, "two metrics share alpha"


def test_failed_runs_that_are_alike_are_one_line_and_those_lost_are_one_note():
    def failure(block, position, arm, **more):
        run = f"b{block:02d}-p{position:02d}-{arm}"
        return {"run": run, "outcome": "crashed", "detail": "KeyError: 'x' (mine.py:3)", **more}

    failures = []
    for block in range(5):
        mine = failure(block, 1, "mine", log=f"runs/b{block:02d}-p00-base.log")
        lost = [failure(block, p, arm, failed_by=mine["run"]) for p, arm in ((0, "base"), (2, "c"))]
        failures += [lost[0], mine, lost[1]]

    def shown(failures):
        return section_table(failures_section, planted_cell(failures=failures), record_folder="")

    table = shown(failures)
    assert [table.cells(line) for line in table.lines] == [
        [
            "mine",
            "b00-p01-mine and 4 more",
            "crashed",
            "KeyError: 'x' (mine.py:3)",
            "runs/b00-p00-base.log",
        ]
    ]
    (note,) = table.notes
    assert note.startswith("Also lost, because they shared its process: b00-p00-base, b00-p02-c, ")
    assert note.endswith("and 4 more.")
    orphan = shown(failures[:1])  # the record of the culprit is missing
    assert len(orphan.lines) == 1 and orphan.notes == ()


def test_a_study_in_which_nothing_was_measured_shows_no_empty_table_or_legend(make_cell):
    def crash(record):
        notes = {} if record.arm == "seq_map" else {"failed_by": "another run"}
        return replace(
            record, outcome="crashed", detail="SIGKILL: gone", cases=(), counters={}, notes=notes
        )

    path = make_cell(change=crash)
    write_study(path.parent, plots=False)
    page = (path.parent / "report.html").read_text()
    text = (path.parent / "report.md").read_text()
    printed = Console(file=io.StringIO(), width=100)
    print_cell(path, printed)
    assert "nothing was measured, because seq_map failed" in page
    assert 'class="gate pass"' not in page and 'class="arms"' not in page
    assert not re.search(r"<tbody>\s*</table>", page) and "<h3>Tests by row</h3></div>" not in page
    assert not re.search(r"\| [-: |]+ \|\n\n", text)
    assert "verdict" not in printed.file.getvalue().split("!")[0]
