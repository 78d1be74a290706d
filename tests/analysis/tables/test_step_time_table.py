"""The table of a step's time by part."""

import pytest
from traced_steps import traced_steps

from labkit.analysis.charts.step_player import TracedRun
from labkit.analysis.tables import step_time_table

TIMES = {"schedule": [0, 10], "draft": [4, 2], "build": [10, 5], "plan": [16, 4],
         "forward": [15, 79], "sample": [94, 3], "update": [97, 3]}  # fmt: skip


def test_the_model_s_time_is_the_forward_without_the_plan():
    steps = [{"times_us": TIMES}, {"times_us": TIMES}, {"times_us": {"schedule": [200, 1]}}]
    means = step_time_table.mean_times(steps)
    assert (means["model"], means["plan"], means["step"]) == (75, 4, 100)
    run = TracedRun("paged", "b00-p00-paged", {"steps": steps})
    table = step_time_table.step_time_table([run])
    assert [table.cells(run)[i] for i in (0, 1, 4, 7, 9)] == [
        "paged",
        "10.00",
        "4.00",
        "75.00",
        "25%",
    ]


@pytest.mark.parametrize("pipeline", ["sync", "overlap"])
def test_a_real_trace_has_every_part(pipeline):
    steps = traced_steps(pipeline=pipeline)["steps"]
    means = step_time_table.mean_times(steps)
    assert 0 < means["model"] <= means["step"] and all(means[p] >= 0 for p in means)
