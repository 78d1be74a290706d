"""Whether this machine has what an arm is about, known before a run starts."""

from __future__ import annotations

from labkit.config import Attention, ConfigError, Device, Experiment, require
from labkit.machine.macos import has_metal


def queued(attention: Attention) -> bool:
    """Tell whether launches wait in a queue: on Metal. MLX on a CPU is timed as a CPU is."""
    on_mlx = attention.device is Device.metal or attention.backend == "gather"
    return on_mlx and has_metal()


def check(experiment: Experiment) -> None:
    """Refuse an arm whose device is not here; ``ConfigError`` says in one line what is missing."""
    device = experiment.engine.attention.device
    if device is Device.metal:
        require(
            has_metal(),
            "engine.attention.device=metal: there is no Metal on this machine; "
            "set engine.attention.device=emulated or cpu",
        )
    variable = experiment.engine.mlx.only_on_metal()
    require(
        variable is None or has_metal(),
        f"engine.mlx.{variable}: it changes what MLX does on Metal, and there is no Metal on this "
        "machine; leave it null",
    )
    if device is Device.emulated:
        from labkit.metal.emulator.cpp_compilation import find_gxx
        from labkit.metal.emulator.emulator_errors import EmulatorUnavailable

        try:
            find_gxx()
        except EmulatorUnavailable as error:
            raise ConfigError(f"engine.attention.{error}") from None
