"""Whole sweeps, with planted times: the answer, the tables and the curves of a study."""

import json
import math
import random
import re
import tempfile
from dataclasses import replace

import pytest
from planted_runs import PlantedRuns

from labkit.analysis.pages import matplotlib_figures
from labkit.analysis.pages.article_placeholders import ArticleError, PlaceholderFunctions
from labkit.analysis.studies.study_analysis import AnalysisCache
from labkit.cli import hydra_arguments, multirun_composition
from labkit.cli.study_runner import StudyRunner
from labkit.config import ConfigError
from labkit.experiment.compose.cell_composer import to_cells
from labkit.machine.facts import machine_snapshot
from labkit.records import CaseRecord, Metric

THREADS = "engine.threads=1,2,4"
SIZES = "engine.kv.block_size=8,16"
DESIGN = ["design.isolation=process"]
DESIGN += ["design.control=false"]


class Planted(PlantedRuns):
    """Throughput by the arm's number of threads, else 500 tok/s.

    Of the requests of a run, all meet the limits up to 4 per second, and half of them above.
    """

    def __init__(self, rates, failing=()):
        super().__init__()
        self.rates, self.failing = rates, failing

    def fields(self, run, cell):
        arm = cell.arm(run.arm)
        if run.arm in self.failing:
            return {"outcome": "oom", "detail": "full"}
        noise = random.Random(f"seed 1 {cell.name} {run.name}").gauss(0, 0.003)
        rate = self.rates.get(arm.config["engine"]["threads"], 500.0) * math.exp(noise)
        metric = Metric("total_tok_s", "tok/s", "higher", True, (rate,))
        offered = arm.config["workload"]["arrivals"]["rate"] or 0.0
        notes = {"traffic": {"requests": 60, "good": 60 if offered <= 4 else 30}}
        metrics = (metric, Metric("goodput_req_s", "req/s", "higher", False, (rate / 100,)))
        return {
            "environment": {"host": machine_snapshot.host_hash()},
            "counters": {"engine.paged": 1.0},
            "cases": (CaseRecord("all", None, metrics, notes=notes),),
        }


