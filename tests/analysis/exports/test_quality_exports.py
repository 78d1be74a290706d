"""The quality of scored texts in cell.json, the results table, CSV, frames and comparisons."""

import csv
import io
import math
from dataclasses import replace

import numpy as np
import pytest
from planted_cells import compare_studies

from labkit.analysis import analyse_cell, load
from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.comparison.perplexity_and_kl import IS_UPPER_LIMIT
from labkit.analysis.exports.tool_exports import csv_text
from labkit.analysis.model.cell_model import Cell
from labkit.analysis.pages.report_files import render
from labkit.analysis.statistics.text_window_intervals import LOOK_CONFIDENCE
from labkit.analysis.studies.study_analysis import AnalysisCache
from labkit.analysis.tables.results_table import results_table


def scoring(arm, shift, num_windows=16):
    """Return the notes of an arm whose KL divergence is ``shift`` on average."""
    rng = np.random.default_rng(1)
    windows = [
        {
            "window": f"text 1, token {16 * i}",
            "tokens": 15,
            "nll": float(45 + 15 * shift * rng.uniform(0.5, 1.5)),
            "kl": (shift * rng.uniform(0.5, 1.5, 15)).tolist(),
            "same_top1": 15 - (i % 3 if shift else 0),
            "probability_change_squared": shift / 100,
        }
        for i in range(num_windows)
    ]
    return {"reference_top": 64, "reference_rest": 0.0, "windows": windows, "worst": []}


def scored(shift, num_windows=16):
    """Return a change of records that adds what each arm scored."""

    def apply(record):
        notes = scoring(record.arm, shift if record.arm == "seq_map" else 0.0, num_windows)
        cases = tuple(
            replace(case, notes={**case.notes, "scoring": notes}) for case in record.cases
        )
        return replace(record, cases=cases)

    return apply


@pytest.fixture
def cell(make_cell):
    return make_cell(change=scored(0.01))


def test_cell_json_has_each_arm_s_metrics_with_intervals(cell, make_cell):
    quality = analyse_cell(cell)["quality"]
    assert [one["arm"] for one in quality] == ["binary_search", "seq_map", "control"]
    assert {(one["windows"], one["tokens"]) for one in quality} == {(16, 240)}
    kl = np.concatenate([window["kl"] for window in scoring("seq_map", 0.01)["windows"]])
    metrics = quality[1]["metrics"]
    assert metrics["kl_mean"]["estimate"] == pytest.approx(kl.mean())
    assert metrics["kl_p99_9"]["estimate"] == pytest.approx(np.quantile(kl, 0.999))
    assert metrics["kl_mean"]["low"] < kl.mean() < metrics["kl_mean"]["high"]
    assert metrics["top1_agreement"]["estimate"] == 1 - 15 / 240
    assert IS_UPPER_LIMIT.keys() < metrics.keys()
    assert "quality" not in analyse_cell(make_cell("kernels/cell"))


def test_the_results_have_columns_of_quality_only_where_texts_are_scored(cell, make_cell):
    markdown = render(cell.parent, "md")
    header = next(line for line in markdown.split("\n") if line.startswith("| batch"))
    assert header.endswith(
        "| KL (nats) | KL 95 % CI | same next token (%) | same next token 95 % CI (%) | verdict |"
    )
    content = analyse_cell(cell)
    table = results_table(Cell.from_json(content), [])
    texts = dict(zip([c.heading for c in table.columns], table.cells(table.lines[0]), strict=True))
    kl = content["quality"][1]["metrics"]["kl_mean"]
    assert texts["KL (nats)"] == f"{kl['estimate']:.3g}"
    assert texts["KL 95 % CI"] == f"{kl['low']:.3g} to {kl['high']:.3g}"
    assert texts["same next token (%)"] == "93.75"
    assert "compared with binary_search, over 16 windows of text" in table.notes[-1]
    other = results_table(analyse(make_cell("kernels/cell")).cell, [])
    assert not any("KL" in column.heading for column in other.columns)


def test_the_headings_name_the_level_of_the_intervals(make_cell):
    """It is higher if looks decided how many windows were scored."""
    levels = []
    for name, design in (("a", {}), ("b", {"quality_confidence": LOOK_CONFIDENCE})):
        cell = analyse(make_cell(name, change=scored(0.01), design=design)).cell
        levels += [c.heading for c in results_table(cell, []).columns if "CI" in c.heading][1:]
    assert levels == [
        "KL 95 % CI", "same next token 95 % CI (%)",
        "KL 98.3 % CI", "same next token 98.3 % CI (%)",
    ]  # fmt: skip


def test_csv_has_quality_unrounded_only_where_texts_are_scored(cell, make_cell):
    content = analyse_cell(cell)
    plain = csv_text([analyse(make_cell("kernels/cell")).cell])
    assert "kl_mean" not in plain
    lines = list(csv.DictReader(io.StringIO(csv_text([Cell.from_json(content)]))))
    metrics = content["quality"][1]["metrics"]
    for line in lines:
        if line["arm"] == "seq_map":
            assert float(line["kl_mean"]) == metrics["kl_mean"]["estimate"]
            assert float(line["top1_agreement_low"]) == metrics["top1_agreement"]["low"]
    assert {line["kl_mean"] for line in lines if line["arm"] == "control"} == {"0.0"}


def test_frames_have_the_quality(cell, make_cell):
    metrics = analyse_cell(cell)["quality"][1]["metrics"]
    verdicts = load(cell.parent, "verdicts")
    lines = verdicts[verdicts.arm == "seq_map"]
    assert set(lines.kl_mean_high) == {metrics["kl_mean"]["high"]}
    quality = load(cell.parent, "quality").set_index(["arm", "metric"])
    assert quality.loc["seq_map", "kl_p50"].estimate == metrics["kl_p50"]["estimate"]
    assert quality.loc["control", "perplexity_ratio"].high == 1
    make_cell("kernels/cell")
    assert load(cell.parent.parent / "kernels", "quality").empty
    assert "kl_mean" not in load(cell.parent.parent / "kernels", "verdicts")


@pytest.mark.parametrize(
    ("shift", "windows", "change"),
    [
        (0.01, 16, "the KL divergence is the same in every window."),
        (0.02, 16, "the KL divergence changed by 0.0"),
        (0.01, 12, "the windows differ, so the change has no interval."),
    ],
)
def test_compare_says_how_quality_changed(shift, windows, change, cell, make_cell):
    later = make_cell("later/cell", change=scored(shift, windows), seed=2)
    studies = [AnalysisCache().study(path.parent) for path in (cell, later)]
    (note,) = [n for n in compare_studies(*studies, 2.0).notes if n.startswith("Quality of")]
    assert note.startswith("Quality of seq_map against binary_search: old KL 0.0")
    assert change in note
    if shift == 0.02:
        kl = [np.mean([w["kl"] for w in scoring("", s)["windows"]]) for s in (0.01, 0.02)]
        number = float(note.split("changed by ")[1].split()[0])
        assert math.isclose(number, kl[1] - kl[0], rel_tol=0.01)
