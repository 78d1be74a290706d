"""Check, before a run starts, that this machine has the device and packages of an arm."""

from __future__ import annotations

from labkit.config import GPU, Attention, ConfigError, Device, Experiment, require
from labkit.config.engine.attention import MLX_BACKENDS, MLX_POOL_BACKENDS
from labkit.config.package_extras import MLX_PACKAGES, require_packages
from labkit.machine.facts.mlx_default_device import mlx_gpu


def queued(attention: Attention) -> bool:
    """Return whether launches wait in a device's queue.

    Only a GPU has such a queue; labkit's CPU kernels and MLX on a CPU have none.
    """
    gpu = mlx_gpu()
    return gpu is not None and (
        attention.backend in MLX_POOL_BACKENDS or attention.device.value == gpu
    )


def check(experiment: Experiment) -> None:
    """Raise ``ConfigError`` if this machine lacks the arm's device, a compiler or packages."""
    check_packages(experiment)
    device, mlx_device = experiment.engine.attention.device, mlx_gpu()
    lacking = {
        Device.metal: "there is no Metal on this machine; set engine.attention.device=emulated or "
        "cpu",
        Device.cuda: "there is no NVIDIA driver or no mlx[cuda13] on this machine; set "
        "engine.attention.device=cpu",
    }
    require(
        device not in lacking or mlx_device == device.value,
        f"engine.attention.device={device.value}: {lacking.get(device)}",
    )
    gpus = {GPU.metal: mlx_device == "metal", GPU.any: mlx_device is not None}
    for name, gpu in experiment.engine.mlx.gpu_options():
        require(
            gpus[gpu],
            f"engine.mlx.{name} has an effect on {gpu.value} only, and this machine has none; "
            "leave it null",
        )
    if device is Device.emulated:
        from labkit.metal.emulator import EmulatorUnavailable
        from labkit.metal.emulator.cpp_compilation import find_compiler

        try:
            find_compiler()
        except EmulatorUnavailable as error:
            raise ConfigError(f"engine.attention.{error}") from None


def check_packages(experiment: Experiment) -> None:
    """Raise ``ConfigError`` if MLX or a reader of models is not installed, but the arm needs it."""
    attention, workload = experiment.engine.attention, experiment.workload
    on_mlx = attention.device is not Device.cpu or attention.backend in MLX_BACKENDS
    if workload.kind != "video" and (on_mlx or not workload.times_kernels):
        require_packages(MLX_PACKAGES, "mlx", f"workload={workload.name}")
