"""The fused backend of device ``cpu``: choose a kernel, launch it, read its counters."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
from numpy.typing import NDArray

from labkit.cpu.attention import (
    attention_params,
    decode_attention_kernel,
    kernel_entry_points,
    resolver_variants,
    tiled_attention_kernel,
)
from labkit.cpu.attention.attention_intrinsics import TILE_KEYS
from labkit.cpu.attention.kernel_entry_points import AttentionLaunch, KVWrite
from labkit.cpu.precision.kv_dtypes import POOL_DTYPES, head_dim_of, pool_columns, pool_dtype_name
from labkit.cpu.runtime.address_intrinsics import address_of
from labkit.cpu.runtime.aligned_memory import aligned_zeros
from labkit.engine.attention import input_validation, kernel_dispatch, sequence_resolvers
from labkit.engine.attention.attention_metadata import AttentionLayer, AttentionMetadata
from labkit.engine.attention.kernel_dispatch import Dispatch, KernelSwitches
from labkit.engine.attention.launch_evidence import Launch, Reports, report_launches
from labkit.engine.attention.paged_backend_base import PagedBackend
from labkit.kernel_constants import BQ, RESOLVER_IDS

if TYPE_CHECKING:
    from labkit.engine.attention.backends.replay_state import ReplayState

for lookup_type, resolver in sequence_resolvers.BY_LOOKUP_TYPE.items():
    resolver_variants.register(lookup_type, resolver)


MAX_HEAD_DIM = 256
# The fields of ``attention_params.PARAMS_DTYPES`` that differ from layer to layer: array addresses.
LAYER_ARRAYS = ("q", "k_pool", "v_pool", "out", "sinks")


@dataclass(frozen=True, slots=True)
class PreparedLaunch:
    """A kernel launch and its parameters, for all layers of one kind in a batch."""

    dispatch: Dispatch
    params: NDArray[Any]  # [1], of ``attention_params.PARAMS_DTYPES``
    params_address: int
    array_fields: tuple[Any, ...]  # views of the ``LAYER_ARRAYS`` in ``params``
    body: int  # address of the kernel's compiled arithmetic
    workers: int  # threads that share the launch
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    pool_dtype: int  # index into ``kernel_entry_points.POOL_DTYPES``
    token_numbers: int  # elements in the keys of one token


@dataclass(slots=True)
class CpuPrepared:
    """Data that a batch's launches share, filled in while its layers run."""

    launches: dict[int, PreparedLaunch] = field(default_factory=dict)  # by kind of layer
    replay: ReplayState | None = None


