"""The table of results: what each cell of a line says of its row, arm and comparison."""

from types import SimpleNamespace

import pytest
from planted_cells import planted_cell

from labkit.analysis.findings.verdict_sentences import verdict_sentences
from labkit.analysis.tables.results_table import medians_table, results_table
from labkit.analysis.tables.validity_tables import run_list

COMPARISON = {
    "arm": "fast", "effect_pct": -12.34, "ci_low_pct": -15.0, "ci_high_pct": -9.5,
    "p_adjusted": 0.012, "verdict": "better", "level": 0.9, "p_floor": 0.002, "blocks": 4,
}  # fmt: skip


def row(case="all", metric="e2e_ms", unit="ms", **others):
    sizes = {"base": 250.0, "control": 251.0, "fast": 219.0, "slow": 300.0}
    medians = {arm: {"median": size} for arm, size in sizes.items()}
    plain = {"case": case, "metric": metric, "unit": unit, "better": "lower", "primary": True,
             "skipped": None, "arms": medians, "comparisons": [COMPARISON]}  # fmt: skip
    return plain | others


def cell(*rows, arms=("fast",), control=True, **others):
    roles = {"base": "baseline"} | ({"control": "control"} if control else {})
    named = [{"name": n, "role": r} for n, r in (roles | dict.fromkeys(arms, "arm")).items()]
    design = {"alpha": 0.05, "runs_per_block": 1}
    return planted_cell(rows, arms=named, design=design, **others)


def texts(table):
    """Return the cells of every line by heading."""
    headings = [column.heading for column in table.columns]
    return [dict(zip(headings, table.cells(line), strict=True)) for line in table.lines]


def test_a_line_says_what_its_comparison_found():
    table = results_table(cell(row()), [], anchor="c-")
    (line,) = texts(table)
    assert line == {
        "metric": "e2e_ms", "base (ms)": "250.0", "delta of fast": "−12.3%",
        "adjusted 90 % CI (%)": "−15.0 to −9.5", "adjusted p": "0.012", "verdict": "less time",
    }  # fmt: skip
    assert [c.link(table.lines[0]) for c in table.columns if c.link] == ["#c-r0"] * 4


def test_a_row_that_an_earlier_look_decided_shows_its_own_level():
    levels = {"a": 0.96, "b": 0.99, "c": None}
    rows = [row(case, comparisons=[COMPARISON | {"level": x}]) for case, x in levels.items()]
    study = cell(*rows, gates={"identical": {"status": "pass"}})
    table = results_table(study, [])
    assert [line["adjusted 96 % CI (%)"] for line in texts(table)] == [
        "−15.0 to −9.5", "−15.0 to −9.5 (99 %)", "−15.0 to −9.5"
    ]  # fmt: skip
    assert ", at its own level where an earlier look decided the row;" in table.notes[0]
    assert "its own level" not in results_table(cell(row()), []).notes[0]
    sentences = verdict_sentences(study, "none")
    assert "adjusted 96 % CI" in sentences[0] and "adjusted 99 % CI" in sentences[1]


def test_arms_without_a_comparison_and_skipped_rows_have_no_numbers():
    failure = {"run": "b00-p00-slow", "outcome": "oom", "detail": "killed"}
    lost = {"base": {"median": 250.0}, "fast": {"median": None}, "slow": {"median": None}}
    rows = [
        row(),
        row(arms=lost, comparisons=[]),
        row(skipped="too long", comparisons=[]),
        row(primary=False),
    ]
    several = results_table(cell(*rows, arms=("fast", "slow"), failures=[failure]), [])
    assert [(line.row_index, line.arm) for line in several.lines] == [
        (i, arm) for i in range(3) for arm in ("fast", "slow")
    ]
    found = texts(several)
    assert [line["delta"] for line in found] == ["−12.3%", "–", "–", "oom", "", ""]
    assert [line["arm"] for line in found] == ["fast", "slow"] * 3
    assert [line["adjusted p"] for line in found] == ["0.012", *[""] * 5]
    assert [line["verdict"] for line in found] == [
        "less time",
        "",
        "",
        "",
        *["skipped: too long"] * 2,
    ]
    assert [line["base (ms)"] for line in found[::2]] == ["250.0", "250.0", ""]
    others = results_table(cell(*rows, arms=("fast",)), [], primary=False)
    assert [line.row_index for line in others.lines] == [3]


