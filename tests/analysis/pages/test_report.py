"""``labkit.report``: reports rebuilt byte for byte, every export format, one-line errors."""

import csv
import hashlib
import html
import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from planted_cells import planted_cell
from rich.console import Console

from labkit.analysis import analyse_cell, print_cell, write_study
from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.document.svg_chart_renderer import NUM_STYLES, arm_classes
from labkit.analysis.document.table_model import Column, Table
from labkit.analysis.exports.tool_exports import csv_text
from labkit.analysis.findings.cell_findings import plan_findings
from labkit.analysis.findings.full_answer import long_text
from labkit.analysis.findings.short_answer import short_answer
from labkit.analysis.number_format import value_text
from labkit.analysis.pages import markdown_report, matplotlib_figures
from labkit.analysis.pages.cell_report_content import CellReport
from labkit.analysis.pages.html_report import cell_html
from labkit.analysis.pages.markdown_report import markdown_html, markdown_table
from labkit.analysis.pages.report_files import FORMATS
from labkit.analysis.studies.cell_summary import cell_summary
from labkit.analysis.studies.increasing_load import METRICS
from labkit.records import Metric
from labkit.report import main

VLLM_FIELDS = (
    "run_number run date endpoint_type backend label model_id tokenizer_id num_prompts "
    "request_rate burstiness max_concurrency duration completed failed total_input_tokens "
    "total_output_tokens request_throughput request_goodput output_throughput "
    "total_token_throughput mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms "
    "median_tpot_ms std_tpot_ms p99_tpot_ms mean_itl_ms median_itl_ms std_itl_ms p99_itl_ms "
    "mean_e2el_ms median_e2el_ms std_e2el_ms p99_e2el_ms input_lens output_lens ttfts itls "
    "start_times errors"
)


@pytest.fixture
def study(make_cell, published):
    make_cell("study/kernel", published=published, skipped={"prefill, 8 × 512": "too large"})
    return make_cell("study/chat", requests=True, identity="tokens").parent


