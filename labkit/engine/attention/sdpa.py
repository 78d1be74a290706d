"""MLX's own ``scaled_dot_product_attention`` for sequences that lie in one piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from labkit.engine.attention.base import Array, Arrays
from labkit.engine.attention.report import LaunchReport, Reports, summed


@dataclass(frozen=True, slots=True)
class SdpaLayer:
    """What does not change of a layer; see ``layer.Layer``. ``sinks``: MLX's, or None."""

    index: int
    scale: float
    window: int | None
    sinks: mx.array | None


class SdpaStep(Protocol):
    """One step over keys and values that a layout keeps in one piece."""

    launches: list[LaunchReport]

    def write(self, layer: int, k: Array, v: Array) -> None:
        """Store the step's new keys and values, [total_q, num_kv_heads, head_dim]."""

    def attend(self, layer: SdpaLayer, q: Array) -> tuple[Array, LaunchReport]:
        """Attend from ``q`` [total_q, num_heads, head_dim], causally, to the cached keys."""


class SdpaAttention:
    """The layers of a layout whose steps write and attend; see ``base.Attention``."""

    arrays: Arrays = "numpy"

    def __init__(self) -> None:
        self._layers: dict[int, SdpaLayer] = {}

    def bind(
        self,
        layer: int,
        *,
        scale: float,
        heads: int,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Any = None,
    ) -> None:
        """Say what does not change of a layer; see ``Attention.bind``."""
        if softcap is not None:
            raise ValueError(f"softcap={softcap}: MLX's attention has none; use backend=fused")
        kept = None if sinks is None else mx.array(sinks)
        self._layers[layer] = SdpaLayer(layer, scale, window, kept)

    def forward(
        self, layer: int, q: Array, k: Any, v: Any, plan: SdpaStep, out: Any = None
    ) -> Array:
        """Write and attend; see ``Attention.forward``."""
        if k is not None:
            plan.write(layer, k, v)
        result, made = plan.attend(self._layers[layer], q)
        plan.launches.append(made)
        return result

    def report(self, plan: SdpaStep) -> Reports:
        """Add up the launches since the last report; see ``Attention.report``."""
        launches, plan.launches = plan.launches, []
        return summed(launches)

    def pending(self, plan: SdpaStep) -> list[Any]:
        """Return nothing: every layer evaluates its own."""
        return []


def report(layer: int, launches: int, keys: int, padded_keys: int, nbytes: int) -> LaunchReport:
    """Report a layer's calls of MLX's attention, which leaves no stamp.

    Parameters
    ----------
    launches
        Calls: one for a padded batch, one per request otherwise.
    keys, padded_keys
        Keys that the calls read, padding included, and those that hold no token.
    nbytes
        Bytes of the keys and values read, plus queries and output.
    """
    return LaunchReport(
        kernel="sdpa",
        grid=(launches,),
        reason="the keys lie in one piece for MLX's attention",
        resolver="none",
        layer=layer,
        launches=launches,
        keys=keys,
        padded_keys=padded_keys,
        bytes=nbytes,
    )


def mask_of_one(q_len: int, keys: int, window: int | None) -> mx.array | str | None:
    """Return the mask that mlx_lm would give: none for one token, else a name or an array."""
    if window is not None and keys > window:
        columns, seen = np.arange(keys), np.arange(keys - q_len, keys)[:, None]
        return mx.array((columns <= seen) & (columns > seen - window))
    return "causal" if q_len > 1 else None


def heads_first(tokens: Array) -> mx.array:
    """Copy [rows, tokens, heads, dim] into an MLX array [rows, heads, tokens, dim]."""
    return mx.array(tokens.transpose(0, 2, 1, 3))
