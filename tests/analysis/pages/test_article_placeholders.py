"""Placeholders of studies that no committed article has; ``tests/test_post.py`` has the others."""

import re
from dataclasses import replace

import pytest

from labkit.analysis.pages.article_placeholders import ArticleError, PlaceholderFunctions
from labkit.analysis.studies.study_analysis import AnalysisCache
from labkit.records import publish_arm, read_arm


@pytest.fixture
def fill(tmp_path):
    """Return a function that fills a placeholder of ``study``, which has a page."""

    def filled(call):
        (tmp_path / "study" / "report.html").touch()
        return PlaceholderFunctions(tmp_path, AnalysisCache()).fill(call).text

    return filled


def test_a_heading_of_several_columns_selects_none(make_cell, fill, published):
    """The last of them won."""
    table = {"title": "t", "columns": ["case", "ms", "ms"], "rows": [["x", 2, 3]]}
    make_cell("study/cell", published={**published, "tables": [table]})
    call = 'table("study", section="Published by others", number=2, columns=["{}"])'
    assert "| x |" in fill(call.format("case"))
    with pytest.raises(ArticleError, match="several columns have the heading 'ms'"):
        fill(call.format("ms"))


def test_the_file_of_a_failed_run_is_no_place_of_the_report(make_cell, fill):
    """It was linked as ``report.htmlruns/...``."""

    def out_of_memory(record):
        failed = replace(record, outcome="oom", detail="no memory", cases=())
        return failed if record.arm == "large" else record

    effects = {"seq_map": 0.95, "large": 1.0}
    cell = make_cell("study/cell", effects=effects, change=out_of_memory)
    arm = read_arm(cell / "arms" / "large.json")
    publish_arm(cell, replace(arm, out_of_memory=True))
    failed = fill('table("study", section="Failed runs", columns=["run"])')
    assert re.search(r"^\| b00-p\d+-large and 7 more \|$", failed, re.M)
