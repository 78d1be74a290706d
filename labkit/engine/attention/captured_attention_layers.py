"""The attention layers of a captured graph, bound to the pools of one backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from labkit.cpu.capture.graph_capture import CapturedAttention
from labkit.cpu.runtime.address_views import address_of
from labkit.engine.attention.attention_metadata import AttentionLayer

if TYPE_CHECKING:
    from labkit.engine.attention.cpu_backend import CpuBackend


class CapturedLayers:
    """The constants of a graph's attention launches: layers, kinds and array addresses.

    Creating an instance binds the layers to the backend. The instance keeps only the addresses of
    the pools, not the backend.

    Attributes
    ----------
    layers
        The layer of each launch, in the order of the graph.
    kinds
        One layer of each kind.
    kind_of_launch
        int64 [launches]: an index into ``kinds``.
    addresses
        By name, the addresses of ``k_pool``, ``v_pool`` and ``sinks`` (0: none) for each launch.

    Raises
    ------
    ValueError
        The shapes of a captured layer do not fit the pools.
    """

    def __init__(self, backend: CpuBackend, captured: Sequence[CapturedAttention]) -> None:
        self.layers = tuple(_bind(backend, attention) for attention in captured)
        kinds = {layer.kind: layer for layer in self.layers}
        numbers = {kind: number for number, kind in enumerate(kinds)}
        self.kinds = tuple(kinds.values())
        self.kind_of_launch = np.array([numbers[layer.kind] for layer in self.layers], np.int64)
        pools = [backend.pool_addresses[layer.index] for layer in self.layers]
        k_pools, v_pools = np.array(pools, np.int64).reshape(-1, 2).T
        sinks = [0 if x.sinks is None else address_of(x.sinks) for x in self.layers]
        self.addresses: dict[str, NDArray[np.int64]] = {
            "k_pool": k_pools,
            "v_pool": v_pools,
            "sinks": np.array(sinks, np.int64),
        }

    def for_launches(self, by_kind: Sequence[Any]) -> NDArray[Any]:
        """Return one value per launch: the value in ``by_kind`` for the kind of its layer."""
        return np.array(by_kind)[self.kind_of_launch]


def _bind(backend: CpuBackend, attention: CapturedAttention) -> AttentionLayer:
    """Bind a layer with the options of the captured forward, and check its shapes."""
    backend.bind(
        attention.layer,
        scale=attention.scale,
        heads=attention.heads,
        window=attention.window,
        softcap=attention.softcap,
        sinks=attention.sinks,
    )
    layer = backend.bound_layer(attention.layer)
    heads = (layer.num_q_heads, layer.num_kv_heads)[: len(attention.shapes)]
    expected = tuple((number, layer.head_dim) for number in heads)
    if attention.shapes != expected:
        raise ValueError(
            f"layer {attention.layer}: the graph's queries and keys have the shapes "
            f"{attention.shapes}, but the KV pools need {expected}"
        )
    return layer
