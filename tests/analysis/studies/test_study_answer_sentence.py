"""The answer of a study with several cells, in at most 20 words."""

from dataclasses import replace

import pytest

from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.findings.cell_findings import Findings, OutputsFinding, merge_findings
from labkit.analysis.findings.short_answer import short_answer
from labkit.analysis.model.cell_model import BestInRow
from labkit.analysis.pages.study_overview import machine_overviews
from labkit.analysis.studies.cell_summary import cell_summary
from labkit.analysis.studies.study_answer_sentence import study_answer
from labkit.records import Metric


def read(path):
    return cell_summary(analyse(path))


def cells_of(make_cell, **options):
    return [read(make_cell(f"study/seed={n}", **options)) for n in (1, 2)]


def test_equal_answers_are_said_once(make_cell):
    both = cells_of(make_cell, blocks=8)
    alone = short_answer(both[0].findings)
    assert short_answer(both[1].findings) == alone
    assert study_answer(both) == f"{alone.rstrip('.')}, in all 2 cells."


def test_cells_that_compare_the_same_arms_have_one_answer_with_its_size(make_cell):
    """It was "faster in all 3 cells" and "mixed in all 6"."""
    effects = ({"seq_map": 0.8}, {"seq_map": 0.5}, {"seq_map": 1.25})
    cells = [
        read(make_cell(f"study/seed={n}", effects=e, cases=("one",), noise=0.0005))
        for n, e in enumerate(effects)
    ]
    assert study_answer(cells[:2]) == (
        "Seq map takes 20.0 to 50.0 % less time per launch than binary search in both cells."
    )
    assert study_answer(cells) == (
        "Seq map takes 50.0 % less (seed=1) to 25.0 % more (seed=2) time per launch than binary "
        "search."
    )
    cells[0] = read(make_cell("study/seed=9", effects=effects[0], cases=("one",), blocks=2))
    assert study_answer(cells[:2]) == (
        "Seq map takes 50.0 % less time per launch than binary search in 1 of 2 cells; 1 undecided."
    )


def test_several_arms_in_several_cells_have_their_ranges(make_cell):
    cells = [
        read(make_cell(f"study/seed={n}", effects=e, claims=False, cases=("one",), noise=0.0005))
        for n, e in enumerate(({"a": 0.5, "b": 1.0}, {"a": 0.4, "b": 1.5}))
    ]
    expected = "A takes 50.0 to 60.0 % less time than binary search, b 50.0 % more (1 of 2 cells)."
    assert study_answer(cells) == expected
    rows = [
        read(make_cell(f"rows/seed={n}", effects=e, claims=False, noise=0.0005))
        for n, e in enumerate(({"a": 0.5, "b": 0.9, "c": 0.8}, {"a": 0.4, "b": 1.2, "c": 1.5}))
    ]
    words = study_answer(rows).partition("; others ")
    assert words[0].startswith("A takes 50.0 to 60.") and "more" not in words[0]
    assert words[2].startswith("20.") and words[2].endswith(" % more.")


def test_sweeps_and_outputs_are_counted_in_their_own_words(make_cell):
    """No setting of a sweep is "better" than a baseline, and outputs that differ are an answer."""
    cells = cells_of(make_cell, blocks=2)

    def answer(*findings):
        pairs = zip(cells, findings, strict=True)
        return study_answer([replace(cell, findings=own) for cell, own in pairs])

    best = {"metric": "total_tok_s", "unit": "tok/s", "better": "higher", "effect_pct": 5.0}
    best |= {"ci_low_pct": 4.0, "ci_high_pct": 6.0, "level": 0.95}
    sweeps = (
        Findings(("b", "c"), "a", num_settings=3, best=(BestInRow(
            "all", **best, values={"a": 100.0, arm: 105.0}, best=arm, reference="a",
            possibly_best=(arm,),
        ),)) for arm in "bc"
    )  # fmt: skip
    assert answer(*sweeps).startswith("Best setting known in 2 of 2 cells. At seed=1: best is b")
    outputs = (
        Findings(("b",), "a", outputs=OutputsFinding("tokens", status, "", {}))
        for status in ("pass", "fail")
    )
    assert answer(*outputs) == "B against a: as claimed at seed=1; not as claimed at seed=2."


def test_an_invalid_cell_is_counted(make_cell):
    def fail(record):
        return replace(record, outcome="oom", detail="no room", cases=())

    cells = [
        read(make_cell(f"study/seed={n}", cases=("one",), blocks=8, noise=0.0005,
                          change=change))
        for n, change in enumerate((None, lambda r: fail(r) if r.arm == "seq_map" else r))
    ]  # fmt: skip
    assert study_answer(cells) == (
        "Seq map takes 5.0 % less time per launch than binary search in 1 of 2 cells; 1 invalid."
    )


