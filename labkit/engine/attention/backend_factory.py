"""Create the attention backend that a config or a caller names."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from labkit.engine import user_classes
from labkit.engine.attention.kernel_switches import KernelSwitches

if TYPE_CHECKING:
    from labkit import config
    from labkit.engine.attention.paged_backend import PagedBackend


DEVICES = ("cpu", "emulated", "metal")
_METHODS = ("allocate", "adopt", "bind", "plan", "forward", "report", "pending")


def create(*, backend: str = "fused", device: str = "cpu", **switches: Any) -> PagedBackend:
    """Create a backend of paged attention.

    Parameters
    ----------
    backend
        ``fused`` (kernels of ``device``), ``gather`` (blocks copied for MLX's attention),
        ``reference`` (the float64 oracle in NumPy) or ``package.module:Class`` (a user's class,
        which is called with the argument ``resolver``).
    device
        Where the fused kernels run: ``cpu``, ``metal`` or ``emulated`` (the Metal kernels
        on a CPU).
    switches
        Fields of ``KernelSwitches``.

    Raises
    ------
    ValueError
        A name is unknown, a number is out of range, a resolver cannot be loaded, or the device
        is not available. The message says which.
    """
    kernel_switches = KernelSwitches(**switches)
    if ":" in backend:
        own_backend: PagedBackend = user_classes.create_plugin(
            "engine.attention.backend", backend, _METHODS, resolver=kernel_switches.resolver
        )
        return own_backend
    if backend == "reference":
        if kernel_switches.split_kv != "off":
            raise ValueError(
                f"split_kv={kernel_switches.split_kv}: backend=reference does not split keys; "
                "set split_kv=off"
            )
        from labkit.engine.attention.reference import ReferenceBackend

        return ReferenceBackend(kernel_switches.resolver)
    if backend == "gather":
        from labkit.engine.attention.gather import GatherBackend

        return GatherBackend()
    if backend != "fused":
        raise ValueError(
            f"backend={backend}: allowed are fused, gather, reference or package.module:Class"
        )
    if device == "cpu":
        from labkit.engine.attention.cpu_backend import CpuBackend

        return CpuBackend(kernel_switches)
    if device not in DEVICES:
        raise ValueError(f"device={device}: allowed are {', '.join(DEVICES)}")
    from labkit.engine.attention.metal_backend import MetalBackend

    return MetalBackend(kernel_switches, device)


def create_from_config(options: config.Attention) -> PagedBackend:
    """Create the backend that a config describes. Raises ``ValueError`` like ``create``."""
    switches = {field.name: getattr(options, field.name) for field in fields(KernelSwitches)}
    return create(backend=options.backend, device=options.device.value, **switches)
