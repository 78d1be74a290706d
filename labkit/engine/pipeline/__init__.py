"""When a step's results are processed, one file per answer."""

from __future__ import annotations

from labkit.config import Pipeline as Name
from labkit.engine.pipeline.base import Launch, Pipeline, RunModel, Sample
from labkit.engine.pipeline.overlap import Overlap
from labkit.engine.pipeline.sync import Sync
from labkit.engine.stats import Counters


def create(
    name: Name,
    run_model: RunModel,
    sample: Sample,
    counters: Counters,
    launch: Launch | None = None,
) -> Pipeline:
    """Return the pipeline of ``engine.pipeline``; ``launch``: see ``Overlap``."""
    if name is Name.overlap:
        return Overlap(run_model, sample, counters, launch)
    return Sync(run_model, sample)
