"""The attention layers and launches of a replayed graph: their parameters and their counters."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from labkit.cpu.attention.kernel_entry_points import COUNTER_COLUMNS
from labkit.cpu.capture.graph_capture import CapturedAttention
from labkit.cpu.replay.graph_attention_structs import LAUNCH, SUMMARY, AttentionInputs
from labkit.cpu.runtime.address_intrinsics import address_of
from labkit.engine.attention.attention_metadata import AttentionLayer, AttentionMetadata
from labkit.engine.attention.launch_evidence import LaunchReport, launch_stamp, report_kind
from labkit.engine.engine_protocol import Counters
from labkit.kernel_constants import STAMP_MASK

if TYPE_CHECKING:  # importing the graph also imports the kernels of a model
    from labkit.cpu.replay.graph_replay import ExecutableGraph
    from labkit.engine.attention.backends.cpu_backend import CpuBackend, CpuPrepared, PreparedLaunch


class CapturedLayers:
    """The constants of a graph's attention launches: layers, kinds and array addresses.

    Creating an instance binds the layers to the backend. The instance keeps only the addresses of
    the pools, not the backend.

    ``layers``: the layer of each launch, in the order of the graph. ``kinds``: one layer of each
    kind. ``kind_of_launch``: int64 [launches]: an index into ``kinds``. ``addresses``: by name, the
    addresses of ``k_pool``, ``v_pool`` and ``sinks`` (0: none) for each launch. Raises
    ``ValueError`` if the shapes of a captured layer do not fit the pools.
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


class ReplayState:
    """The attention launches of a graph that is replayed for steps of the same sequences.

    Only the context lengths change from step to step. The launches' counters are summed until the
    engine's counters are read. If a layer has a sliding window (``windowed``), each step is
    reported separately, because its report depends on the context lengths. The state serves one
    step at a time.
    """

    def __init__(
        self, layers: CapturedLayers, prepared: list[PreparedLaunch], graph: ExecutableGraph
    ) -> None:
        self.layers = layers
        self.windowed = any(layer.window is not None for layer in layers.kinds)
        self._dispatches = [launch.dispatch for launch in prepared]
        self._launches_of_kind = np.bincount(layers.kind_of_launch).tolist()
        self._params = _params(layers, prepared, graph)
        self._launches = _launches(layers, prepared, self._params)
        count, workers = len(layers.layers), prepared[0].workers
        self._counters = np.zeros((count, workers + 1, COUNTER_COLUMNS), np.int64)
        self._summaries = np.zeros(len(layers.kinds), SUMMARY)
        self._launches_address = address_of(self._launches)
        self._summaries_address = address_of(self._summaries)
        self._nonce = secrets.randbits(32)
        self._steps = 0  # since the last reports
        self._metadata: AttentionMetadata | None = None  # of the last step
        self._deferred_to: Counters | None = None

    def inputs(self, metadata: AttentionMetadata, scratch: NDArray[Any]) -> AttentionInputs:
        """Return the inputs of a step's launches. Each launch has a different nonce."""
        self._nonce = (self._nonce + len(self.layers.layers)) & STAMP_MASK
        return AttentionInputs(
            nonce=self._nonce,
            stamp=launch_stamp(self._nonce, "decode", metadata.resolver.variant),
            launches=self._launches_address,
            summaries=self._summaries_address,
            num_kinds=len(self._summaries),
            scratch=scratch,
            counters=self._counters,
            block_tables=metadata.block_tables,
            block_size=metadata.block_size,
            cu_seqlens_q=metadata.cu_seqlens_q,
            seq_lens=metadata.seq_lens,
        )

    def end_step(self, metadata: AttentionMetadata, num_wrong: int, counters: Counters) -> None:
        """End a step, in which ``num_wrong`` stamps were wrong.

        If a stamp is wrong or a layer has a window, the launches are added to the metadata's log
        now. Otherwise their counters are added when ``counters`` is next read.
        """
        if self._deferred_to is not counters:
            if self._deferred_to is not None:
                self._deferred_to.flush()
            self._deferred_to = counters
            counters.defer(self._deferred_counters)
        self._steps += 1
        self._metadata = metadata
        if num_wrong or self.windowed:
            metadata.launches.extend(self._drain_reports(metadata))

    def _drain_reports(self, metadata: AttentionMetadata) -> list[LaunchReport]:
        """Return a report for each kind of layer on the launches since the last call."""
        steps, self._steps = self._steps, 0
        summaries = self._summaries.tolist()
        for counter in ("iterations", "blocks", "surplus"):
            self._summaries[counter] = 0
        return [
            report_kind(
                self.layers.layers[launch],
                dispatch,
                metadata,
                "cpu",
                launches=count * steps,
                expected_stamp=expected,
                stamp_error=error,
                iterations=iterations,
                blocks=blocks,
                surplus=surplus,
            )
            for dispatch, count, (expected, launch, error, iterations, blocks, surplus) in zip(
                self._dispatches, self._launches_of_kind, summaries, strict=True
            )
        ]

    def _deferred_counters(self) -> dict[str, float]:
        self._deferred_to, total = None, Counters()
        if self._metadata is not None and self._steps:
            for report in self._drain_reports(self._metadata):
                total.add_all(report.counters())
        return total.as_dict()