def snapshot(study):
    return {
        str(path.relative_to(study)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(study.rglob("*"))
        if path.is_file()
    }


def printed(capsysbinary, study, format_name):
    assert main([str(study), "--format", format_name]) == 0
    return capsysbinary.readouterr().out.decode()


def test_rebuilt_byte_for_byte_pictures_included(study, tmp_path):
    assert main([str(study)]) == 0
    first = snapshot(study)
    names = {name.split("/")[0] for name in first}
    assert {"study.json", "report.md", "report.html", "tables", "plots"} <= names
    assert {Path(name).suffix for name in first} >= {".png", ".svg", ".csv", ".tex", ".md"}
    plots = {name.removeprefix("plots/") for name in first if name.startswith("plots/")}
    stems = ["chat--memory--binary_search", "chat--memory--seq_map", "kernel--roofline"]
    assert {f"{stem}.{ending}" for stem in stems for ending in ("png", "svg")} <= plots
    assert not any("memory--control" in name or "kernel--memory" in name for name in plots)
    copy = tmp_path / "elsewhere" / "study"
    shutil.copytree(study, copy)
    for name in ("report.md", "report.html", "study.json"):
        (copy / name).unlink()
    # One picture of each kind: the others name what they show, and are left as they are.
    for path in (copy / "plots").glob("*"):
        if "--memory--seq_map" not in path.name:
            path.unlink()
    shutil.rmtree(copy / "tables")
    command = [sys.executable, "-m", "labkit.report", str(copy)]
    subprocess.run(command, check=True, capture_output=True)
    assert snapshot(copy) == first


def test_printing_a_format_writes_nothing(study, capsysbinary):
    before = snapshot(study)
    for format_name in FORMATS:
        if format_name != "github":
            assert printed(capsysbinary, study, format_name)
    assert snapshot(study) == before


def test_markdown_has_the_articles_layout(study, capsysbinary):
    text = printed(capsysbinary, study, "md")
    head = (
        "| batch | kernel | binary_search (µs) | delta of seq_map | adjusted 95 % CI (%) "
        "| adjusted p | verdict"
    )
    assert head in text
    assert "| −8.1% |" in text and "published: M1 Pro, 14 GPU cores" in text
    assert "skipped: too large" in text
    assert "| decode, 64 reqs, ctx 128 | 322.6 | 296.5 | −8.1% |" in text  # as published
    below = text.splitlines()[
        text.splitlines().index("| decode, 64 reqs, ctx 128 | 322.6 | 296.5 | −8.1% |") + 1
    ]
    assert below.startswith("| here | ")
    assert "| decode, 64 reqs, ctx 128 | 12.50 | 12.50 | 12.50 |" in text  # building maps


def test_every_arm_s_own_median_is_in_the_details(make_cell, capsysbinary):
    """The results show the baseline's median and the difference; the medians have a table."""
    path = make_cell("study/cell")
    row = analyse_cell(path)["rows"][0]
    baseline, arm = (row["arms"][name]["median"] for name in ("binary_search", "seq_map"))
    text = printed(capsysbinary, path.parent, "md")
    results, details = text.split("### Medians and quartiles")
    line = next(x for x in results.splitlines() if x.startswith(f"| {row['case']} |"))
    assert f"| {value_text(baseline)} |" in line and value_text(arm) not in line
    lines = [x for x in details.splitlines() if x.startswith(f"| {row['case']} |")]
    assert any(f"| seq_map | µs | {value_text(arm)} |" in x for x in lines)
    assert any(f"| binary_search | µs | {value_text(baseline)} |" in x for x in lines)
    assert "Medians and quartiles</h3>" in printed(capsysbinary, path.parent, "html")


def assert_in_order(text, *parts):
    """Assert that a text contains the parts in this order."""
    places = [text.find(part) for part in parts]
    assert -1 not in places and places == sorted(places), (places, parts)


def test_the_answer_comes_first_then_the_table_then_the_caveats(make_cell, capsysbinary):
    study = make_cell("study/cell", blocks=2).parent
    answer = long_text(plan_findings(analyse(study / "cell")))
    weak = "estimate only: 2 blocks of 2 cannot support"
    assert answer.startswith("Estimate only (2 blocks of 2")
    text = printed(capsysbinary, study, "md")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines[0] == f"**{short_answer(plan_findings(analyse(study / 'cell')))}**"
    assert lines[1] == answer and lines[2].startswith("| batch |")
    assert_in_order(
        text, "| batch |", f"- {weak}", "### How it was measured", "### Verdicts by row"
    )
    page = printed(capsysbinary, study, "html")
    short = short_answer(plan_findings(analyse(study / "cell")))
    assert_in_order(page, f'<p class="answer">{short}</p>', answer, weak, "<table", "alpha 0.05")
    out = io.StringIO()
    print_cell(study / "cell", Console(width=200, file=out))
    assert_in_order(" ".join(out.getvalue().split()), answer, "verdict", f"! {weak}", "report: ")


def test_a_study_of_many_cells_begins_with_their_answers(study, capsysbinary):
    answers = [long_text(plan_findings(analyse(study / name))) for name in ("chat", "kernel")]
    text = printed(capsysbinary, study, "md")
    assert text.splitlines()[2:5] == [
        "**Worse in 1 and better in 1 of 2 cells. At chat: seq map processes 4.8 % fewer tokens.**",
        "", "| cell | answer | gates |",
    ]  # fmt: skip
    assert all(f"| {answer} |" in text for answer in answers)
    page = printed(capsysbinary, study, "html")
    assert_in_order(page, f"<td>{answers[0]}<td>", f"<td>{answers[1]}<td>", "<section")


def test_the_long_sentences_are_in_the_details_of_their_row(study, capsysbinary):
    page = printed(capsysbinary, study, "html")
    details = re.findall(r'<details class="row">.*?</details>', page, re.S)
    sentence = "seq_map takes 4.8 % less time per launch (adjusted 95 % CI"
    assert page.count(sentence) == sum(one.count(sentence) for one in details) > 0
    assert all("<li>control" in one for one in details)


@pytest.mark.parametrize(
    ("blocks", "how", "over"),
    [(4, "(exact)", "(all 1,296 relabellings)"),
     (8, "(Monte Carlo, 100,000 draws)", "(Monte Carlo, 100,000 draws)")],
)  # fmt: skip
def test_exact_is_shown_only_if_all_relabellings_were_enumerated(
    make_cell, capsysbinary, blocks, how, over
):
    text = printed(capsysbinary, make_cell("study/cell", blocks=blocks).parent, "md")
    assert f"{how}; {blocks} blocks)" in text and f"within blocks {over}, adjusted" in text
    assert ("exact" in text.replace("Fisher's exact", "")) is (blocks == 4)


def test_the_smallest_reachable_p_is_that_of_the_shown_arms(make_cell, capsysbinary):
    path = make_cell("study/cell", effects={"seq_map": 0.95, "identity": 1.0, "plan": 1.0})
    text = printed(capsysbinary, path.parent, "md")
    assert "smallest reachable p 0.0046." in text  # three arms share alpha; the control has its own


def test_the_level_that_is_shown_is_that_of_the_interval(make_cell, capsysbinary):
    looks = [{"blocks": 4, "alpha": 0.01}, {"blocks": 8, "alpha": 0.04}]
    text = printed(capsysbinary, make_cell("study/cell", looks=looks).parent, "md")
    assert "| adjusted 99 % CI (%) |" in text and "95 % CI" not in text
    assert "(adjusted 99 % CI " in text


def test_a_row_that_an_earlier_look_decided_shows_its_level(make_cell, capsysbinary):
    looks = [{"blocks": 4, "alpha": 0.01}, {"blocks": 8, "alpha": 0.04}]
    taken = [{"blocks": 4, "alpha": 0.01, "decided": False, "stopped": ["prefill, 8 × 512"]}]
    path = make_cell("study/cell", blocks=8, looks=looks, design={"looks_taken": taken})
    text = printed(capsysbinary, path.parent, "md")
    lines = [line for line in text.split("\n") if line.startswith("| ")]
    first, second = [line.split(" | ") for line in lines[2:4]]
    assert "adjusted 96 % CI (%)" in lines[0] and second[0] == "| prefill, 8 × 512"
    assert "99 %" not in first[4] and second[4].endswith(" (99 %)")
    assert "Bars: adjusted 96 % and 99 % intervals" in printed(capsysbinary, path.parent, "html")
    assert "(all 1,296 relabellings or Monte Carlo, 100,000 draws), adjusted over" in text
    assert "(Monte Carlo, 100,000 draws); 8 blocks" in text and "(exact); 4 blocks" in text
    out = io.StringIO()
    print_cell(path, Console(width=200, file=out))
    assert f"{second[4].replace(' to ', ', ')} " in out.getvalue()


def test_the_control_s_smallest_p_stands_beside_its_largest_effect(make_cell, capsysbinary):
    def leak(record):
        if record.arm != "control":
            return record
        rows = []
        for case, factor in zip(record.cases, (1.03, 1.0), strict=True):
            metric = case.metrics[0]
            repeats = tuple(x * factor for x in metric.repeats)
            rows.append(replace(case, metrics=(replace(metric, repeats=repeats),)))
        return replace(record, cases=tuple(rows))

    text = printed(capsysbinary, make_cell("study/cell", change=leak).parent, "md")
    (line,) = [line for line in text.splitlines() if line.startswith("A/A control: ")]
    match = re.match(
        r"A/A control: at most \+(\d\.\d)% from the baseline \(decode, 64 reqs, ctx 128\); "
        r"smallest p (\S+) unadjusted, (\S+) adjusted \(decode, 64 reqs, ctx 128\); widest", line
    )  # fmt: skip
    assert match and 2 < float(match[1]) < 4 and float(match[2]) < 0.02
    assert "1 of 2 rows with p below 0.02 unadjusted: decode, 64 reqs, ctx 128 (+" in line
    quiet = printed(capsysbinary, make_cell("quiet/cell").parent, "md")
    assert "below p" not in quiet and "A/A control: at most" in quiet


def test_published_p_is_shown_as_published(make_cell, capsysbinary):
    published = {
        "source": "the article",
        "machine": "M1 Pro",
        "rows": [
            {
                "case": "all",
                "metric": "total_tok_s",
                "delta_pct": {"seq_map": 0.9},
                "p": {"seq_map": 0.26},
            }
        ],
    }
    study = make_cell("study/cell", requests=True, published=published).parent
    assert "+0.9% (p = 0.26)" in printed(capsysbinary, study, "md")


def test_our_numbers_are_below_the_published_ones(make_cell, capsysbinary):
    """In their published units; for outputs, agreement of the arm and of the control."""
    rows = [
        {"case": "all", "metric": "peak_kv_bytes", "unit": "GB", "arms": {"binary_search": 1.5}},
        {"case": "all", "metric": "agreeing_prefix", "unit": "share",
         "arms": {"control": 0.812, "seq_map": 0.94, "theirs": 0.5}},
        {"case": "another", "metric": "e2e_ms", "arms": {"seq_map": 9}},
    ]  # fmt: skip
    published = {"source": "s", "machine": "m", "rows": rows}
    text = printed(
        capsysbinary, make_cell("s/cell", requests=True, published=published).parent, "md"
    )
    table = text[text.index("### Published by others") :].splitlines()[2:8]
    assert table[0] == "| published, and here | binary_search | control | seq_map | theirs |"
    assert table[2:] == [
        "| all: peak_kv_bytes (GB) | 1.5 |  |  |  |",
        "| here (MiB) | 16.00 | 16.00 | 16.00 |  |",
        "| all: agreeing_prefix (share) |  | 0.812 | 0.94 | 0.5 |",
        "| here | 1.00 | 1.00 | 1.00 |  |",
    ]
    assert "another" not in text


def test_a_sweep_has_a_picture_of_throughput_against_latency(make_cell, monkeypatch):
    monkeypatch.setattr(matplotlib_figures, "write_figures", lambda *_: None)  # each cell's own

    def with_all(record):
        case = record.cases[0]
        rates = [
            Metric(name, "unit", "lower", False, (9.0,))
            for name in METRICS
            if name not in {metric.name for metric in case.metrics}
        ]
        return replace(record, cases=(replace(case, metrics=(*case.metrics, *rates)),))

    for clients in (1, 2, 4):
        cell = make_cell(f"sweep/{clients}", requests=True, clients=clients, change=with_all)
    study = cell.parent
    write_study(study)
    for ending in ("png", "svg"):
        assert (study / "plots" / f"throughput-against-latency.{ending}").stat().st_size > 1000
    assert "![Throughput against latency](plots/throughput-" in (study / "report.md").read_text()


def test_one_rate_has_its_capacity_and_its_title_on_every_page(under_load, monkeypatch):
    """The HTML page showed neither the answer nor the table that report.md begins with."""
    monkeypatch.setattr(matplotlib_figures, "write_figures", lambda *_: None)
    study = under_load("study/rate=4", 4.0, 50).parent
    write_study(study)
    page, text = ((study / f"report.{end}").read_text("utf-8") for end in ("html", "md"))
    title, heading = (re.search(rf"<{tag}>(.*)</{tag}>", page)[1] for tag in ("title", "h1"))
    assert title == heading and text.startswith(f"# {title}\n")
    (sentence,) = re.findall(r"\*\*(.* keeps 95 % of requests .*)\*\*", text)
    assert f"<p>{sentence}</p>" in page and "<h3>Capacity</h3>" in page
    analysis = analyse(study / "rate=4")
    own = cell_html("study", cell_summary(analysis), CellReport(analysis), "cell.md")
    assert f"<p>{sentence}</p>" in own


def test_the_serving_experiment_has_the_article_s_p_values():
    """The article's own p-values, of nine rounds per arm, are shown and not recomputed."""
    from labkit.cli import multirun_composition
    from labkit.experiment.compose.cell_composer import compose_cell

    multirun_composition.register()
    with multirun_composition.initialized():
        experiment = compose_cell([], ["experiment=seq_map_concurrency_64"]).experiment
    rows = experiment.ablation.published["rows"]
    assert [(row["delta_pct"], row["p"]) for row in rows] == [
        ({"seq_map": 0.9}, {"seq_map": 0.26}),
        ({"seq_map": -0.7}, {"seq_map": 0.45}),
    ]


def test_a_published_column_needs_a_published_delta(make_cell, capsysbinary):
    """Numbers of other arms or metrics have their own table."""
    published = {
        "source": "an article",
        "machine": "a Mac",
        "metric": "request_s",
        "unit": "s",
        "rows": [{"case": "all", "arms": {"binary_search": 40.3, "seq_map": 41.0}}],
    }
    study = make_cell("study/cell", requests=True, published=published).parent
    text = printed(capsysbinary, study, "md")
    heads = [line for line in text.splitlines() if line.startswith("| metric")]
    assert heads and not any("published" in line for line in heads)
    assert "### Published by others" in text and "40.3" in text


def test_csv_has_every_number_unrounded(study, capsysbinary):
    lines = list(csv.DictReader(io.StringIO(printed(capsysbinary, study, "csv"))))
    cell = analyse_cell(study / "kernel")
    line = next(x for x in lines if x["cell"] == "kernel" and x["arm"] == "seq_map")
    comparison = cell["rows"][0]["comparisons"][0]
    keys = ("effect_pct", "ci_low_pct", "level", "ci_raw_low_pct", "ci_raw_high_pct", "p")
    assert [float(line[key]) for key in keys] == [comparison[key] for key in keys]
    assert any(x["skipped"] == "too large" for x in lines)


def test_csv_has_the_adjusted_and_the_unadjusted_interval(make_cell, capsysbinary):
    text = printed(capsysbinary, make_cell("study/cell").parent, "csv")
    line = next(csv.DictReader(io.StringIO(text)))
    adjusted, alone = (
        float(line[f"{key}_high_pct"]) - float(line[f"{key}_low_pct"]) for key in ("ci", "ci_raw")
    )
    assert adjusted > alone > 0


def test_csv_has_the_median_of_an_arm_without_comparisons(make_cell, capsysbinary):
    study = make_cell("study/cell", effects={}, control=False).parent
    lines = list(csv.DictReader(io.StringIO(printed(capsysbinary, study, "csv"))))
    rows = analyse_cell(study / "cell")["rows"]
    medians = [row["arms"]["binary_search"]["median"] for row in rows]
    assert [line["baseline_median"] for line in lines] == list(map(str, medians))
    assert {(line["arm"], line["baseline"]) for line in lines} == {("", "binary_search")}


def test_csv_has_the_difference_from_a_baseline_of_0():
    one = {"arm": "arm", "verdict": "better", "difference": 1.5, "as_measured_pct": 2.5}
    row = {"case": "all", "metric": "goodput_req_s", "unit": "req/s", "better": "higher"}
    row |= {"primary": True, "skipped": None, "arms": {"base": {"median": 0.0}, "arm": {}}}
    arms = [{"name": "base", "role": "baseline"}]
    cell = planted_cell([{**row, "comparisons": [one]}], arms=arms)
    (line,) = csv.DictReader(io.StringIO(csv_text([cell])))
    assert (line["effect_pct"], line["difference"], line["as_measured_pct"]) == ("", "1.5", "2.5")


def test_cells_of_one_question_have_headings_and_captions_of_their_own(study, capsysbinary):
    titles = [f"Does a host-built map beat the binary search? ({x})" for x in ("chat", "kernel")]
    text = printed(capsysbinary, study, "md")
    assert re.findall("^## (Does .*)", text, re.M) == titles
    captions = re.compile(r"\\caption\{(.*)\}")
    assert captions.findall(printed(capsysbinary, study, "tex")) == titles
    write_study(study, plots=False)
    tables = (study / "tables" / f"{name}.tex" for name in ("chat", "kernel"))
    assert [captions.search(table.read_text("utf-8"))[1] for table in tables] == titles


def test_latex_escapes_and_balances(study, capsysbinary):
    text = printed(capsysbinary, study, "tex")
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 2
    assert r"binary\_search" in text and "µ" not in text and "−" not in text
    assert not re.search(r"(?<!\\)[%_&]", re.sub(r" & | \\\\", "", text).replace(r"\_", ""))


def test_latex_escapes_what_its_fonts_show_as_other_signs(make_cell, capsysbinary):
    text = printed(capsysbinary, make_cell("a/cell", cases=("BM_Sort<int>|8",)), "tex")
    assert r"BM\_Sort\textless{}int\textgreater{}\textbar{}8" in text


def test_memory_over_time_is_shown_under_the_phases(study, capsysbinary):
    text = printed(capsysbinary, study, "md")
    assert "(plots/chat--memory--seq_map.png)" in text and "each request's phases" in text
    page = printed(capsysbinary, study, "html")
    for label in ("KV reserved", "MLX active", "memory (MiB)", "seconds from the first submission"):
        assert label in page
    assert "MLX cache" not in page  # it stayed 0
    for phase in ("waiting", "prefill", "decode"):
        bars = page.count(f'<rect class="bar {phase}" x=') - 2  # without those of the legends
        assert bars == 2 * 8  # 8 requests, 2 arms


def test_the_html_report_loads_nothing_from_elsewhere(study, capsysbinary):
    page = printed(capsysbinary, study, "html")
    assert not re.search(r"(src|href)=\"(https?:)?//", page) and "@import" not in page
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page


@pytest.mark.parametrize(
    ("samples", "state", "reason"),
    [
        ({"foreign_cores": [1.5]}, "busy machine", "other processes used 1.5 cores on average"),
        ({"thermal_level": [2]}, "slowed machine", "heat slowed the CPU in 2 of 2 runs"),
    ],
)
def test_a_disturbed_machine_is_a_chip_on_its_card_and_above_all_cells(
    make_cell, capsysbinary, samples, state, reason
):
    def change(record):
        return replace(record, notes={**record.notes, "observer": {"samples": samples}})

    few = {"blocks": 1, "runs": 1, "control": False}
    make_cell("study/seed=1", change=change, **few)
    study = make_cell("study/seed=2", **few).parent
    page = printed(capsysbinary, study, "html")
    assert page.count(f'#cell0-trust" title="{reason}">{state}</a>') == 1
    assert page.count(f'title="seed=1">{state} in 1 of 2 cells</span>') == 1
    assert page.count("gate warn") == 2  # none of the quiet cell


def test_tables_in_markdown_show_texts_as_they_are():
    """On GitHub, ``</s>`` in a table was taken for HTML and vanished."""
    texts = ("</s>", "<b>", " the ", "`", "a``b", "**", "a|b", "")
    plain = Column[str]("plain", lambda text: text, numeric=False)
    table = markdown_table(Table((plain, replace(plain, verbatim=True)), texts))
    assert "| \\</s> | `</s>` |\n| \\<b> | `<b>` |\n" in table
    code = re.findall("<code>(.*?)</code>", markdown_html(table))
    assert list(map(html.unescape, code)) == [text for text in texts if text]
    assert markdown_table(Table((plain,), ("p < 0.05",))).endswith("| p < 0.05 |")


def test_the_texts_around_the_tables_show_what_looks_like_a_tag(
    make_cell, capsysbinary, monkeypatch
):
    for name in ("study_question", "study_answer"):
        monkeypatch.setattr(markdown_report, name, lambda cells: "</s> or <b>?")
    study = make_cell("study/cell", skipped={"prefill, 8 × 512": "</s> or <b>?"}).parent
    lines = printed(capsysbinary, study, "md").splitlines()
    shown = [line for line in lines if "s> or" in line]
    assert all(r"\</s> or \<b>?" in line for line in shown)
    assert {line[:2] for line in shown} >= {"# ", "**", "- ", "| "}


def test_names_are_escaped_in_html(make_cell, capsysbinary):
    study = make_cell("study/cell", cases=("<script>alert(1)</script> & | case",)).parent
    page = printed(capsysbinary, study, "html")
    assert "<script>alert" not in page
    assert r"\<script>alert(1)\</script> & \| case" in printed(capsysbinary, study, "md")


def test_benchstat_lines_are_one_per_run(study, capsysbinary):
    text = printed(capsysbinary, study, "benchstat")
    lines = [line for line in text.splitlines() if line.startswith("Benchmark")]
    assert len(lines) == 24 + 24
    pattern = r"BenchmarkLabkit/case=\S+/arm=\S+-2 1( \S+ \S+)+"
    assert all(re.fullmatch(pattern, line) for line in lines)
    assert "Unit dispatch_us better=lower" in text and "Unit total_tok_s better=higher" in text
    assert "arm=binary_search" in lines[0]


def test_names_that_differ_in_letters_or_signs_are_different_files_and_benchmarks(
    make_cell, capsysbinary
):
    """Else a cell's tables are another's, and benchstat compares the runs of two cases."""
    make_cell("study/workload=чат", cases=("n ≤ 8", "n ≥ 8", "a?", "a!"))
    study = make_cell("study/workload=рваный", cases=("n ≤ 8",)).parent
    main([str(study)])
    assert len(list((study / "tables").glob("*.csv"))) == 2
    pictures = re.findall(r"plots/(\S+?)\.png", (study / "report.md").read_text())
    assert len(pictures) == len(set(pictures)) and all(one.isascii() for one in pictures)
    capsysbinary.readouterr()
    text = printed(capsysbinary, study, "benchstat")
    assert set(re.findall(r"case=(\S+)/arm=", text)) == {"n_≤_8", "n_≥_8", "a?", "a!"}


@pytest.mark.skipif(not shutil.which("benchstat"), reason="no benchstat on this machine")
def test_benchstat_reads_its_export(study, capsysbinary, tmp_path):
    (tmp_path / "b.txt").write_text(printed(capsysbinary, study, "benchstat"))
    command = ["benchstat", "-col", "/arm", str(tmp_path / "b.txt")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "dispatch_us" in done.stdout and "n=8" in done.stdout and not done.stderr.strip()


def test_pyperf_loads_its_export(study, capsysbinary, tmp_path):
    pyperf = pytest.importorskip("pyperf", reason="pyperf is not installed")
    path = tmp_path / "p.json"
    path.write_text(printed(capsysbinary, study, "pyperf"))
    suite = pyperf.BenchmarkSuite.load(str(path))
    name = "kernel: decode, 64 reqs, ctx 128: dispatch_us [seq_map]"
    benchmark = suite.get_benchmark(name)
    assert benchmark.get_nrun() == 8 and benchmark.get_nvalue() == 24
    median = analyse_cell(study / "kernel")["rows"][0]["arms"]["seq_map"]["median"]
    assert benchmark.median() == pytest.approx(median * 1e-6, rel=0.01)
    command = [sys.executable, "-m", "pyperf", "compare_to", str(path), str(path)]
    assert "no change" in subprocess.run(command, capture_output=True, text=True).stdout


def test_two_times_of_a_case_are_two_benchmarks_of_pyperf(make_cell, capsysbinary):
    def with_cpu_time(record):
        cases = (
            replace(
                case, metrics=(*case.metrics, Metric("cpu_time_us", "us", "lower", False, (4.0,)))
            )
            for case in record.cases
        )
        return replace(record, cases=tuple(cases))

    cell = make_cell("study/cell", change=with_cpu_time, cases=("decode",), control=False)
    document = json.loads(printed(capsysbinary, cell, "pyperf"))
    values = {
        one["metadata"]["name"]: {x for run in one["runs"] for x in run["values"]}
        for one in document["benchmarks"]
    }
    assert len(values) == 4 and values["decode: cpu_time_us [seq_map]"] == {4e-6}
    assert 4e-6 not in values["decode: dispatch_us [seq_map]"]


def test_the_vllm_export_has_its_fields_and_definitions(study, capsysbinary):
    runs = json.loads(printed(capsysbinary, study / "chat", "vllm"))
    assert len(runs) == 24 and list(runs[0]) == VLLM_FIELDS.split()
    run = runs[0]
    assert run["completed"] == 8 and run["total_output_tokens"] == 32
    assert run["output_throughput"] == pytest.approx(32 / run["duration"])
    assert run["mean_itl_ms"] == pytest.approx(20.0)
    assert run["ttfts"][1] - run["ttfts"][0] == pytest.approx(1e-3)
    tpot = (run["mean_e2el_ms"] - run["mean_ttft_ms"]) / 3
    assert run["mean_tpot_ms"] == pytest.approx(tpot)


def test_the_vllm_export_leaves_out_the_wait_for_a_place(make_cell, capsysbinary):
    """vLLM's client starts a request's clock after its limit on concurrency."""

    def waited(record):
        (case,) = record.cases
        requests = [
            {
                **request,
                "arrived_ms": request["submitted_ms"] - 100.0,
                "queued_ms": 100.0,
                "ttft_ms": request["ttft_ms"] + 100.0,
                "e2e_ms": request["e2e_ms"] + 100.0,
            }
            for request in case.notes["requests"]
        ]
        notes = {**case.notes, "requests": requests, "traffic": {"requests": 8, "good": 0}}
        return replace(record, cases=(replace(case, notes=notes),))

    options = {"requests": True, "limits": {"ttft_ms": 90.0, "tpot_ms": 30.0, "e2e_ms": 130.0}}
    cells = make_cell("a/cell", **options), make_cell("b/cell", change=waited, **options)
    sent, queued = (json.loads(printed(capsysbinary, cell, "vllm"))[0] for cell in cells)
    for key in ("start_times", "ttfts", "mean_e2el_ms", "duration", "request_goodput"):
        assert queued[key] == pytest.approx(sent[key]), key
    assert queued["request_goodput"] == pytest.approx(8 / queued["duration"])
    options["limits"]["tpot_ms"] = 1.0
    missed = printed(capsysbinary, make_cell("c/cell", **options), "vllm")
    assert json.loads(missed)[0]["request_goodput"] == 0.0


def test_the_github_export_has_its_fields(study, capsysbinary):
    entries = json.loads(printed(capsysbinary, study / "kernel", "github"))
    assert {e["name"] for e in entries} == {
        f"decode, 64 reqs, ctx 128 [{arm}]" for arm in ("binary_search", "seq_map", "control")
    }
    assert all(e["unit"] == "us" and e["value"] > 0 and "range" in e for e in entries)
    assert "% less time per launch" in next(e for e in entries if "seq_map" in e["name"])["extra"]


def test_quartiles_that_lie_close_together_are_not_0_apart(make_cell, capsysbinary):
    """The range of seconds was "IQR 0.00"."""

    def seconds(record):
        value = 1.0 + 0.001234 * (record.block % 2)
        metric = Metric("request_s", "s", "lower", True, (value,))
        cases = tuple(replace(case, metrics=(metric,)) for case in record.cases)
        return replace(record, cases=cases)

    entries = json.loads(printed(capsysbinary, make_cell("a/cell", change=seconds), "github"))
    assert {entry["range"] for entry in entries} == {"IQR 0.00123"}


def test_a_metric_with_a_space_in_its_name_is_one_word_for_benchstat(make_cell, capsysbinary):
    def own(record):
        metric = Metric("my score", "points", "higher", True, (7.5,))
        cases = tuple(replace(case, metrics=(metric,)) for case in record.cases)
        return replace(record, cases=cases)

    cell = make_cell("a/cell", change=own, cases=("one",))
    text = printed(capsysbinary, cell, "benchstat")
    assert text.startswith("Unit my_score better=higher\n") and "-2 1 7.5 my_score\n" in text


def test_entries_of_two_metrics_of_a_case_have_names_of_their_own(make_cell, capsysbinary):
    """The benchmark action finds an entry's history by its name."""

    def second(record):
        cases = []
        for case in record.cases:
            first = [m for m in case.metrics if m.primary]
            more = [replace(m, name=f"single_{m.name}") for m in first]
            cases.append(replace(case, metrics=(*first, *more)))
        return replace(record, cases=tuple(cases))

    entries = json.loads(printed(capsysbinary, make_cell("a/cell", change=second), "github"))
    names = [entry["name"] for entry in entries]
    assert len(set(names)) == len(names) >= 6


def test_a_cell_is_reported_from_within_its_folder(make_cell, monkeypatch):
    monkeypatch.chdir(make_cell("study/cell"))
    assert main(["."]) == 0


def refusal(capsys, *argv):
    assert main([str(a) for a in argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


def test_errors_are_one_line_and_exit_code_2(study, tmp_path, capsys):
    assert "needs a request workload" in refusal(capsys, study / "kernel", "--format", "vllm")
    assert "needs metrics of one direction" in refusal(capsys, study, "--format", "github")
    assert "no such directory" in refusal(capsys, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "has no cell" in refusal(capsys, tmp_path / "empty")
    record = next((study / "chat" / "runs").glob("*.json"))
    record.write_text("{")
    assert record.name in refusal(capsys, study)
    with pytest.raises(SystemExit) as stop:
        main([str(study), "--format", "docx"])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("labkit.report: argument --format: invalid")


def test_pyperf_without_times_is_refused(make_cell, capsys):
    def rates_only(record):
        case = record.cases[0]
        metrics = tuple(m for m in case.metrics if m.unit == "tok/s")
        return replace(record, cases=(replace(case, metrics=metrics),))

    cell = make_cell("study/cell", requests=True, change=rates_only)
    assert "pyperf needs time metrics" in refusal(capsys, cell, "--format", "pyperf")


def test_a_cell_without_cell_json_is_shown_and_claims_nothing(make_cell, capsys):
    """The declared design is lost with cell.json; the numbers are not."""
    path = make_cell("study/cell")
    whole = analyse_cell(path)["rows"][0]
    (path / "cell.json").unlink()
    for _ in range(2):
        assert main([str(path.parent)]) == 0
        assert not (path / "cell.json").exists()
        cell = analyse_cell(path)
        row = cell["rows"][0]
        assert row["arms"] == whole["arms"]
        assert row["comparisons"][0]["effect_pct"] == whole["comparisons"][0]["effect_pct"]
        assert {c["verdict"] for r in cell["rows"] for c in r["comparisons"]} == {"estimate_only"}
        design = cell["design"]
        assert (design["blocks"], design["runs_per_block"], design["control"]) == (4, 2, True)
    assert "cell.json was lost" in (path.parent / "report.md").read_text()


def test_a_broken_study_writes_nothing(study, capsys):
    record = next((study / "kernel" / "runs").glob("*.json"))
    record.write_text("{")
    before = snapshot(study)
    refusal(capsys, study)
    assert snapshot(study) == before


@pytest.mark.parametrize("name", ["study/cell", "tables", "plots"])
def test_no_report_is_written_through_a_link_in_somebodys_study(make_cell, tmp_path, capsys, name):
    """The answer can still be printed, which reads only."""
    cell, elsewhere = make_cell("study/cell", blocks=2), tmp_path / "elsewhere"
    link = cell if name == "study/cell" else cell.parent / name
    if link.exists():
        link.rename(elsewhere)
    elsewhere.mkdir(exist_ok=True)
    link.symlink_to(elsewhere, target_is_directory=True)
    before = snapshot(cell.parent), snapshot(elsewhere)
    assert main([str(cell.parent)]) == 2
    assert f"{link} is a link" in capsys.readouterr().err
    assert (snapshot(cell.parent), snapshot(elsewhere)) == before
    assert main([str(cell.parent), "--format", "csv"]) == 0


def test_study_json_lists_cells_and_adjusts_over_all(study):
    write_study(study, plots=False)
    summary = json.loads((study / "study.json").read_text())
    assert [c["cell"] for c in summary["cells"]] == ["chat", "kernel"]
    assert summary["exit_code"] == 0 and {c["status"] for c in summary["cells"]} == {0}
    assert summary["cells"][1]["gates"] == dict.fromkeys(
        ("healthy", "engaged", "identical"), "pass"
    )
    family = {(x["cell"], x["metric"], x["arm"]): x["p_adjusted"] for x in summary["family"]}
    single = analyse_cell(study / "kernel")["rows"][0]["comparisons"][0]["p"]
    assert family["kernel", "dispatch_us", "seq_map"] >= single


def test_the_terminal_table_fits_100_and_80_columns(study, capsys):
    for width in (100, 80):
        out = io.StringIO()
        print_cell(study / "kernel", Console(width=width, file=out))
        *lines, report = out.getvalue().splitlines()
        assert report == f"report: {study / 'report.md'}"
        assert max(map(len, lines)) <= width
        assert any("better" in line and "−" in line for line in lines)
        assert ("publ." in out.getvalue()) is (width == 100)


def test_no_two_of_many_arms_look_alike():
    """A dash shows in a line only, and a mark in a dot only: colour and mark, colour and dashes."""
    arms = [{"name": f"arm{i}", "role": "arm" if i else "baseline"} for i in range(NUM_STYLES)]
    assert NUM_STYLES == 24
    classes = arm_classes(planted_cell(arms=arms)).values()
    assert len({(style.split()[0], mark) for style, mark in classes}) == NUM_STYLES
    assert len({style for style, _ in classes}) == NUM_STYLES


def test_the_title_and_the_published_note_name_the_scale(make_cell, published):
    folder = make_cell(published=published)

    def report(**facts):
        cell = json.loads((folder / "cell.json").read_text()) | facts
        (folder / "cell.json").write_text(json.dumps(cell))
        return CellReport(analyse(folder))

    plain, scaled = report(), report(scale="cpu")
    assert scaled.cell.title == f"{plain.cell.title} (scale=cpu)"
    assert "never mixed with ours, which were run with scale=cpu." in "".join(scaled.notes)
    assert "never mixed with ours." in "".join(plain.notes)
