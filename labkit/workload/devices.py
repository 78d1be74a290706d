"""Whether this machine has the device of the fused kernels, known before a run starts."""

from __future__ import annotations

import platform
import sys

from labkit.config import Attention, Device, Experiment, require
from labkit.platform import compiler


def has_metal() -> bool:
    """Tell whether this is a Mac with Apple silicon."""
    return sys.platform == "darwin" and platform.machine() == "arm64"


def queued(attention: Attention) -> bool:
    """Tell whether launches wait in a queue: on Metal. MLX on a CPU is timed as a CPU is."""
    on_mlx = attention.device is Device.metal or attention.backend == "gather"
    return on_mlx and has_metal()


def check(experiment: Experiment) -> None:
    """Refuse a device that is not here; ``ConfigError`` says in one line what is missing."""
    device = experiment.engine.attention.device
    if device is Device.metal:
        require(
            has_metal(),
            "engine.attention.device=metal: there is no Metal on this machine; "
            "set engine.attention.device=emulated or cpu",
        )
    if device is Device.emulated:
        require(compiler.path() is not None, f"engine.attention.{compiler.missing()}")
