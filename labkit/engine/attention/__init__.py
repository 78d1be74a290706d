"""Paged varlen attention: one operation, several backends.

Importing this package imports neither MLX nor numba.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from labkit.engine import user_class
from labkit.engine.attention.spec import Switches

if TYPE_CHECKING:
    from labkit import config
    from labkit.engine.attention.base import AttentionBackend
    from labkit.engine.attention.operation import paged_attention

__all__ = ["configured", "create", "paged_attention"]

DEVICES = ("cpu", "emulated", "metal")
_METHODS = ("allocate", "adopt", "bind", "plan", "forward", "report", "pending")


def create(
    *,
    backend: str = "fused",
    device: str = "cpu",
    resolver: str = "binary_search",
    split_kv: str | int = "off",
    gqa_sharing: bool = True,
    window_skip: bool = True,
    tile_threshold: int = 2,
) -> AttentionBackend:
    """Return a backend of paged attention.

    Parameters
    ----------
    backend
        ``fused`` (kernels of ``device``), ``gather`` (blocks copied for MLX's attention),
        ``reference`` (the float64 oracle in NumPy) or ``package.module:Class``, a user's
        own, made with ``resolver``.
    device
        Where the fused kernels run: ``cpu``, ``metal`` or ``emulated`` (the Metal kernels
        on a CPU).
    resolver, split_kv, gqa_sharing, window_skip, tile_threshold
        See ``Switches``.

    Raises
    ------
    ValueError
        A word is unknown, a number out of range, a resolver cannot be loaded or a device
        lacks something; one line that says which.
    """
    if ":" in backend:
        own: AttentionBackend = user_class.make(
            "engine.attention.backend", backend, _METHODS, resolver=resolver
        )
        return own
    switches = Switches(resolver, split_kv, gqa_sharing, window_skip, tile_threshold)
    if backend == "reference":
        if split_kv != "off":
            raise ValueError(f"split_kv={split_kv}: backend reference has no partitions")
        from labkit.engine.attention.reference import ReferenceBackend

        return ReferenceBackend(resolver)
    if backend == "gather":
        from labkit.engine.attention.gather import GatherBackend

        return GatherBackend()
    if backend != "fused":
        raise ValueError(
            f"backend={backend}: allowed are fused, gather, reference or package.module:Class"
        )
    if device == "cpu":
        from labkit.engine.attention.cpu.backend import CpuBackend

        return CpuBackend(switches)
    if device in ("emulated", "metal"):
        from labkit.engine.attention.metal import MetalBackend

        return MetalBackend(switches, device)
    raise ValueError(f"device={device}: allowed are {', '.join(DEVICES)}")


def configured(options: config.Attention) -> AttentionBackend:
    """Return the backend that a config describes; ``ValueError`` as ``create``."""
    return create(
        backend=options.backend,
        device=options.device.value,
        resolver=options.resolver,
        split_kv=options.split_kv,
        gqa_sharing=options.gqa_sharing,
        window_skip=options.window_skip,
        tile_threshold=options.tile_threshold,
    )


def __getattr__(name: str) -> Any:
    if name == "paged_attention":
        from labkit.engine.attention.operation import paged_attention

        return paged_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
