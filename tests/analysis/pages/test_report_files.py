"""The files of a study: each cell is read once, and many cells have pages of their own."""

import json
import os
import pickle
import re
import shutil
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

import pytest

from labkit.analysis.comparison import arm_comparison, cell_analysis
from labkit.analysis.pages import cell_report_content, report_files
from labkit.analysis.pages.article_placeholders import PlaceholderFunctions
from labkit.analysis.statistics.multiple_comparisons import RowPermutations
from labkit.analysis.studies import cell_summary
from labkit.analysis.studies.study_analysis import AnalysisCache
from labkit.archive import archive_study
from labkit.records import open_study, read_cell, record_store
from labkit.records.study_archive import StudyArchive

SEEDS = (1, 2, 3)


@pytest.fixture
def study(make_cell):
    for seed in SEEDS:
        folder = make_cell(f"study/seed={seed}", blocks=3, cases=("one",), seed=seed)
    return folder.parent


@pytest.fixture
def counts(monkeypatch):
    """Count how often cells are read, and their sensitivity analysed."""
    done = Counter()

    def count(module, name):
        function = getattr(module, name)

        def counted(argument):
            done[name] += 1
            return function(argument)

        monkeypatch.setattr(module, name, counted)

    count(cell_analysis, "read_runs")
    count(cell_report_content, "sensitivity_results")
    return done


def apart(monkeypatch):
    monkeypatch.setattr(report_files, "MAX_CELLS_ON_PAGE", 2)


def test_a_report_reads_and_analyses_each_cell_once(study, counts):
    """The tables, the Markdown and the page each began anew."""
    report_files.write_study(study, plots=False)
    assert counts == dict.fromkeys(("read_runs", "sensitivity_results"), len(SEEDS))
    assert not (study / report_files.PAGES).exists()


def test_many_cells_have_pages_of_their_own_and_the_same_results(study, counts, monkeypatch):
    together = report_files.write_study(study, plots=False)
    one_page = (study / "report.html").read_text()
    apart(monkeypatch)
    cache = AnalysisCache(max_records=1)
    assert report_files.write_study(study, plots=False, analysis_cache=cache) == together
    assert len(cache._known) == 1  # the memory of one cell
    page, text = ((study / f"report.{end}").read_text() for end in ("html", "md"))
    assert len(page) < 0.7 * len(one_page)
    for cell in together.cells:
        assert f'href="cells/{cell.dir}.html">' in page and cell.answer in text
        own = (study / "cells" / f"{cell.dir}.html").read_text()
        assert f'href="../{cell.dir}/' in own and 'href="../report.html">study' in own
        assert cell.answer in (study / "cells" / f"{cell.dir}.md").read_text()
    assert "## Verdicts" not in text and not list(study.glob("plots/*"))
    tables = [path.read_text() for path in (study / "tables").glob("*.tex")]
    captions = {re.search(r"\\caption\{.*\}", table)[0] for table in tables}
    assert len(captions) == len(tables) == len(together.cells)


def test_an_article_links_to_the_page_of_its_cell(study, monkeypatch):
    apart(monkeypatch)
    cell = report_files.write_study(study, plots=False).cells[-1].dir
    functions = PlaceholderFunctions(study.parent, AnalysisCache())
    case = read_cell(study / cell)["rows"][0]["case"]
    *_, last = functions._reports(study)
    name = last.analysis.name
    call = f"value({study.name!r}, case={case!r}, cell={name!r})"
    target = unquote(functions.fill(call).target)
    page, _, anchor = target.partition("#")
    assert page == f"{study.name}/cells/{cell}.html"
    assert f'id="{anchor}"' in (study.parent / page).read_text()
    table = functions._report(study.name, name)[0].results
    assert {one.link(table.lines[0]) for one in table.columns if one.link} == {f"#{anchor}"}


class PoolInOneProcess:
    """A pool that only copies arguments and results, as processes do."""

    def __init__(self, workers, *options):
        assert workers == 2

    def map(self, function, *arguments):
        for each in zip(*arguments, strict=False):
            yield pickle.loads(pickle.dumps(function(*pickle.loads(pickle.dumps(each)))))

    def shutdown(self, cancel_futures):
        assert cancel_futures


def test_several_processes_write_the_same_pages(study, monkeypatch):
    apart(monkeypatch)
    report_files.write_study(study, plots=False)

    def texts():
        return {path: path.read_text() for path in study.rglob("*.*") if path.suffix != ".json"}

    alone, summary = texts(), (study / "study.json").read_bytes()
    for path in (study / "cells").iterdir():
        path.unlink()
    monkeypatch.setattr(report_files, "ProcessPoolExecutor", PoolInOneProcess)
    monkeypatch.setattr(report_files, "CELLS_PER_TASK", 2)
    cache = AnalysisCache()
    report_files.write_study(study, plots=False, analysis_cache=cache, processes=3)
    assert texts() == alone and (study / "study.json").read_bytes() == summary
    assert cache._known == {} and len(cache._counts) == len(SEEDS)