@pytest.fixture
def run_study(monkeypatch, tmp_path):
    """Return a function that runs a command's study in this process."""
    multirun_composition.register()
    monkeypatch.setattr("labkit.workload.prepare", lambda experiment: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def run(launcher, *words, blocks=8, plots=False, looks=""):
        if not plots:  # they take most of the time
            monkeypatch.setattr(matplotlib_figures, "write_figures", lambda *_: None)
        words = [*words, f"design.looks=[{looks}]", *DESIGN, f"design.blocks={blocks}"]
        command = hydra_arguments.parse([*words, f"out={tmp_path / 'study'}", "-m"])
        cells = multirun_composition.compose_cells(multirun_composition.with_sweep_as_arms(command))
        study = StudyRunner(tmp_path / "study", cells, launcher)
        study.refuse_changes()
        for cell in cells:
            study.run(cell.name, study.out / cell.name)
        return study, study.finish()

    return run


def cell_of(study):
    (path,) = study.out.glob("*/cell.json")
    return json.loads(path.read_text())


def test_a_sweep_names_the_best_setting_with_its_interval(run_study, capsys):
    launcher = Planted({1: 400.0, 2: 500.0, 4: 520.0})
    study, code = run_study(launcher, THREADS, plots=True)
    assert code == 0 and len(launcher.launched) == 24
    cell = cell_of(study)
    (best,) = cell["best"]
    assert cell["sweep"] == {"engine.threads": [1, 2, 4]}
    assert (best["best"], best["reference"]) == ("threads=4", "threads=1")
    assert best["possibly_best"] == ["threads=4"]
    assert best["ci_low_pct"] < 30.0 < best["ci_high_pct"] and best["level"] == 0.95
    assert best["effect_pct"] == pytest.approx(30.0, abs=1.0)
    report = (study.out / "report.md").read_text()
    answer = "On this machine threads=4 is the best of 3 settings in throughput: it "
    assert "**Best is threads=4: throughput " in report and f"\n{answer}" in report
    lines = [line for line in report.splitlines() if line.startswith(("| 1 |", "| 2 |", "| 4 |"))]
    assert len(lines) == 3 and lines[2].endswith("best |") and "best" not in lines[1]
    assert "total_tok_s-by-threads.png" in report
    assert len(list((study.out / "plots").glob("*total_tok_s-by-threads.svg"))) == 1
    assert 'aria-label="total_tok_s by threads"' in (study.out / "report.html").read_text()
    printed = capsys.readouterr().out
    assert answer in " ".join(printed.split())
    rows = re.findall(r"^ +([124]) +[\d.]+( best)? *$", printed, re.MULTILINE)
    assert rows == [("1", ""), ("2", ""), ("4", " best")]
    again = Planted({})
    run_study(again, THREADS)
    assert len(again.launched) == 0


def test_settings_that_cannot_be_told_apart_are_named(run_study):
    study, _ = run_study(Planted({1: 400.0, 2: 500.0, 4: 500.0}), THREADS)
    (best,) = cell_of(study)["best"]
    assert sorted(best["possibly_best"]) == ["threads=2", "threads=4"]
    report = (study.out / "report.md").read_text()
    assert "**Undecided: 2 of 3 settings may be best for throughput; measured best: " in report
    assert "\nNot decided: 2 of 3 settings may be the best in throughput; the best meas" in report
    assert report.count(" ~ |") == 1


def test_several_options_make_a_table_with_columns(run_study, tmp_path):
    study, _ = run_study(Planted({1: 400.0, 2: 500.0, 4: 600.0}), THREADS, SIZES, blocks=2)
    report = (study.out / "report.md").read_text()
    assert "| threads | block_size=8 | block_size=16 |\n| ---: | ---: | ---: |\n| 1 | " in report
    functions = PlaceholderFunctions(tmp_path, AnalysisCache())
    table = functions.fill('settings("study")').text
    assert table.startswith("| threads | block_size=8 | block_size=16 |")
    assert table in report
    with pytest.raises(ArticleError, match="there is no row 'nothing'"):
        functions.fill('settings("study", row="nothing")')


def test_a_setting_that_fails_is_excluded_and_named(run_study):
    launcher = Planted({1: 400.0, 2: 500.0}, failing=("threads=4",))
    study, code = run_study(launcher, THREADS, blocks=6)
    (best,) = cell_of(study)["best"]
    assert code == 1
    assert "threads=4" in best["excluded"] and "threads=4" not in best["values"]


def test_too_few_blocks_give_estimates_only(run_study):
    study, _ = run_study(Planted({1: 400.0}), THREADS, blocks=2)
    (best,) = cell_of(study)["best"]
    assert best["best"] in ("threads=2", "threads=4") and best["ci_low_pct"] is None
    assert "2 blocks of 1: a claim needs at least 6" in best["withheld"]
    report = (study.out / "report.md").read_text()
    assert "**Estimate only: threads=2 looks best of 3 for throughput (502 tok/s).**" in report
    assert "\nNot decided: which of 3 settings is best in throughput; an estimate only" in report


def test_cells_are_in_numerical_order_and_named_by_what_varies(run_study):
    study, _ = run_study(Planted({}), "workload.concurrency=16,2,8", blocks=1)
    report = (study.out / "report.md").read_text()
    lines = [line for line in report.splitlines() if line.startswith("| concurrency=")]
    assert [line.split(" | ")[0] for line in lines] == [
        "| concurrency=2", "| concurrency=8", "| concurrency=16",
    ]  # fmt: skip
    assert "| cell | total_tok_s (tok/s) | answer | gates |" in report
    assert "so no test compares them" in report


def test_a_long_name_is_shown_in_full(run_study):
    words = ["engine.scheduler.max_num_batched_tokens=128,256,512,1024", THREADS, "seed=12345"]
    study, _ = run_study(Planted({}), *words, blocks=1)
    (folder,) = (path.name for path in study.out.glob("*=*"))
    assert len(folder) == 120 and words[0] not in folder
    assert all(word in (study.out / "report.md").read_text() for word in words)


def test_a_sweep_of_rates_reports_the_capacity(run_study):
    words = ["workload=chat_poisson", "workload.capacity=95", "workload.arrivals.rate=16,2,4,8"]
    study, _ = run_study(Planted({}), *words)
    report = (study.out / "report.md").read_text()
    answer = "base keeps 95 % of requests within TTFT 1000 ms and TPOT 100 ms at 4 requests/s, "
    answer += "but not at 8 (95 % confidence); estimated capacity 4.29 requests/s."
    assert "**Base sustains 4 requests/s, not 8.**" in report and f"**{answer}**" in report
    assert "| base | 4 | 8 | 480 | 100.0 % | " in report
    assert answer in (study.out / "report.html").read_text()


def test_rates_far_from_the_capacity_stop_at_a_look(run_study):
    class Near(Planted):
        def fields(self, run, cell):
            fields = super().fields(run, cell)
            rate = cell.arm(run.arm).config["workload"]["arrivals"]["rate"]
            self.blocks = {**getattr(self, "blocks", {}), rate: run.block + 1}
            if rate != 8:
                return fields
            notes = {"traffic": {"requests": 60, "good": 57}}
            return fields | {"cases": (replace(fields["cases"][0], notes=notes),)}

    launcher, words = Near({}), ["workload=chat_poisson", "workload.capacity=95"]
    words += ["workload.arrivals.rate=4,8,16", "design.time=null"]
    run_study(launcher, *words, blocks=12, looks="{blocks:8,alpha:0.01}")
    assert launcher.blocks == {4: 8, 8: 12, 16: 8}


def test_a_capacity_needs_limits_and_a_rate(run_study):
    for words in (
        ["workload=chat"],
        ["workload=chat_poisson", "workload.limits={ttft_ms:null,tpot_ms:null}"],
    ):
        with pytest.raises(ConfigError, match="needs limits and a rate"):
            run_study(Planted({}), *words, "workload.capacity=95")


SEARCH = ["engine.threads=1,2,3,4,5,6", "design=search", "design.isolation=process"]


@pytest.fixture
def run_search(monkeypatch, tmp_path):
    """Return a function that runs a search in this process: its cell.json and number of runs."""
    multirun_composition.register()
    monkeypatch.setattr("labkit.workload.prepare", lambda experiment: None)
    monkeypatch.setattr(matplotlib_figures, "write_figures", lambda *_: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def run(launcher, *words):
        command = hydra_arguments.parse([*SEARCH, *words, f"out={tmp_path / 'search'}", "-m"])
        (cell,) = multirun_composition.compose_cells(
            multirun_composition.with_sweep_as_arms(command)
        )
        study = StudyRunner(tmp_path / "search", [cell], launcher)
        study.refuse_changes()
        study.run(cell.name, study.out / cell.name)
        assert study.finish() == 0
        return cell_of(study)

    return run


def runs_by_arm(cell):
    order = [arm for block in cell["design"]["order"] for arm in block]
    return {arm["name"]: order.count(arm["name"]) for arm in cell["arms"]}


RATES = {1: 400.0, 2: 420.0, 3: 440.0, 4: 500.0, 5: 500.2, 6: 460.0}


def test_a_search_drops_settings_at_looks_and_keeps_the_baseline(run_search):
    launcher = Planted(RATES)
    cell = run_search(launcher)
    (best,) = cell["best"]
    assert set(best["dropped"]) == {f"threads={n}" for n in (2, 3, 6)}
    assert set(best["dropped"].values()) == {8}
    runs = runs_by_arm(cell)
    assert [runs[f"threads={n}"] for n in range(1, 7)] == [24, 8, 8, 24, 24, 8]
    counted = [name for name in launcher.launched if not name.startswith("b999")]  # the pilot's
    assert runs["control"] == 24 and len(counted) == sum(runs.values())
    assert sorted(best["possibly_best"]) == ["threads=4", "threads=5"]
    assert best["values"]["threads=2"] == pytest.approx(420.0, rel=0.01)
    assert best["level"] == pytest.approx(1 - 0.0125)
    again = Planted(RATES)
    run_search(again)
    assert len(again.launched) == 0


def test_an_interrupted_search_continues_without_the_dropped_settings(run_search):
    class Killed(Planted):
        def record(self, run, cell):
            if run.block == 10:
                raise OSError(28, "No space left on device")
            return super().record(run, cell)

    with pytest.raises(AssertionError):  # the study is not complete
        run_search(Killed(RATES))
    whole = Planted(RATES)
    cell = run_search(whole)
    assert runs_by_arm(cell)["threads=2"] == 8
    assert len(whole.launched) == 14 * 4


def test_a_search_ends_when_one_setting_is_left(run_search):
    cell = run_search(Planted({4: 600.0}))
    assert cell["best"][0]["possibly_best"] == ["threads=4"]
    assert cell["design"]["looks_taken"] == [{"blocks": 8, "alpha": 0.0125, "decided": True}]


def test_a_search_may_be_confirmed_and_needs_a_look_before_its_end(tmp_path):
    multirun_composition.register()
    words = ["engine.kv.block_size=8,16", "design=search", "-m"]

    def composed(*more):
        command = multirun_composition.with_sweep_as_arms(hydra_arguments.parse([*words, *more]))
        return multirun_composition.compose_cells(command)[0]

    searched, confirming = to_cells(composed("design.confirm=8"), tmp_path / "cell")
    assert searched.design.eliminate and not confirming.design.eliminate
    with pytest.raises(ConfigError, match="none comes before the last block"):
        to_cells(composed("design.blocks=6"), tmp_path / "cell")


def test_a_search_needs_a_sweep_and_looks():
    multirun_composition.register()
    with pytest.raises(ConfigError, match="only settings of a sweep are dropped"):
        multirun_composition.compose_cells(
            hydra_arguments.parse(["design=search", "ablation=composition", "-m"])
        )
    with pytest.raises(ConfigError, match=r"set design\.looks or design=search"):
        multirun_composition.compose_cells(
            hydra_arguments.parse(["design.eliminate=true", "design.looks=[]", "-m"])
        )
