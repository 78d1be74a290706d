"""What is asked of an engine: kernel cases or requests.

A new workload of a known kind is one file in ``conf/workload``. A new kind is one module
here that ends in ``KIND = ...``, named as its member of ``labkit.config.WorkloadKind``.
"""

from __future__ import annotations

from importlib import import_module
from typing import cast

from labkit.config import Experiment
from labkit.workload.base import Kind
from labkit.workload.measurement import Estimate, Session


def kind_of(experiment: Experiment) -> Kind:
    """Return the kind of the experiment's workload."""
    module = import_module(f"labkit.workload.{experiment.workload.kind.value}")
    return cast(Kind, module.KIND)


def prepare(experiment: Experiment) -> None:
    """Check the workload and cache its prompts; see ``Kind.prepare``."""
    kind_of(experiment).prepare(experiment)


def load(experiment: Experiment, *, seed: int) -> Session:
    """Make the workload ready in the worker; see ``Kind.load``.

    ``seed`` is the cell's, the same in every run: arms must be given the same input.
    """
    return kind_of(experiment).load(experiment, seed=seed)


def estimate(experiment: Experiment) -> Estimate:
    """Guess one run's seconds and bytes; see ``Kind.estimate``."""
    return kind_of(experiment).estimate(experiment)
