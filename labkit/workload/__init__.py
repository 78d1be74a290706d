"""What is asked of an engine: kernel cases or requests.

A new workload of a known kind is one file in ``conf/workload``. A new kind is a class of the
user's own, named as ``workload.kind=package.module:Class`` and made without arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import cast

from labkit.config import ConfigError, Experiment, is_class_path
from labkit.engine.plugins import create_plugin
from labkit.workload.interleaving import (
    InterleavedArms,
    TurnContext,
    WorkloadKind,
    single_arm_context,
)
from labkit.workload.measurement import Estimate, Measurement

METHODS = ("check", "prepare", "apart", "load", "estimate")
_MODULES = {
    "kernel": "kernel_workload",
    "requests": "request_workload",
    "headroom": "memory_claims",
    "video": "video",
}


def kind_of(experiment: Experiment) -> WorkloadKind:
    """Return the kind of the experiment's workload.

    Raises
    ------
    ConfigError
        A class of the user's own cannot be loaded or made.
    """
    name = experiment.workload.kind
    if is_class_path(name):
        try:
            return cast(WorkloadKind, create_plugin("workload.kind", name, METHODS))
        except ValueError as error:
            raise ConfigError(str(error)) from None
    return cast(WorkloadKind, import_module(f"{__name__}.{_MODULES[name]}").KIND)


def check(experiment: Experiment) -> None:
    """Check what can be known before anything is written; see ``WorkloadKind.check``."""
    kind_of(experiment).check(experiment)


def prepare(experiment: Experiment) -> None:
    """Check the workload and cache its prompts; see ``WorkloadKind.prepare``."""
    kind_of(experiment).prepare(experiment)


def apart(experiments: Sequence[Experiment]) -> str | None:
    """Say why these arms cannot share a process; see ``WorkloadKind.apart``."""
    if len({experiment.workload.kind for experiment in experiments}) > 1:
        return "the arms have workloads of different kinds"
    return kind_of(experiments[0]).apart(experiments)


def load(experiments: Sequence[Experiment], context: TurnContext) -> InterleavedArms:
    """Make the workload ready in the worker; see ``WorkloadKind.load``."""
    return kind_of(experiments[0]).load(experiments, context)


def measure(experiment: Experiment) -> Measurement:
    """Load, warm up and measure one arm in this process, outside any study."""
    turns = load([experiment], single_arm_context(experiment.seed))
    try:
        turns.warm_up()
        return turns.measure(lambda text: None)[0]
    finally:
        turns.close()


def estimate(experiment: Experiment) -> Estimate:
    """Guess one run's seconds and bytes; see ``WorkloadKind.estimate``."""
    return kind_of(experiment).estimate(experiment)
