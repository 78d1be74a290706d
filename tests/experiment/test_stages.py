"""What a run settles before its engine loads."""

from __future__ import annotations

import pytest

from labkit.config import Experiment, from_plain
from labkit.experiment import stages
from labkit.platform import threads


def experiment(**engine):
    return from_plain(
        Experiment,
        {
            "engine": engine,
            "model": {"shape": {}},
            "workload": {"name": "ragged", "kind": "ragged"},
            "ablation": {"arms": {"base": {}}},
        },
    )


@pytest.mark.parametrize(
    ("engine", "blas_threads"),
    [
        ({"name": "mlx_lm", "threads": 3}, 3),
        ({"name": "mlx_lm"}, 5),
        ({"name": "paged", "threads": 3}, 1),
        ({"name": "paged"}, 1),
    ],
)
def test_the_budget_goes_to_the_pool_that_does_the_work(engine, blas_threads, monkeypatch):
    monkeypatch.setattr(threads, "core_count", lambda: 5)
    assert stages.blas_threads(experiment(**engine)) == blas_threads
    assert stages.budget_threads(experiment(**engine)) == engine.get("threads", 5)
