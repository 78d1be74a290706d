"""What is asked of an engine: kernel cases or requests.

A new workload of a known kind is one file in ``conf/workload``. A new kind is one module
here that ends in ``KIND = ...``, named as its member of ``labkit.config.WorkloadKind``.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import cast

from labkit.config import Experiment
from labkit.workload.measurement import Estimate, Measurement
from labkit.workload.turns import Kind, Setting, Turns, by_itself


def kind_of(experiment: Experiment) -> Kind:
    """Return the kind of the experiment's workload."""
    module = import_module(f"labkit.workload.{experiment.workload.kind.value}")
    return cast(Kind, module.KIND)


def prepare(experiment: Experiment) -> None:
    """Check the workload and cache its prompts; see ``Kind.prepare``."""
    kind_of(experiment).prepare(experiment)


def apart(experiments: Sequence[Experiment]) -> str | None:
    """Say why these arms cannot share a process; see ``Kind.apart``."""
    if len({kind_of(experiment) for experiment in experiments}) > 1:
        return "the arms have workloads of different kinds"
    return kind_of(experiments[0]).apart(experiments)


def load(experiments: Sequence[Experiment], setting: Setting) -> Turns:
    """Make the workload ready in the worker; see ``Kind.load``."""
    return kind_of(experiments[0]).load(experiments, setting)


def measure(experiment: Experiment) -> Measurement:
    """Load, warm up and measure one arm in this process, outside any study."""
    turns = load([experiment], by_itself(experiment.seed))
    try:
        turns.warm_up()
        return turns.measure(lambda text: None)[0]
    finally:
        turns.close()


def estimate(experiment: Experiment) -> Estimate:
    """Guess one run's seconds and bytes; see ``Kind.estimate``."""
    return kind_of(experiment).estimate(experiment)