class CpuBackend(PagedBackend):
    """Paged attention in float32 by numba kernels, on labkit's thread pool.

    The pools may be in half precision or quantised. Their elements are then converted in registers.
    ``pool_addresses`` has the addresses of each layer's key and value pools. ``scratch`` is uint8
    [workers, bytes].

    The result of a query token is bit-identical in every batch, with either kernel and with every
    resolver, block size, thread count and switch except ``split_kv``, which changes the order of
    summation. Two threads must not use a backend at the same time, because they would share its
    scratch memory.
    """

    name = "cpu"
    dtypes = tuple(POOL_DTYPES)

    def __init__(self, switches: KernelSwitches) -> None:
        super().__init__(switches.resolver)
        self._switches = switches
        self.scratch = aligned_zeros(1, 0)
        self.pool_addresses: list[tuple[int, int]] = []

    def _zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        return np.zeros((*shape[:3], pool_columns(dtype, shape[3])), POOL_DTYPES[dtype])

    def _pool_dtypes(self, pool: Any) -> tuple[str, str | None]:
        return pool_dtype_name(pool), "float32"

    def _head_dim(self, pool: Any) -> int:
        return head_dim_of(pool)

    def adopt(self, keys: Sequence[Any], values: Sequence[Any]) -> None:
        super().adopt(keys, values)
        if not all(pool.flags.c_contiguous for pool in (*keys, *values)):
            raise ValueError("k_pool and v_pool must be contiguous: they are written in place")
        pairs = zip(keys, values, strict=True)
        self.pool_addresses = [(address_of(k), address_of(v)) for k, v in pairs]

    def _convert_sinks(self, sinks: Any) -> Any:
        return None if sinks is None else np.ascontiguousarray(sinks, dtype=np.float32)

    def _check_supported(self, layer: AttentionLayer) -> None:
        input_validation.check_fused_layer(layer, self.name, MAX_HEAD_DIM)
        if self._switches.split_kv != "off" and TILE_KEYS % layer.block_size:
            raise ValueError(
                f"block size {layer.block_size}: must divide {TILE_KEYS}, because split_kv="
                f"{self._switches.split_kv} splits the keys at multiples of {TILE_KEYS}; set "
                "split_kv=off"
            )

    def forward(
        self, layer: int, q: Any, k: Any, v: Any, metadata: AttentionMetadata, out: Any = None
    ) -> Any:
        bound = self._layers[layer] or self.bound_layer(layer)
        batch: CpuPrepared = metadata.prepared
        launch = batch.launches.get(bound.kind) or self.prepare(metadata, bound)
        if bound.latent:  # one pool; kernels return whole keys, and a value is a part of its key
            v, result, out = k, out, None
        if out is None:
            out = np.empty(launch.q_shape, np.float32)
        fits = q.shape == launch.q_shape == out.shape and q.dtype == out.dtype == np.float32
        if k is not None:
            fits = fits and k.shape == v.shape == launch.k_shape and k.dtype == v.dtype == q.dtype
        if not (fits and out.flags.c_contiguous):
            input_validation.check_operands(bound, metadata.total_q, q, k, v, out)
        # The kernels get addresses only. The local names keep copies alive until the launch ends.
        q = np.ascontiguousarray(q)
        k_pool, v_pool = self.pool_addresses[layer]
        if k is not None:
            k, v = np.ascontiguousarray(k), np.ascontiguousarray(v)
            write = KVWrite(
                launch.pool_dtype, address_of(k), address_of(v), k_pool, v_pool,
                metadata.slot_mapping, launch.token_numbers,
            )  # fmt: skip
            kernel_entry_points.scatter(*write)
        sinks = 0 if bound.sinks is None else address_of(bound.sinks)
        arrays = address_of(q), k_pool, v_pool, address_of(out), sinks
        for view, address in zip(launch.array_fields, arrays, strict=True):
            view[0] = address
        counters = np.zeros((launch.workers + 1, kernel_entry_points.COUNTER_COLUMNS), np.int64)
        dispatch, nonce, reduce_rows = launch.dispatch, secrets.randbits(32), None
        arguments = AttentionLaunch(
            nonce, launch.body, launch.params_address, self.scratch, counters,
            metadata.cu_seqlens_q, metadata.seq_lens, bound.num_q_heads,
            dispatch.heads_per_unit, dispatch.partitions,
        )  # fmt: skip
        if dispatch.kernel == "tiled":
            kernel_entry_points.tiled(metadata.lookup, *arguments)
        elif dispatch.partitions == 1:
            kernel_entry_points.decode(metadata.lookup, *arguments)
        else:
            reduce_rows = _launch_partitions(launch, bound, metadata, arguments, q, out)
        metadata.launches.append(Launch(bound, dispatch, nonce, counters[:-1], reduce_rows))
        if not bound.latent:
            return out
        out = out[:, :, : bound.value_dim]
        return out if result is None else copy_into(result, out)

    def new_prepared(self) -> CpuPrepared:
        return CpuPrepared()

    def _can_share(self, last: AttentionMetadata) -> bool:
        """Return whether launches suit longer contexts too. A split of the keys depends on them."""
        threads = numba.get_num_threads()
        launches: dict[int, PreparedLaunch] = last.prepared.launches
        same_threads = all(launch.workers == threads for launch in launches.values())
        return self._switches.split_kv == "off" and same_threads

    def prepare(self, metadata: AttentionMetadata, layer: AttentionLayer) -> PreparedLaunch:
        """Choose the kernel for a kind of layer, and prepare the parameters of its launch."""
        workers = numba.get_num_threads()
        dispatch = kernel_dispatch.choose_kernel(
            metadata, layer, self._switches, kernel_dispatch.cpu_limits(workers)
        )
        pool_dtype = POOL_DTYPES[layer.dtype]
        if dispatch.kernel == "tiled":
            size = tiled_attention_kernel.scratch_bytes(BQ * dispatch.sharing_heads, layer.head_dim)
            body = tiled_attention_kernel.body(pool_dtype, self._switches.window_skip)
        else:
            size = decode_attention_kernel.scratch_bytes(dispatch.heads_per_unit, layer.head_dim)
            body = decode_attention_kernel.body(
                pool_dtype, dispatch.partitions == 1 and self._switches.window_skip
            )
        if self.scratch.shape[1] < size:  # a row for each possible worker
            self.scratch = aligned_zeros(numba.config.NUMBA_NUM_THREADS, size)
        params = attention_params.pack(
            layer.dtype,
            metadata.block_tables,
            num_q_heads=layer.num_q_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            block_size=layer.block_size,
            heads_per_unit=dispatch.heads_per_unit,
            scale=layer.scale,
            window=layer.window,
            softcap=layer.softcap,
            window_skip=self._switches.window_skip,
        )
        launch = PreparedLaunch(
            dispatch=dispatch,
            params=params,
            params_address=address_of(params),
            array_fields=tuple(params[name] for name in LAYER_ARRAYS),
            body=body,
            workers=workers,
            q_shape=(metadata.total_q, layer.num_q_heads, layer.head_dim),
            k_shape=(metadata.total_q, layer.num_kv_heads, layer.head_dim),
            pool_dtype=kernel_entry_points.POOL_DTYPES.index(pool_dtype),
            token_numbers=layer.num_kv_heads * layer.head_dim,
        )
        metadata.prepared.launches[layer.kind] = launch
        return launch

    def report(self, metadata: AttentionMetadata) -> Reports:
        if not metadata.launches:
            return ()
        return report_launches(metadata.drain_launches(), metadata, "cpu")


def copy_into(target: NDArray[Any], array: NDArray[Any]) -> NDArray[Any]:
    """Copy ``array`` into ``target``, which must have the same shape, and return ``target``."""
    if target.shape != array.shape:
        raise ValueError(f"out must have shape {list(array.shape)}, not {list(target.shape)}")
    np.copyto(target, array)
    return target


def _launch_partitions(
    launch: PreparedLaunch,
    layer: AttentionLayer,
    metadata: AttentionMetadata,
    arguments: AttentionLaunch,
    q: NDArray[np.float32],
    out: NDArray[np.float32],
) -> NDArray[np.int64]:
    """Decode partitions of the keys, merge them into ``out``; return the reduce kernel's rows."""
    partitions = launch.dispatch.partitions
    sums, states = attention_params.partials(q, partitions)
    launch.params["partitions"] = partitions
    launch.params["partial_sums"] = address_of(sums)
    launch.params["partial_states"] = address_of(states)
    kernel_entry_points.decode(metadata.lookup, *arguments)
    rows = np.zeros((launch.workers + 1, kernel_entry_points.COUNTER_COLUMNS), np.int64)
    resolver, sinks = RESOLVER_IDS[metadata.resolver.variant], attention_params.base2(layer.sinks)
    kernel_entry_points.reduce(arguments.nonce, resolver, sums, states, sinks, out, rows)
    return rows[:-1]
