"""The headline for every mix of verdicts."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from labkit.analysis.comparison.arm_comparison import ArmComparison
from labkit.analysis.comparison.cell_analysis import CellData, JudgedComparison, analyse
from labkit.analysis.comparison.gates import Gate
from labkit.analysis.comparison.observations import MetricRow, RunValue
from labkit.analysis.comparison.verdict import Verdict
from labkit.analysis.findings.headline import headline
from labkit.records import Arm

PASSED = Gate("pass")
DETECTABLE = "smallest detectable effect: 6.8 %"


def arm(name, role="arm", device="cpu"):
    config = {"engine": {"attention": {"device": device}}}
    return Arm(name=name, role=role, overrides={}, config=config, identity="none", engaged=())


def cell(
    *rows, arms=("map",), unit="us", metrics=("dispatch_us",), device="cpu", skipped=(),
    healthy=PASSED,
):  # fmt: skip
    """Return an analysis of rows ``(name, {arm: (verdict, effect, interval or MDE)})``."""
    built, judged = [], []
    for i, (name, results) in enumerate(rows):
        better = "higher" if unit == "tok/s" else "lower"
        built.append(MetricRow(name, metrics[i % len(metrics)], unit, better, True))
        for arm_name, (word, effect, interval_or_mde, *reason) in results.items():
            interval = interval_or_mde if isinstance(interval_or_mde, tuple) else None
            comparison = ArmComparison(arm_name, "search", effect, interval, blocks=4,
                               mde_pct=None if interval else interval_or_mde)  # fmt: skip
            judged.append(JudgedComparison(i, built[-1], comparison, Verdict(word, *reason)))
    for name in skipped:
        built.append(MetricRow(name, "dispatch_us", unit, "lower", True, "too large"))
    everyone = (arm("search", "baseline", device), *(arm(a, device=device) for a in arms),
                arm("control", "control", device))  # fmt: skip
    data = CellData(Path("cell"), {}, everyone, ())
    gates = {"healthy": healthy}
    return SimpleNamespace(data=data, rows=built, judged=judged, gates=gates)


def flat(effect=0.1, low=-0.5, high=1.2, word="equivalent"):
    return {"map": (word, effect, (low, high))}


def faster(effect=-4.1, low=-5.0, high=-3.2):
    return {"map": ("faster" if effect < 0 else "slower", effect, (low, high))}


def unseen(mde, reason=DETECTABLE):
    return {"map": ("inconclusive", -3.0, mde, reason)}


SENTENCES = {
    "all flat: the largest bound of all rows": (
        cell(("a", flat()), ("b", flat(-0.3, -0.9, 0.4, "trivial"))),
        "On this machine map differs from search by at most 1.2 %.",
    ),
    "flat but for one": (
        cell(("a", flat()), ("b", flat()), ("prefill, 8 × 512", faster())),
        "On this machine map differs from search by at most 1.2 %, except in prefill, 8 × 512 "
        "(4.1 % faster).",
    ),
    "flat but for two, the larger first": (
        cell(("a", flat()), ("b", flat()), ("c", faster()), ("d", faster(6.0, 5.0, 7.0))),
        "On this machine map differs from search by at most 1.2 %, except in d (6.0 % slower) and "
        "c (4.1 % faster).",
    ),
    "flat but for one, one open": (
        cell(("a", flat()), ("b", flat()), ("c", faster(1.0, 0.5, 1.5)), ("d", unseen(6.8))),
        "On this machine map differs from search by at most 1.2 % in 2 of 4 rows; it differs more "
        "in c (1.0 % slower); not decided in 1 row (d); the smallest detectable effect is 6.8 %.",
    ),
    "many exceptions are counted": (
        cell(*((f"f{i}", flat()) for i in range(4)),
             *((f"m{i}", faster(-3.0 - i, -9.0, -2.0)) for i in range(4))),
        "On this machine map differs from search by at most 1.2 %, except in 4 rows (6.0 % faster "
        "(m3) to 3.0 % faster (m0)).",
    ),
    "all moved one way": (
        cell(("a", faster()), ("b", faster(-8.0, -9.0, -7.0)), ("c", faster(-6.0, -7.0, -5.0))),
        "On this machine map is faster than search in all 3 rows, by 4.1 to 8.0 %.",
    ),
    "both ways": (
        cell(("a", faster()), ("b", faster(-8.0, -9.0, -7.0)), ("c", faster(2.5, 2.1, 3.0))),
        "On this machine map is faster than search in 2 of 3 rows (a and b), by 4.1 to 8.0 % and "
        "slower in 1 of 3 rows (c), by 2.5 %.",
    ),
    "more moved than flat, one open": (
        cell(("a", faster()), ("b", faster()), ("c", flat()), ("d", unseen(6.8))),
        "On this machine map is faster than search in 2 of 4 rows (a and b), by 4.1 % and differs "
        "by at most 1.2 % in 1 of 4 rows; not decided in 1 row (d); the smallest detectable "
        "effect is 6.8 %.",
    ),
    "flat, open and invalid": (
        cell(("a", flat()), ("b", unseen(6.8)), ("c", unseen(35.9)),
             ("d", {"map": ("invalid", -1.0, 3.0, "outputs differ: case 'd'")})),
        "On this machine map differs from search by at most 1.2 % in 1 of 4 rows; not decided in "
        "2 rows (b; c); the smallest detectable effect is 6.8 % (b) to 35.9 % (c); invalid in 1 "
        "row (d): outputs differ: case 'd'.",
    ),
    "nothing decided": (
        cell(("a", unseen(6.8)), ("b", unseen(35.9)), ("c", unseen(9.0))),
        "Not decided: whether map differs from search in any of 3 rows; the smallest detectable "
        "effect is 6.8 % (a) to 35.9 % (b).",
    ),
    "noise withholds what looks flat": (
        cell(("a", unseen(1.5, "noise exceeds margin"))),
        "Not decided: whether map differs from search in a; the smallest detectable effect is 1.5 "
        "%.",
    ),
    "an estimate has its reason and no claim": (
        cell(("a", {"map": ("estimate_only", -50.2, None, "2 blocks of 2: a claim needs 3")}),
             ("b", {"map": ("estimate_only", 3.0, None, "2 blocks of 2: a claim needs 3")})),
        "Estimate only (2 blocks of 2: a claim needs 3): against search, map is 50.2 % faster (a) "
        "to 3.0 % slower (b).",
    ),
    "an estimate beside an invalid arm": (
        cell(("a", {"map": ("estimate_only", -9.0, None, "2 blocks of 2: a claim needs 3"),
                    "plan": ("invalid", -1.0, 3.0, "vacuous")}), arms=("map", "plan")),
        "Estimate only (2 blocks of 2: a claim needs 3): against search, map is 9.0 % faster (a); "
        "plan is invalid: vacuous.",
    ),
    "a grown study is exploratory": (
        cell(("a", {"map": ("estimate_only", -9.0, None, "exploratory: blocks were added")})),
        "Estimate only (exploratory: blocks were added): against search, map is 9.0 % faster (a).",
    ),
    "invalid in every row": (
        cell(*((n, {"map": ("invalid", -9.0, 3.0, "vacuous: resolver.map stayed 0")})
               for n in "ab")),
        "No answer: map is invalid: vacuous: resolver.map stayed 0.",
    ),
    "invalid and open": (
        cell(("a", {"map": ("invalid", -9.0, 3.0, "vacuous"), "plan": ("inconclusive", 1.0, 4.0)}),
             arms=("map", "plan")),
        "Not decided: whether plan differs from search in a; the smallest detectable effect is "
        "4.0 %; map: invalid: vacuous.",
    ),
    "several arms": (
        cell(("a", {"map": ("faster", -9.0, (-10.0, -8.0)),
                    "plan": ("equivalent", 0.1, (-1.0, 1.0)),
                    "grid": ("inconclusive", 1.0, 4.0, DETECTABLE)}),
             ("b", {"map": ("faster", -7.0, (-8.0, -6.0)), "plan": ("trivial", 0.5, (0.1, 0.9)),
                    "grid": ("inconclusive", 1.0, 5.5, DETECTABLE)}), arms=("map", "plan", "grid")),
        "On this machine, against search: map is faster in both rows, by 7.0 to 9.0 %; plan "
        "differs by at most 1.0 %; grid is not decided; the smallest detectable effect is 4.0 % "
        "(a) to 5.5 % (b).",
    ),
    "several arms, none decided": (
        cell(("a", {"map": ("inconclusive", 1.0, 4.0), "plan": ("inconclusive", 1.0, 3.0)}),
             arms=("map", "plan")),
        "Not decided: whether map or plan differ from search in a; the smallest detectable effect "
        "is 3.0 % to 4.0 %.",
    ),
    "requests: one row of all, with its interval": (
        cell(("all", {"map": ("faster", 3.0, (1.9, 4.2))}), unit="tok/s",
             metrics=("total_tok_s",)),
        "On this machine map is 3.0 % faster than search (total_tok_s, 1.9 to 4.2 %).",
    ),
    "bytes are more or less": (
        cell(("all", {"map": ("faster", -30.0, (-31.0, -29.0))}), unit="bytes",
             metrics=("peak_kv_bytes",)),
        "On this machine map has less peak KV memory than search, by 30.0 % (29.0 to 31.0 %).",
    ),
    "several metrics are named": (
        cell(("a", flat()), ("a", flat()), ("a", faster()),
             metrics=("x_us", "y_us", "z_us")),
        "On this machine map differs from search by at most 1.2 % in x_us; it differs by at most "
        "1.2 % in y_us; it is 4.1 % faster (a: z_us, 3.2 to 5.0 %).",
    ),
    "what was not measured is named": (
        cell(("a", flat()), skipped=("huge",)),
        "On this machine map differs from search by at most 1.2 %; not measured: huge.",
    ),
    "nothing was measured": (
        cell(skipped=("huge",)),
        "No answer: nothing was measured for map and search; not measured: huge.",
    ),
    "nothing was measured, since a run failed": (
        cell(healthy=Gate("fail", [], {None: "run b00-p01-map failed (crashed)"})),
        "No answer: nothing was measured for map and search, because run b00-p01-map failed "
        "(crashed).",
    ),
    "the emulator says so": (
        cell(("a", flat()), device="emulated"),
        "In the emulator map differs from search by at most 1.2 %.",
    ),
    "no arm: the same twice": (
        cell(("a", {"control": ("inconclusive", -14.3, 30.0, DETECTABLE)}), arms=()),
        "No arms to compare: two identical copies of search measured up to −14.3% apart (a); the "
        "smallest detectable effect is 30.0 %.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SENTENCES)
def test_every_mix_of_verdicts_has_its_sentence(case):
    parts, expected = SENTENCES[case]
    assert headline(parts) == expected


def test_the_headline_names_the_analysed_and_the_skipped_rows(make_cell):
    sentence = headline(
        analyse(make_cell(effects={"seq_map": 0.9}, skipped={"prefill, 8 × 512": "big"}))
    )
    assert sentence.startswith("On this machine seq_map is ")
    assert (
        sentence.endswith("not measured: prefill, 8 × 512.")
        and "faster than binary_search" in sentence
    )
    served = headline(analyse(make_cell("b/x", effects={"seq_map": 1.1}, requests=True)))
    assert "faster than binary_search (total_tok_s, " in served
    few = headline(analyse(make_cell("c/x", blocks=2)))
    assert few.startswith("Estimate only (2 blocks of 2: a claim needs at least 3): against ")


OPEN_LOOP = {  # metric: unit, direction, the baseline's value, the effect in percent
    "e2e_p50_ms": ("ms", "lower", 240.0, 112.0),
    "goodput_req_s": ("req/s", "higher", 2.0, -16.5),
    "total_tok_s": ("tok/s", "higher", 100.0, -6.4),
}


def served(*metrics, word=None):
    """Return an analysis of requests with an arm ``slow`` beside ``fast``; a row per metric."""
    rows, judged = [], []
    for i, name in enumerate(metrics):
        unit, better, base, effect = OPEN_LOOP[name]
        row = MetricRow("all", name, unit, better, True)
        row.arms["fast"] = [RunValue(0, 0, "runs/x.json", base)]
        rows.append(row)
        comparison = ArmComparison("slow", "fast", effect, (effect - 1, effect + 1), blocks=8)
        verdict = word or ("faster" if (effect > 0) == (better == "higher") else "slower")
        judged.append(JudgedComparison(i, row, comparison, Verdict(verdict, "too few blocks")))
    data = CellData(Path("cell"), {"design": {"metrics": list(metrics)}},
                    (arm("fast", "baseline"), arm("slow")), ())  # fmt: skip
    return SimpleNamespace(data=data, rows=rows, judged=judged)


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        (
            ["e2e_p50_ms"],
            "On this machine slow has a higher end-to-end latency (median) than fast, by 268.8 ms "
            "(112 %, 111 to 113 %).",
        ),
        (
            ["goodput_req_s"],
            "On this machine slow has a lower goodput than fast, by 16.5 % (15.5 to 17.5 %).",
        ),
        (
            ["total_tok_s", "e2e_p50_ms"],
            "On this machine slow is 6.4 % slower than fast (total_tok_s, 5.4 to 7.4 %); it has a "
            "higher end-to-end latency (median), by 268.8 ms (112 %, 111 to 113 %).",
        ),
    ],
)
def test_only_speed_is_faster_or_slower(metrics, sentence):
    assert headline(served(*metrics)) == sentence


def test_an_estimate_of_a_latency_is_in_milliseconds():
    assert headline(served("e2e_p50_ms", "total_tok_s", word="estimate_only")) == (
        "Estimate only (too few blocks): against fast, slow is 268.8 ms (112 %) higher "
        "(e2e_p50_ms), 6.4 % slower (total_tok_s)."
    )


def computed(rows, metric, unit, better="lower"):
    """Return an analysis of computed rows ``{case: {arm: value}}``."""
    built, judged = [], []
    for i, (case, values) in enumerate(rows.items()):
        row = MetricRow(case, metric, unit, better, True)
        row.arms |= {name: [RunValue(0, 0, "runs/x.json", v)] for name, v in values.items()}
        built.append(row)
        base, *others = values
        judged += [
            JudgedComparison(i, row, ArmComparison(name, base, blocks=1), Verdict("computed"))
            for name in others
        ]
    data = CellData(Path("cell"), {}, (arm(base, "baseline"), *map(arm, others)), ())
    return SimpleNamespace(data=data, rows=built, judged=judged)


def test_what_is_computed_is_given_as_it_is():
    padding = {"all": {"padded": 59.9, "contiguous": 9.7, "paged": 0.8, "fused": 0.8}}
    assert headline(computed(padding, "kv_waste_pct", "%")) == (
        "Wasted KV memory (computed): padded 59.9 %, contiguous 9.7 % (50.2 points less), paged "
        "0.8 % (59.1 points less), fused 0.8 % (59.1 points less)."
    )
    taken = {"all": {"auto": 58.0, "vllm": 90.0, "other": 58.0}}
    assert headline(computed(taken, "taken_pct", "% of RAM")) == (
        "Memory taken (computed): auto 58.0 % of RAM, vllm 90.0 % of RAM (32.0 points more), "
        "other 58.0 % of RAM (the same)."
    )
    steps = {
        "a": {"static": 199.0, "continuous": 10.0},
        "b": {"static": 199.0, "continuous": 199.0},
    }
    assert headline(computed(steps, "row_steps", "steps")) == (
        "Number of steps of a row (computed), against static: continuous 189 steps "
        "(95.0 %) lower (a), the same (b)."
    )
    uncounted = computed(padding, "kv_waste_pct", "%")
    del uncounted.rows[0].arms["fused"]
    last = uncounted.judged[-1]
    uncounted.judged[-1] = replace(last, verdict=Verdict("inconclusive", "no complete block"))
    assert headline(uncounted).endswith("paged 0.8 % (59.1 points less), fused unknown.")


def test_a_computed_metric_gets_no_test_and_what_varies_does(make_cell):
    analysis = analyse(make_cell("d/x", requests=True, metrics=["peak_kv_bytes"]))
    assert analysis.data.metrics == ("peak_kv_bytes",) and analysis.all_computed
    assert headline(analysis) == (
        "Peak KV memory (computed): binary_search 16 MiB, seq_map 16 MiB (the same)."
    )
    row = next(r for r in analysis.json["rows"] if r["metric"] == "peak_kv_bytes")
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
    assert not varied.all_computed and "computed" not in headline(varied)


def test_a_question_about_outputs_is_answered_by_the_gate(make_cell):
    same = headline(analyse(make_cell("f/x", requests=True, metrics=["outputs"])))
    assert same == "The outputs of seq_map are bit-identical to those of binary_search."

    def differ(record):
        case = record.cases[0]
        first, *rest = case.outputs["requests"]
        if record.arm != "seq_map":
            return record
        requests = [{**first, "tokens": [99, *first["tokens"][1:]]}, *rest]
        changed = {**case.outputs, "digest": "0" * 64, "requests": requests}
        return replace(record, cases=(replace(case, outputs=changed),))

    other = headline(analyse(make_cell("g/x", requests=True, metrics=["outputs"], change=differ)))
    assert other.startswith("The outputs are not as claimed (bitwise): ")
    assert other.endswith("(seq_map: 1 of 8 differ).")


def test_a_metric_that_no_run_gives_is_named(make_cell):
    sentence = headline(analyse(make_cell("h/x", requests=True, metrics=["kv_waste_pct"])))
    assert sentence == (
        "No answer: nothing was measured for seq_map and binary_search; not measured: kv_waste_pct."
    )
