"""Paged varlen attention: one operation, several backends.

Importing this package imports neither MLX nor numba.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from labkit.engine import user_class

if TYPE_CHECKING:
    from labkit.engine.attention.base import AttentionBackend
    from labkit.engine.attention.operation import paged_attention

__all__ = ["create", "paged_attention"]

# Where each backend lives: the fused ones by device, and the oracle. Loaded on use.
_FUSED = {"cpu": "labkit.engine.attention.cpu.backend:CpuBackend"}
_REFERENCE = "labkit.engine.attention.reference:ReferenceBackend"
_METHODS = ("plan", "write", "attend")


def create(
    *,
    backend: str = "fused",
    device: str = "cpu",
    resolver: str = "binary_search",
    split_kv: str | int = "off",
) -> AttentionBackend:
    """Return a backend of paged attention.

    Parameters
    ----------
    backend
        ``fused`` (kernels of ``device``), ``reference`` (the float64 oracle in NumPy) or
        ``package.module:Class``, a user's own, made with ``resolver``.
    device
        Where the fused kernels run.
    resolver
        ``binary_search``, ``seq_map``, ``identity`` or ``package.module:Class``.
    split_kv
        ``off``: the keys of a query are walked by one unit.

    Raises
    ------
    ValueError
        A word is unknown or a class cannot be loaded; one line that says which.
    """
    if split_kv != "off":
        raise ValueError(f"split_kv={split_kv}: allowed is off")
    if ":" in backend:
        own: AttentionBackend = user_class.make(
            "engine.attention.backend", backend, _METHODS, resolver=resolver
        )
        return own
    if backend == "reference":
        path = _REFERENCE
    elif backend != "fused":
        raise ValueError(f"backend={backend}: allowed are fused, reference or package.module:Class")
    elif device not in _FUSED:
        raise ValueError(f"device={device}: allowed are {', '.join(_FUSED)}")
    else:
        path = _FUSED[device]
    module, _, name = path.partition(":")
    made: Callable[..., AttentionBackend] = getattr(import_module(module), name)
    return made(resolver=resolver)


def __getattr__(name: str) -> Any:
    if name == "paged_attention":
        from labkit.engine.attention.operation import paged_attention

        return paged_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
