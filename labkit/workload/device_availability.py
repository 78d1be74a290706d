"""Check, before a run starts, that this machine has the device that an arm needs."""

from __future__ import annotations

from labkit.config import Attention, ConfigError, Device, Experiment, require
from labkit.machine.macos import has_metal


def queued(attention: Attention) -> bool:
    """Return whether launches wait in a device's queue.

    Only Metal has such a queue; labkit's CPU kernels and MLX on a CPU have none.
    """
    on_mlx = attention.device is Device.metal or attention.backend == "gather"
    return on_mlx and has_metal()


def check(experiment: Experiment) -> None:
    """Raise ``ConfigError`` if this machine lacks the arm's device or a compiler for it."""
    device = experiment.engine.attention.device
    if device is Device.metal:
        require(
            has_metal(),
            "engine.attention.device=metal: there is no Metal on this machine; "
            "set engine.attention.device=emulated or cpu",
        )
    variable = experiment.engine.mlx.metal_only_option()
    require(
        variable is None or has_metal(),
        f"engine.mlx.{variable} has an effect on Metal only, and there is no Metal on this "
        "machine; leave it null",
    )
    if device is Device.emulated:
        from labkit.metal.emulator.cpp_compilation import find_gxx
        from labkit.metal.emulator.emulator_errors import EmulatorUnavailable

        try:
            find_gxx()
        except EmulatorUnavailable as error:
            raise ConfigError(f"engine.attention.{error}") from None
