"""Replications of studies some of whose rows an earlier look decided."""

import pytest

from labkit.analysis.comparison.cell_analysis import analyse
from labkit.analysis.studies import replication

LOOKS = [{"blocks": 4, "alpha": 0.01}, {"blocks": 8, "alpha": 0.04}]


@pytest.mark.usefixtures("fewer_pairs")
@pytest.mark.parametrize(("stopped", "alpha"), [((), 0.04), (("prefill, 8 × 512",), 0.01)])
def test_a_row_that_an_earlier_look_decided_spends_that_look_s_alpha(
    make_cell, stopped, alpha, monkeypatch
):
    taken = {"blocks": 4, "alpha": 0.01, "decided": False, "stopped": stopped}
    path = make_cell(blocks=8, looks=LOOKS, design={"looks_taken": [taken]})
    study = path.parent, [analyse(path)]
    page = replication.replication_of(study, study)
    assert page.alpha == alpha and page.counts == {"replicated": 2}
    levels = []
    monkeypatch.setattr(
        replication, "times_as_long", lambda *args, **_: levels.append(args[3]) or 1.0
    )
    assert len(list(replication.forecast_lines(study[1]))) == 2
    assert levels == [alpha / 2] * 2