def replay_state(
    backend: CpuBackend, layers: CapturedLayers, graph: ExecutableGraph, metadata: AttentionMetadata
) -> ReplayState | None:
    """Return the state for a replay of ``graph`` on a batch.

    Returns None if the graph cannot be replayed on this batch, because the attention of some layer
    is not a single launch of the decode kernel. Steps of the same sequences share the state. The
    caller must have set the graph's shape.
    """
    batch: CpuPrepared = metadata.prepared
    if batch.replay is None or batch.replay.layers is not layers:
        prepared = [
            batch.launches.get(layer.kind) or backend.prepare(metadata, layer)
            for layer in layers.kinds
        ]
        if any(one.dispatch.kernel != "decode" or one.dispatch.partitions > 1 for one in prepared):
            return None
        batch.replay = ReplayState(layers, prepared, graph)
    return batch.replay


def _params(
    layers: CapturedLayers, prepared: list[PreparedLaunch], graph: ExecutableGraph
) -> NDArray[Any]:
    """Return the ``attention_params`` of each launch, with the addresses of its layer's arrays."""
    params = np.zeros(len(layers.layers), prepared[0].params.dtype)
    for kind, launch in enumerate(prepared):
        params[layers.kind_of_launch == kind] = launch.params
    arrays = {**layers.addresses, "q": graph.query_addresses, "out": graph.output_addresses}
    for name, addresses in arrays.items():
        params[name] = addresses
    return params


def _launches(
    layers: CapturedLayers, prepared: list[PreparedLaunch], params: NDArray[Any]
) -> NDArray[Any]:
    """Return a ``graph_attention_structs.LAUNCH`` record for each launch."""
    launches = np.zeros(len(params), LAUNCH)
    launches["params"] = address_of(params) + params.itemsize * np.arange(len(params))
    launches["kind"] = layers.kind_of_launch
    launches["num_q_heads"] = [layer.num_q_heads for layer in layers.layers]
    launches["k_pool"] = layers.addresses["k_pool"]
    launches["v_pool"] = layers.addresses["v_pool"]
    shared = {
        "body": [launch.body for launch in prepared],
        "heads_per_unit": [launch.dispatch.heads_per_unit for launch in prepared],
        "pool_dtype": [launch.pool_dtype for launch in prepared],
        "token_numbers": [launch.token_numbers for launch in prepared],
    }
    for name, by_kind in shared.items():
        launches[name] = layers.for_launches(by_kind)
    return launches
