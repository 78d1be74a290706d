"""Paged attention over sequences of different lengths: one operation, several backends.

Importing this package imports neither MLX nor numba.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from labkit.engine import user_classes
from labkit.engine.attention.kernel_dispatch import KernelSwitches
from labkit.engine.attention.launch_evidence import LaunchReport

if TYPE_CHECKING:
    from labkit import config
    from labkit.engine.attention.paged_backend_base import PagedBackend
    from labkit.engine.attention.standalone_paged_attention import paged_attention

__all__ = ["create", "create_from_config", "paged_attention"]

DEVICES = ("cpu", "emulated", "metal", "cuda")
BACKEND_METHODS = ("allocate", "adopt", "bind", "plan", "forward", "report", "pending")


def create(*, backend: str = "fused", device: str = "cpu", **switches: Any) -> PagedBackend:
    """Create a backend of paged attention.

    ``backend``: ``fused`` (kernels of ``device``), ``gather`` (blocks copied for MLX's attention),
    ``gather_padded`` (the same in one rectangle), ``masked`` (all blocks in use, masked),
    ``reference`` (the float64 oracle in NumPy) or ``package.module:Class`` (a user's class, which
    is called with the argument ``resolver``). ``device``: where the fused kernels run: ``cpu``,
    ``metal``, or the Metal kernels on a CPU (``emulated``) or an NVIDIA GPU (``cuda``).
    ``switches``: fields of ``KernelSwitches``. Raises ``ValueError`` if a name is unknown, a number
    is out of range, a resolver cannot be loaded, or the device is not available.
    """
    kernel_switches = KernelSwitches(**switches)
    if ":" in backend:
        return _create_own(backend, kernel_switches.resolver)
    if backend == "reference":
        if kernel_switches.split_kv != "off":
            raise ValueError(
                f"split_kv={kernel_switches.split_kv}: backend=reference does not split keys; "
                "set split_kv=off"
            )
        from labkit.engine.attention.backends.reference import ReferenceBackend

        return ReferenceBackend(kernel_switches.resolver)
    if backend in ("gather", "gather_padded", "masked"):
        from labkit.engine.attention.backends import gather_and_masked

        classes = (
            gather_and_masked.GatherBackend,
            gather_and_masked.PaddedGatherBackend,
            gather_and_masked.MaskedBackend,
        )
        return next(own for own in classes if own.name == backend)()
    if backend != "fused":
        raise ValueError(
            f"backend={backend}: must be fused, gather, gather_padded, masked, reference or "
            "package.module:Class"
        )
    if device == "cpu":
        from labkit.engine.attention.backends.cpu_backend import CpuBackend

        return CpuBackend(kernel_switches)
    if device not in DEVICES:
        raise ValueError(f"device={device}: must be one of: {', '.join(DEVICES)}")
    from labkit.engine.attention.backends.metal_backend import MetalBackend

    return MetalBackend(kernel_switches, device)


def _create_own(path: str, resolver: str) -> PagedBackend:
    """Create a backend from a user's class. Errors in the class are reported in one line."""
    from labkit.engine.attention.paged_backend_base import PagedBackend

    key = "engine.attention.backend"
    backend: PagedBackend = user_classes.create_plugin(
        key, path, BACKEND_METHODS, resolver=resolver
    )
    if isinstance(backend, PagedBackend):
        if type(backend).attend is PagedBackend.attend:
            raise ValueError(f"{key}={path}: the class has no method attend()")
        if not hasattr(backend, "keys"):
            raise ValueError(f"{key}={path}: its __init__() must call super().__init__(resolver)")
        user_classes.guard_method(backend, f"{key}={path}", "attend", _attend_mistake)
    return backend


def _attend_mistake(result: Any, _layer: Any, q: Any, *_others: Any) -> str | None:
    """Check what a user's ``attend`` returned for the queries ``q``.

    Return None if it is right, else a text of the form "<what it must be>, not <what it is>".
    """
    from labkit.engine.attention.input_validation import dtype_name

    if not isinstance(result, tuple | list) or len(result) != 2:
        return f"(out, LaunchReport), not {type(result).__name__}"
    out, report = result
    if not isinstance(report, LaunchReport):
        return f"(out, LaunchReport), not (out, {type(report).__name__})"
    expected, actual = (
        f"{dtype_name(array)} {list(getattr(array, 'shape', ()))}" for array in (q, out)
    )
    if actual == expected:
        return None
    return f"an array of q's dtype and shape, {expected}, not {actual}"


def create_from_config(options: config.Attention) -> PagedBackend:
    """Create the backend that a config describes. Raises ``ValueError`` like ``create``."""
    switches = {field.name: getattr(options, field.name) for field in fields(KernelSwitches)}
    return create(backend=options.backend, device=options.device.value, **switches)


def __getattr__(name: str) -> Any:
    if name == "paged_attention":
        from labkit.engine.attention.standalone_paged_attention import paged_attention

        return paged_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
