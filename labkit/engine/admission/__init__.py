"""When waiting requests may join: a strategy per file."""

from __future__ import annotations

from labkit import config
from labkit.engine.admission.base import Admission
from labkit.engine.admission.continuous import Continuous
from labkit.engine.admission.static import Static

__all__ = ["Admission", "create"]


def create(name: config.Admission) -> Admission:
    """Return the admission that the config names."""
    kinds: dict[config.Admission, type[Admission]] = {
        config.Admission.continuous: Continuous,
        config.Admission.static: Static,
    }
    return kinds[name]()