def test_cells_of_different_metrics_show_the_answer_of_a_decided_one(make_cell):
    def in_other_units(record):
        cases = tuple(
            replace(c, metrics=tuple(replace(m, name="decode_ms", unit="ms") for m in c.metrics))
            for c in record.cases
        )
        return replace(record, cases=cases)

    cells = [
        read(make_cell(f"study/seed={n}", cases=("one",), blocks=blocks, effects={"a": 0.5},
                          claims=False, change=change, noise=0.0005))
        for n, (blocks, change) in enumerate(((2, None), (8, in_other_units)))
    ]  # fmt: skip
    answer = study_answer(cells)
    assert answer.startswith("Estimate only in 1 and better in 1 of 2 cells. At seed=1: a takes ")


@pytest.mark.parametrize(
    ("pairs", "answer"),
    [
        (((40.0, 0.0), (40.0, 20.0)), "wastes 50.0 to 100 % less of its KV memory than binary se"),
        (((0.0, 12.0), (0.0, 30.0)), "wastes 12.0 to 30.0 points more of its KV memory than bin"),
        (((0.0, 12.0), (5.0, 5.0)), "wastes up to 12.0 points more of its KV memory than binar"),
        (((0.0, 12.0), (5.0, 6.0)), "wastes 20.0 % and 12.0 points more of its KV memory than "),
    ],
)
def test_a_computed_value_of_0_is_no_missing_effect(make_cell, pairs, answer):
    """One that fell to 0 was told as no difference: "up to 50.0 % less"."""

    def wasting(base, own):
        def change(record):
            waste = own if record.arm == "seq_map" else base
            metrics = (Metric("kv_waste_pct", "%", "lower", True, (waste,)),)
            cases = tuple(replace(case, metrics=metrics) for case in record.cases)
            return replace(record, cases=cases)

        return change

    cells = [
        read(make_cell(f"study/seed={n}", cases=("one",), change=wasting(*pair)))
        for n, pair in enumerate(pairs)
    ]
    text = short_answer(merge_findings([cell.findings for cell in cells], ["a", "b"]))
    assert text.startswith(f"Seq map {answer}") and text.endswith(" in both cells.")


def at_rate(under_load, rate, good, host="abc", workload="chat"):
    """Return a cell in whose runs ``good`` of 50 requests, arriving at a rate, were in time."""
    cell = read(under_load(f"study/{workload}={rate}", rate, good))
    (one,) = cell.capacities
    return replace(
        cell,
        overrides=(f"workload.arrivals.rate={rate}", f"workload={workload}"),
        entry=replace(cell.entry, machine=f"host {host}, 2 cores"),
        capacities=(replace(one, rest=workload),),
    )


def test_no_capacity_joins_two_machines(under_load):
    """The title said "sustains 2 requests/s, not 4", above two capacities."""
    loads = [(1, 50, "abc"), (2, 50, "abc"), (4, 10, "def"), (8, 10, "def")]
    cells = [at_rate(under_load, *load) for load in loads]
    assert study_answer(cells) == (
        "Binary search on host abc sustains 2 requests/s; binary search on host def does not "
        "sustain 4 requests/s."
    )
    together = [replace(cell, entry=replace(cell.entry, machine="any host")) for cell in cells]
    assert study_answer(together) == "Binary search sustains 2 requests/s, not 4."


def test_capacities_of_one_arm_are_named_by_what_else_differs(under_load):
    loads = [(1, 50, "chat"), (2, 50, "chat"), (1, 50, "chat_poisson"), (2, 10, "chat_poisson")]
    cells = [at_rate(under_load, rate, good, "abc", name) for rate, good, name in loads]
    assert study_answer(cells) == (
        "Binary search, workload=chat sustains 2 requests/s; binary search, "
        "workload=chat_poisson sustains 1 requests/s, not 2."
    )
    (overview,) = machine_overviews(cells)
    names = ["binary_search, workload=chat", "binary_search, workload=chat_poisson"]
    assert [capacity.name for capacity in overview.capacities] == names
    assert [line[0] for line in map(overview.capacity.cells, overview.capacity.lines)] == [
        name for name in names for _ in range(2)
    ]
    cells += [at_rate(under_load, rate, 60 - 10 * rate, "abc", "burst") for rate in (1, 4)]
    assert study_answer(cells) == (
        "Binary search, workload=chat sustains 2 requests/s; 2 others in the table."
    )
    assert study_answer(cells[:2]) == "Binary search sustains 2 requests/s."


def test_a_rate_of_sessions_is_one_in_a_run_of_one_request_of_each_too(under_load):
    first, last = (at_rate(under_load, rate, 50) for rate in (1, 2))
    (load,) = first.capacities
    first = replace(first, capacities=(replace(load, unit="sessions/s"),))
    assert study_answer([first, last]) == "Binary search sustains 2 sessions/s."


def test_one_cell_answers_for_itself(make_cell):
    cell = read(make_cell(blocks=8))
    assert study_answer([cell]) == short_answer(cell.findings)