def test_without_an_arm_the_control_or_the_baseline_alone_is_shown():
    controlled = results_table(cell(row(comparisons=[]), arms=()), [])
    assert [line.arm for line in controlled.lines] == ["control"]
    alone = cell(row(comparisons=[]), row(skipped="why"), arms=(), control=False)
    assert texts(results_table(alone, [])) == [
        {"metric": "e2e_ms", "base (ms)": "250.0"},
        {"metric": "e2e_ms", "base (ms)": "why"},
    ]


@pytest.mark.parametrize(
    ("rows", "heading", "names"),
    [
        ([row(), row(metric="ttft_ms")], "metric", ["e2e_ms", "ttft_ms"]),
        ([row("a"), row("b")], "batch", ["a", "b"]),
        ([row("a"), row("a", "x_ms")], "batch", ["a: e2e_ms", "a: x_ms"]),
        ([row("all"), row("b")], "batch", ["all", "b"]),
        ([row(), row(metric="kv", unit="bytes")], "metric", ["e2e_ms", "kv (MiB)"]),
    ],
)
def test_rows_are_named_by_what_tells_them_apart(rows, heading, names):
    found = texts(results_table(cell(*rows), []))
    assert [line[heading] for line in found] == names
    one_unit = all(each["unit"] == "ms" for each in rows)
    assert ("base (ms)" in found[0]) is one_unit


def test_kernels_and_published_numbers_stand_beside_their_rows():
    notes = [("a", {"kernel": "decode"}), ("b", {"kernel": "own"}), ("a", {"kernel": "tiled"})]
    cases = [SimpleNamespace(case=case, known_notes=note) for case, note in [*notes, ("c", {})]]
    records = [SimpleNamespace(cases=cases)]
    rows = [
        {"case": "a", "delta_pct": {"fast": -3.0}, "p": {"fast": 0.04}, "wins": {"fast": "3/4"}},
        {"case": "b", "p": {"fast": 0.5}},
        {"case": "c", "delta_pct": {"other": 1.0}},
        {"case": "d", "metric": "another", "delta_pct": {"fast": 1.0}},
    ]
    published = {"metric": "e2e_ms", "rows": rows}
    table = results_table(cell(*map(row, "abcd"), published=published), records)
    found = texts(table)
    assert [line["kernel"] for line in found] == ["per-token", "own", "", ""]
    heading = next(column.heading for column in table.columns if "published" in column.heading)
    assert [line[heading] for line in found] == [
        "−3.0% (p = 0.04, 3/4 wins)", " (p = 0.5)", "", ""
    ]  # fmt: skip
    plain = results_table(cell(row("c"), published=published), [])
    assert not any("published" in column.heading for column in plain.columns)


def test_an_arm_s_failures_are_named_once_each():
    failures = [
        {"run": "b00-p02-padded_tight", "outcome": "oom", "detail": "killed"},
        {"run": "b01-p00-padded_tight", "outcome": "oom", "detail": "killed"},
        {"run": "b01-p01-naive-2", "outcome": "timeout", "detail": "killed"},
        {"run": "b02-p01-naive-2", "outcome": "oom", "failed_by": "b02-p02-padded_tight"},
    ]
    named = {"padded_tight": "oom", "naive-2": "timeout, lost"}
    assert planted_cell(failures=failures).failure_outcomes == named


def test_a_small_detectable_effect_is_not_0():
    """It was "0.0 %" in the medians and in the list of runs."""
    one = {"arm": "fast", "mde_pct": 0.04, "wins": None, "verdict": "equivalent", "blocks": 4}
    values = {"median": 1.0, "q1": 1.0, "q3": 1.0, "n": 4, "runs": []}
    runs = dict.fromkeys(("base", "fast"), values)
    gates = {"identical": {"status": "unclaimed", "reasons": []}}
    found = cell(row(arms=runs, comparisons=[COMPARISON | one]), gates=gates)
    lines = texts(medians_table(found))
    assert [line["detectable effect"] for line in lines] == ["", "0.04%"]
    (listed,) = run_list(found, "none", "").rows
    assert "smallest detectable effect 0.04 %" in listed.arms[1].summary
