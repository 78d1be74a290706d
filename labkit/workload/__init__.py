"""Workloads: the work that an engine is measured on, such as kernel cases or requests.

To add a workload of a known kind, add a file to ``conf/workload``. To add a kind, write a class
that takes no arguments and set ``workload.kind=package.module:Class``.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import cast

from labkit.config import ConfigError, Experiment, is_class_path
from labkit.engine.user_classes import create_plugin, guard_method
from labkit.workload.workload_protocols import (
    CountedKind,
    Estimate,
    InterleavedArms,
    LiveKind,
    Measurement,
    TurnContext,
    WorkloadKind,
    single_arm_context,
)

METHODS = ("check", "prepare", "apart", "load", "estimate")
_MODULES = {
    "kernel": "kernels.kernel_workload_kind",
    "requests": "requests.request_workload_kind",
    "headroom": "memory_claims_workload_kind",
    "video": "video",
    "scoring": "scoring",
}


def kind_of(experiment: Experiment) -> WorkloadKind:
    """Return the kind of the experiment's workload.

    Raises ``ConfigError`` if the user's class that ``workload.kind`` names cannot be imported or
    created.
    """
    name = experiment.workload.kind
    if is_class_path(name):
        try:
            kind = create_plugin("workload.kind", name, METHODS)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        for method in METHODS:
            guard_method(kind, f"workload.kind={name}", method)
        return cast(WorkloadKind, kind)
    return cast(WorkloadKind, import_module(f"{__name__}.{_MODULES[name]}").KIND)


def check(experiment: Experiment) -> None:
    """Check the workload's settings and files; see ``WorkloadKind.check``."""
    kind_of(experiment).check(experiment)


def prepare(experiment: Experiment) -> None:
    """Check that the engine can serve the workload, and cache inputs; see ``WorkloadKind``."""
    kind_of(experiment).prepare(experiment)


def apart(experiments: Sequence[Experiment]) -> str | None:
    """Return the reason that these arms cannot share a process; see ``WorkloadKind.apart``."""
    if len({experiment.workload.kind for experiment in experiments}) > 1:
        return "the arms have different kinds of workload"
    return kind_of(experiments[0]).apart(experiments)


def not_live(experiments: Sequence[Experiment]) -> str | None:
    """Return the reason that these arms cannot take turns; see ``LiveKind.not_live``."""
    if len({experiment.workload.kind for experiment in experiments}) > 1:
        return "the arms have different kinds of workload"
    kind = kind_of(experiments[0])
    if isinstance(kind, LiveKind):
        return kind.not_live(experiments)
    return f"workload.kind={experiments[0].workload.kind}: its measurement has no turns"


def check_apart(experiments: Sequence[Experiment], reason: str) -> None:
    """Check that the workload can be measured if its arms run in processes one after another.

    ``reason``: why the arms do not share a process, for the message. Raises ``ConfigError`` if the
    workload compares its arms while they are measured, so that all must be alive at that time: its
    kind has a method ``refuse_apart``, which raises it.
    """
    refuse = getattr(kind_of(experiments[0]), "refuse_apart", None)
    if refuse is not None:
        refuse(reason)


def units(experiment: Experiment) -> int:
    """Return the number of requests or windows; 1 of a kind without; see ``CountedKind``."""
    kind = kind_of(experiment)
    return kind.units(experiment) if isinstance(kind, CountedKind) else 1


def load(experiments: Sequence[Experiment], context: TurnContext) -> InterleavedArms:
    """Load the workload of every arm in this process; see ``WorkloadKind.load``."""
    return kind_of(experiments[0]).load(experiments, context)


def measure(experiment: Experiment) -> Measurement:
    """Load, warm up and measure one arm in this process, outside a study."""
    arm = load([experiment], single_arm_context(experiment.seed))
    try:
        arm.warm_up()
        return arm.measure(lambda text: None)[0]
    finally:
        arm.close()


def estimate(experiment: Experiment) -> Estimate:
    """Estimate the wall seconds and memory of one run; see ``WorkloadKind.estimate``."""
    return kind_of(experiment).estimate(experiment)