@pytest.mark.parametrize("cells", [3, 6])
def test_each_cell_costs_the_same_however_many_there_are(make_cell, counts, monkeypatch, cells):
    apart(monkeypatch)
    for seed in range(cells):
        folder = make_cell(f"study/seed={seed}", blocks=3, cases=("one",), seed=seed)

    def count(name, owner):
        function = getattr(owner, name)

        def counted(*arguments):
            counts[name] += 1
            return function(*arguments)

        monkeypatch.setattr(owner, name, counted)

    count("read_record", record_store)
    count("inverted_test", RowPermutations)
    for module in (arm_comparison, cell_summary):
        count("paired_tests", module)
    report_files.write_study(folder.parent, plots=False)
    runs = len(list((folder / "runs").glob("*.json")))
    each = {"read_runs": 1, "read_record": runs, "sensitivity_results": 1}
    each |= {"inverted_test": 2 * 2}  # of arm and control: alone and in the family
    each |= {"paired_tests": 2 * 2 + 2}  # primary rows and others; twice for the study's family
    assert counts == {name: cells * number for name, number in each.items()}


def test_an_unchanged_cell_is_not_read_again(study, counts, monkeypatch):
    apart(monkeypatch)

    def rewritten(study=study):
        counts.clear()
        family = Counter()
        monkeypatch.setattr(
            "labkit.analysis.studies.study_analysis.joint_p_values",
            lambda tests: family.update(n=1) or [[1.0] * len(one) for one in tests],
        )
        report_files.write_study(study, plots=False, analysis_cache=AnalysisCache())
        return counts["read_runs"], family["n"]

    assert rewritten() == (len(SEEDS), 1)
    files = {path: path.read_bytes() for path in study.rglob("*") if path.is_file()}
    assert rewritten() == (0, 0)
    assert {path: path.read_bytes() for path in study.rglob("*") if path.is_file()} == files
    run = next((study / "seed=2" / "runs").glob("*.json"))
    os.utime(run, ns=(1, 1))
    assert rewritten() == (0, 0)  # its content decides
    run.with_suffix(".log").write_text("a line")
    assert rewritten() == (1, 1)
    moved = Path(shutil.copytree(study, study.parent / "elsewhere" / study.name))
    assert rewritten(moved) == (0, 0)
    renamed = Path(shutil.copytree(study, study.parent / "renamed"))
    assert rewritten(renamed) == (len(SEEDS), 1)  # pages show the study's name
    facts = json.loads((study / "seed=3" / "cell.json").read_text())
    (study / "seed=3" / "cell.json").write_text(json.dumps({**facts, "question": "Really?"}))
    assert rewritten() == (1, 1) and "Really?" in (study / "cells" / "seed=3.html").read_text()
    (study / "cells" / "seed=1.html").unlink()
    (study / "cells" / "seed=2.json").write_text("{}")
    assert rewritten()[0] == 2
    next((study / "seed=1" / "runs").glob("b02*.json")).unlink()  # an unfinished cell is not stored
    assert rewritten()[0] == rewritten()[0] == 1


def test_an_archive_has_no_pages_of_cells_and_unpacks_each_cell_once(
    study, counts, tmp_path, monkeypatch
):
    """Each cell was unpacked once more, to find out that it is a cell."""
    apart(monkeypatch)
    report_files.write_study(study, plots=False)
    archive = tmp_path / "study.zip"
    archive_study(study, archive)
    unpacked = Counter()
    unpack = StudyArchive._unpack
    monkeypatch.setattr(
        StudyArchive, "_unpack", lambda self, name: unpacked.update([name]) or unpack(self, name)
    )
    report_files.write_study(archive, plots=False)
    assert list(unpacked.values()) == [1] * len(SEEDS)
    files = open_study(archive).archive.files
    assert "report.html" in files and not any(name.startswith("cells/") for name in files)
    report_files.write_study(archive, plots=False)
    assert list(unpacked.values()) == [1] * len(SEEDS)
    page = (tmp_path / "study.report" / "cells" / "seed=1.html").read_text()
    assert 'href="../../study.zip#seed=1/' in page


def test_a_damaged_summary_of_an_unchanged_study_is_written_again(study, monkeypatch):
    apart(monkeypatch)
    report_files.write_study(study, plots=False)
    whole = (study / "study.json").read_bytes()
    for damaged in ("{", "[]"):
        (study / "study.json").write_text(damaged)
        report_files.write_study(study, plots=False)
        assert (study / "study.json").read_bytes() == whole
