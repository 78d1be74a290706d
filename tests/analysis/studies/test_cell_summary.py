"""What is kept of a cell for the pages of its study."""

from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.studies.cell_summary import cell_summary
from labkit.analysis.studies.increasing_load import load_curves, serving_capacities
from labkit.records import PROCESSES_SUFFIX


def read(path):
    return cell_summary(analyse(path))


def test_a_cell_that_confirms_another_adds_no_load(under_load):
    """It said "keeps 95 % at 4 requests/s, but not at 4", and curves had every load twice."""
    cells = [
        read(under_load(f"study/rate={rate:g}{end}", rate, 20 if end and rate == 4 else 50))
        for rate in (1.0, 2.0, 4.0)
        for end in ("", PROCESSES_SUFFIX)
    ]
    (capacity,) = serving_capacities(cells, [""] * 6)
    assert [load.rate for load in capacity.loads] == [1.0, 2.0, 4.0]
    assert "keeps 95 % of requests within TTFT 500 ms at 4 requests/s (" in capacity.sentence
    (curve,) = load_curves(cells, [""] * 6)
    assert [load.size for load in curve.loads] == [1.0, 2.0, 4.0]
