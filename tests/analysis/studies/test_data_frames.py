"""A study as data frames: runs, verdicts and requests, with the options that vary."""

import json

import pytest

from labkit.analysis import analyse_cell, load
from labkit.records import DIGESTS_FILE, RecordError


def test_options_that_vary_are_columns_of_every_table(make_cell):
    make_cell("study/a", requests=True, clients=1)
    study = make_cell("study/b", requests=True, clients=8).parent
    for table in ("runs", "verdicts", "requests"):
        frame = load(study, table)
        assert set(frame["workload.concurrency"][frame.cell == "b"]) == {8}
        assert "engine.name" not in frame and len(frame)
    alone = load(study / "a")
    assert "workload.concurrency" not in alone


def test_verdicts_are_those_of_the_cells_file(make_cell):
    path = make_cell()
    frame = load(path.parent, "verdicts").set_index(["case", "arm"])
    for row in analyse_cell(path)["rows"]:
        for one in row["comparisons"]:
            line = frame.loc[row["case"], one["arm"]]
            assert (line.verdict, line.effect_pct) == (one["verdict"], one["effect_pct"])
            assert line["median"] == row["arms"][one["arm"]]["median"]
        assert frame.loc[row["case"], "binary_search"].isna().verdict


def test_requests_have_a_line_each(make_cell):
    frame = load(make_cell(requests=True).parent, "requests")
    assert len(frame) == 24 * 8 and set(frame.id) == {f"r{i:03d}" for i in range(8)}
    assert frame.itl_ms.map(len).eq(3).all() and frame.ttft_ms.notna().all()
    assert load(make_cell("kernels/cell").parent, "requests").empty


def test_an_unknown_table_is_one_line(make_cell):
    with pytest.raises(RecordError, match="table 'cells': must be one of: runs, verdicts, requ"):
        load(make_cell().parent, "cells")


def test_edited_records_are_refused_and_old_ones_named_in_a_warning(make_cell):
    path = make_cell()
    record = next((path / "runs").glob("*.json"))
    data = json.loads(record.read_text())
    data["cases"][0]["metrics"][0]["repeats"][0] *= 2
    record.write_text(json.dumps(data))
    for table in ("runs", "verdicts", "requests"):
        with pytest.raises(RecordError, match="was edited after it was written"):
            load(path.parent, table)
    (path / DIGESTS_FILE).unlink()
    with pytest.warns(UserWarning, match=r"24 of 24 records have no digest"):
        assert len(load(path.parent))
