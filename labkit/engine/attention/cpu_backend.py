"""The fused backend of device ``cpu``: chooses a kernel, launches it, reads its counters."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
from numpy.typing import NDArray

from labkit.cpu import (
    attention_launch,
    decode_attention,
    kernel_params,
    resolver_variants,
    tiled_attention,
)
from labkit.cpu.address_views import address_of
from labkit.cpu.attention_intrinsics import TILE_KEYS
from labkit.cpu.attention_launch import AttentionLaunch, KVWrite
from labkit.cpu.graph_capture import FIRST, OUT, CapturedAttention
from labkit.cpu.kv_dtypes import NUMPY_DTYPES, dtype_name
from labkit.engine.attention import input_validation, kernel_dispatch, resolvers
from labkit.engine.attention.attention_metadata import AttentionLayer, AttentionMetadata
from labkit.engine.attention.captured_layers import CapturedLayers, ReplayState
from labkit.engine.attention.kernel_dispatch import Dispatch
from labkit.engine.attention.kernel_switches import KernelSwitches
from labkit.engine.attention.launch_log import Launch, report_launches
from labkit.engine.attention.launch_report import Reports
from labkit.engine.attention.paged_backend import PagedBackend
from labkit.engine.engine_protocol import Counters
from labkit.kernel_abi import BQ, RESOLVER_IDS

if TYPE_CHECKING:  # it brings the kernels of a whole model
    from labkit.cpu.graph_replay import ExecutableGraph

_ARRAYS = ("q", "k_pool", "v_pool", "out", "sinks")

for lookup_type, resolver in resolvers.BY_LOOKUP_TYPE.items():
    resolver_variants.register(lookup_type, resolver)


class CpuBackend(PagedBackend):
    """Paged attention in float32 by numba kernels, on labkit's thread pool.

    The pools may be of half precision, which is converted in registers.

    A row's result is the same bits in every batch, by both kernels, with every resolver,
    block size, thread count and switch but ``split_kv``, which changes the order of
    summation. Not for two threads at once: a backend owns its scratch.
    """

    name = "cpu"
    dtypes = tuple(NUMPY_DTYPES)

    def __init__(self, switches: KernelSwitches) -> None:
        super().__init__(switches.resolver)
        self._switches = switches
        self._memory = aligned_zeros(1, 0)
        self._addresses: list[tuple[int, int]] = []

    def _zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        return np.zeros(shape, NUMPY_DTYPES[dtype])

    def _pool_dtypes(self, pool: Any) -> tuple[str, str | None]:
        return dtype_name(pool), "float32"

    def adopt(self, keys: Sequence[Any], values: Sequence[Any]) -> None:
        """Take over pools that exist; see ``PagedBackend.adopt``."""
        super().adopt(keys, values)
        if not all(pool.flags.c_contiguous for pool in (*keys, *values)):
            raise ValueError("k_pool and v_pool must be contiguous: they are written in place")
        pairs = zip(keys, values, strict=True)
        self._addresses = [(address_of(k), address_of(v)) for k, v in pairs]

    def _convert_sinks(self, sinks: Any) -> Any:
        return None if sinks is None else np.ascontiguousarray(sinks, dtype=np.float32)

    def _check_supported(self, layer: AttentionLayer) -> None:
        if self._switches.split_kv != "off" and TILE_KEYS % layer.block_size:
            raise ValueError(
                f"block size {layer.block_size}: split_kv={self._switches.split_kv} cuts the keys "
                f"every {TILE_KEYS}, which must be whole blocks"
            )

    def forward(
        self, layer: int, q: Any, k: Any, v: Any, metadata: AttentionMetadata, out: Any = None
    ) -> Any:
        """Write and attend; see ``Attention.forward``."""
        bound = self._layers[layer] or self.bound_layer(layer)
        prepared: _CpuPrepared = metadata.prepared
        ready = prepared.launches.get(bound.kind) or self.prepare(metadata, bound)
        if out is None:
            out = np.empty(ready.q_shape, np.float32)
        fits = q.shape == ready.q_shape == out.shape and q.dtype == out.dtype == np.float32
        if k is not None:
            fits = fits and k.shape == v.shape == ready.k_shape and k.dtype == v.dtype == q.dtype
        if not (fits and out.flags.c_contiguous):
            input_validation.check_operands(bound, metadata.total_q, q, k, v, out)
        # Named here, so that a copy lives until the launch is over.
        q = np.ascontiguousarray(q)
        k_pool, v_pool = self._addresses[layer]
        if k is not None:
            k, v = np.ascontiguousarray(k), np.ascontiguousarray(v)
            write = KVWrite(
                ready.element, address_of(k), address_of(v), k_pool, v_pool,
                metadata.slot_mapping, ready.slot_numbers,
            )  # fmt: skip
            attention_launch.scatter(write)
        sinks = 0 if bound.sinks is None else address_of(bound.sinks)
        arrays = address_of(q), k_pool, v_pool, address_of(out), sinks
        for view, address in zip(ready.fields, arrays, strict=True):
            view[0] = address
        counters = np.zeros((ready.workers + 1, attention_launch.COUNTER_COLUMNS), np.int64)
        nonce, reduce_rows = secrets.randbits(32), None
        launch = AttentionLaunch(
            nonce, ready.body, ready.address, self._memory, counters, metadata.cu_seqlens_q,
            metadata.seq_lens, bound.num_kv_heads, ready.dispatch.kv_heads_per_unit,
        )  # fmt: skip
        if ready.dispatch.kernel == "tiled":
            attention_launch.tiled(launch, metadata.lookup)
        elif ready.splits == 1:
            attention_launch.decode(launch, metadata.lookup)
        else:
            reduce_rows = self._split(ready, bound, metadata, q, out, launch)
        metadata.launches.append(Launch(bound, ready.dispatch, nonce, counters[:-1], reduce_rows))
        return out

    def replay(
        self,
        tape: ExecutableGraph,
        tokens: NDArray[np.int32],
        metadata: AttentionMetadata,
        layers: CapturedLayers,
        logits: Any,
        counters: Counters,
    ) -> bool:
        """Run a recorded step, which writes ``logits``; False: it cannot be, and nothing was run.

        It can where every layer's attention is one launch of the decode kernel, and the model has
        the tokens. What it did is owed to ``counters``, or left in the metadata where something is
        wrong or a layer has a window.
        """
        ops = tape.ops(metadata.total_q, metadata.max_seq_len)
        prepared: _CpuPrepared = metadata.prepared
        told = prepared.replay
        if told is None or told.layers is not layers:
            told = self._tell(ops, metadata, layers)
            if told is None:
                return False
            prepared.replay = told
        nonce, stamp = told.begin(metadata.resolver.variant)
        wrong = tape.run(
            ops, tokens, logits, nonce, stamp, metadata.lookup, told.launches,
            self._memory, told.counters, told.left, metadata.block_tables, metadata.block_size,
            metadata.cu_seqlens_q, metadata.seq_lens,
        )  # fmt: skip
        if wrong < 0:
            return False
        told.ran(metadata, counters)
        if wrong or told.windowed:
            metadata.launches.extend(told.evidence())
        return True

    def _tell(
        self, ops: NDArray[np.int64], metadata: AttentionMetadata, layers: CapturedLayers
    ) -> ReplayState | None:
        """Return what replays of the metadata, and of those that follow it, are told."""
        launches: dict[int, _Ready] = metadata.prepared.launches
        prepared = [
            launches.get(layer.kind) or self.prepare(metadata, layer) for layer in layers.kinds
        ]
        if any(ready.dispatch.kernel != "decode" or ready.splits > 1 for ready in prepared):
            return None
        packed = layers.packed([ready.packed for ready in prepared])
        arrays = ops[layers.rows, FIRST], *layers.pools.T, ops[layers.rows, OUT], layers.sinks
        for name, addresses in zip(_ARRAYS, arrays, strict=True):
            packed[name] = addresses
        shared = [
            (one.body, one.dispatch.kv_heads_per_unit, one.element, one.slot_numbers)
            for one in prepared
        ]
        dispatches = [one.dispatch for one in prepared]
        return ReplayState(layers, packed, shared, dispatches, prepared[0].workers)

    def new_prepared(self) -> _CpuPrepared:
        """Return an empty ``_CpuPrepared``."""
        return _CpuPrepared()

    def _can_share(self, last: AttentionMetadata) -> bool:
        """What is packed says nothing of contexts; but their length may decide on a split.

        Work is shared out among as many threads as there were.
        """
        threads = numba.get_num_threads()
        launches: dict[int, _Ready] = last.prepared.launches
        same_threads = all(ready.workers == threads for ready in launches.values())
        return self._switches.split_kv == "off" and same_threads

    def taken(self, attended: Sequence[CapturedAttention]) -> CapturedLayers:
        """Bind the layers of a recorded step, and say what of them does not change.

        Raises
        ------
        ValueError
            One line that says what is wrong.
        """
        for one in attended:
            self.bind(
                one.layer, scale=one.scale, heads=one.heads, window=one.window, sinks=one.sinks
            )
        layers = tuple(self.bound_layer(one.layer) for one in attended)
        for one, layer in zip(attended, layers, strict=True):
            heads = layer.num_q_heads, layer.num_kv_heads
            if one.shapes != tuple((n, layer.head_dim) for n in heads[: len(one.shapes)]):
                raise ValueError(f"layer {one.layer}: recorded with {one.shapes}, not {heads}")
        sinks = [0 if x.sinks is None else address_of(x.sinks) for x in layers]
        pools = [self._addresses[layer.index] for layer in layers]
        rows = [one.row for one in attended]
        return CapturedLayers(layers, *(np.array(each, np.int64) for each in (rows, pools, sinks)))

    def prepare(self, metadata: AttentionMetadata, layer: AttentionLayer) -> _Ready:
        """Choose and pack what the launches of one kind of layers share."""
        workers, group = numba.get_num_threads(), layer.num_q_heads // layer.num_kv_heads
        dispatch = kernel_dispatch.choose_kernel(
            metadata, layer, self._switches, kernel_dispatch.cpu_limits(workers)
        )
        stored = NUMPY_DTYPES[layer.dtype]
        if dispatch.kernel == "tiled":
            size = tiled_attention.scratch_bytes(BQ * group, layer.head_dim)
            body = tiled_attention.body(stored, self._switches.window_skip)
        else:
            size = decode_attention.scratch_bytes(
                dispatch.kv_heads_per_unit * group, layer.head_dim
            )
            body = decode_attention.body(
                stored, dispatch.partitions == 1 and self._switches.window_skip
            )
        if self._memory.shape[1] < size:  # for as many workers as there can ever be
            self._memory = aligned_zeros(numba.config.NUMBA_NUM_THREADS, size)
        packed = kernel_params.pack(
            layer.dtype,
            metadata.block_tables,
            num_q_heads=layer.num_q_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            block_size=layer.block_size,
            scale=layer.scale,
            window=layer.window,
            softcap=layer.softcap,
            window_skip=self._switches.window_skip,
        )
        ready = _Ready(
            dispatch=dispatch,
            packed=packed,
            address=address_of(packed),
            fields=tuple(packed[name] for name in _ARRAYS),
            body=body,
            workers=workers,
            splits=group // dispatch.sharing_heads * dispatch.partitions
            if dispatch.rows_per_unit == 1
            else 1,
            q_shape=(metadata.total_q, layer.num_q_heads, layer.head_dim),
            k_shape=(metadata.total_q, layer.num_kv_heads, layer.head_dim),
            element=attention_launch.POOL_DTYPES.index(stored),
            slot_numbers=layer.num_kv_heads * layer.head_dim,
        )
        metadata.prepared.launches[layer.kind] = ready
        return ready

    def _split(
        self,
        ready: _Ready,
        layer: AttentionLayer,
        metadata: AttentionMetadata,
        q: Any,
        out: Any,
        launch: AttentionLaunch,
    ) -> NDArray[np.int64] | None:
        """Run the decode kernel with a token's work divided, and merge its partitions.

        Returns the rows that the reduce kernel wrote; None without partitions.
        """
        dispatch = ready.dispatch
        members = ready.splits // dispatch.partitions
        parts = kernel_params.partials(q, dispatch.partitions) if dispatch.partitions > 1 else None
        packed = kernel_params.split(ready.packed, members, dispatch.partitions, parts)
        launch = launch._replace(params=address_of(packed), splits=len(packed))
        attention_launch.decode(launch, metadata.lookup)
        if parts is None:
            return None
        rows = np.zeros((ready.workers + 1, attention_launch.COUNTER_COLUMNS), np.int64)
        resolver = RESOLVER_IDS[metadata.resolver.variant]
        sinks = kernel_params.base2(layer.sinks)
        attention_launch.reduce(launch.nonce, resolver, *parts, sinks, out, rows)
        return rows[:-1]

    def report(self, metadata: AttentionMetadata) -> Reports:
        """Read what the kernels wrote; see ``Attention.report``."""
        if not metadata.launches:
            return ()
        return report_launches(metadata.drain_launches(), metadata, "cpu")


@dataclass(frozen=True, slots=True)
class _Ready:
    """What the launches of one kind of layers share in a step.

    ``packed``: one of ``arguments.LAYERS``, at ``address``; ``fields``: views of the addresses
    in it that differ from launch to launch; ``splits``: units that share a token's work on
    some KV heads; ``element``: what the pools hold, as ``scatter`` knows it;
    ``slot_numbers``: of one token's keys.
    """

    dispatch: Dispatch
    packed: NDArray[Any]
    address: int
    fields: tuple[Any, ...]
    body: int
    workers: int
    splits: int
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    element: int
    slot_numbers: int


@dataclass(slots=True)
class _CpuPrepared:
    """A step's launches by kind of layers, and the state of its replays."""

    launches: dict[int, _Ready] = field(default_factory=dict)
    replay: ReplayState | None = None


def aligned_zeros(rows: int, row_bytes: int) -> NDArray[np.uint8]:
    """Return uint8 [rows, row_bytes] of zeros that starts on a cache line."""
    memory = np.zeros(rows * row_bytes + 64, dtype=np.uint8)
    start = -address_of(memory) % 64
    return memory[start : start + rows * row_bytes].reshape(rows, row_bytes)
