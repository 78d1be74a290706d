"""Entry points of the attention kernels: decode, tiled, reduce (split-KV) and scatter (KV write).

A launch has a grid of units, and one worker per thread that runs them. The cost of a unit varies
(contexts are ragged, and the causal rows of a prompt grow), so workers take their units from a
shared queue. The result of a unit does not depend on the worker that runs the unit.

numba compiles the entry points once per type of ``lookup``, the resolver's data. A launch finds
the sequence of each unit and then calls the unit's arithmetic, the *body*
(``decode_attention_kernel.body``, ``tiled_attention_kernel.body``), by address. A body is compiled
once per dtype of the KV pools.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import prange
from numpy.typing import NDArray

from labkit.cpu.attention.attention_intrinsics import (
    call_body,
    copy_bytes,
    exp2_scalar,
    quantize_to_int4,
    quantize_to_int8,
    round_to_bfloat16,
    round_to_float16,
    take_ticket,
)
from labkit.cpu.attention.resolver_variants import (
    find_qblock,
    find_token,
    qblock_units,
    resolver_id,
    token_units,
)
from labkit.cpu.precision import kv_dtypes
from labkit.cpu.precision.kv_dtypes import KV_GROUP, group_bytes
from labkit.cpu.runtime.jit import inner, kernel
from labkit.cpu.simd.register_tile_sizes import LANES
from labkit.cpu.simd.simd_emitter import FLOAT_BYTES
from labkit.kernel_constants import (
    BLOCKS_COLUMN,
    BQ,
    ITERATIONS_COLUMN,
    KERNEL_IDS,
    STAMP_COLUMN,
    STAMP_FACTORS,
    STAMP_MASK,
    SURPLUS_COLUMN,
)

COUNTER_COLUMNS = 8  # int64 per worker: a cache line of its own
SURPLUS_UNIT = -1  # returned by a unit without work instead of its number of KV blocks
POOL_DTYPES = tuple(kv_dtypes.POOL_DTYPES.values())
_FLOAT32, _FLOAT16, _BFLOAT16, _INT8, _INT4 = range(len(POOL_DTYPES))
_INT8_GROUP_BYTES, _INT4_GROUP_BYTES = group_bytes("int8"), group_bytes("int4")
_REDUCE = KERNEL_IDS["reduce"]
_NONCE_FACTOR, _KERNEL_FACTOR, _RESOLVER_FACTOR = STAMP_FACTORS


class AttentionLaunch(NamedTuple):
    """The arguments of one launch of ``decode`` or ``tiled``."""

    nonce: int  # number of the launch, which the launch's stamp encodes
    body: int  # address of the compiled body
    params: int  # address of the parameters (``attention_params``)
    scratch: NDArray[Any]  # uint8 [workers, bytes]
    # int64 [workers + 1, COUNTER_COLUMNS]: a row of counts per worker, then the queue.
    counters: NDArray[Any]
    cu_seqlens_q: NDArray[Any]  # int32 [num_seqs + 1]
    seq_lens: NDArray[Any]  # int32 [num_seqs]
    num_q_heads: int
    heads_per_unit: int  # query heads of a unit, a divisor of ``num_q_heads``
    partitions: int  # of the keys of a query, each with a decode unit of its own; 1: not split


class KVWrite(NamedTuple):
    """The arguments of ``scatter``: the keys and values of new tokens, and their slots."""

    pool_dtype: int  # index into ``POOL_DTYPES``
    k: int  # addresses of the new keys and values, float32 [tokens, token_numbers]
    v: int
    k_pool: int  # addresses of the pools
    v_pool: int
    slot_mapping: NDArray[Any]  # int64 [tokens]; tokens with slot -1 are not written
    token_numbers: int  # elements in the keys of one token, a multiple of ``LANES``


@inner
def stamp(nonce: int, kernel_id: int, resolver: int) -> int:
    """Return the stamp of a launch, the number that the kernel writes to prove that it ran.

    The host computes the expected stamp with ``launch_evidence.launch_stamp``.
    """
    mixed = nonce * _NONCE_FACTOR + kernel_id * _KERNEL_FACTOR + resolver * _RESOLVER_FACTOR
    return mixed & STAMP_MASK


def _work_loop(run_unit: Callable[..., tuple[int, int]], kernel: str) -> Callable[..., None]:
    """Return a worker's loop over the work queue, compiled for one kind of unit.

    ``run_unit(launch, lookup, place, column, scratch)`` runs one unit of the grid. The grid is a
    matrix: its rows (``place``) are query tokens or Q-blocks, its columns groups of query heads
    and, for ``decode``, partitions of the keys. ``scratch`` is the address of the worker's memory.
    ``run_unit`` returns the number of search steps and the number of KV blocks visited. For a
    surplus unit, which has no work, it returns ``SURPLUS_UNIT`` instead of the number of blocks.
    """
    kernel_id = KERNEL_IDS[kernel]

    def run_units(
        worker: int, units: int, columns: int, launch: AttentionLaunch, lookup: Any
    ) -> None:
        scratch = launch.scratch[worker].ctypes.data
        queue = launch.counters[len(launch.counters) - 1].ctypes.data
        iterations, surplus, blocks = 0, 0, 0
        unit = take_ticket(queue)
        while unit < units:
            steps, visited = run_unit(launch, lookup, unit // columns, unit % columns, scratch)
            iterations += steps
            if visited == SURPLUS_UNIT:
                surplus += 1
            else:
                blocks += visited
            unit = take_ticket(queue)
        counts = launch.counters[worker]
        counts[STAMP_COLUMN] = stamp(launch.nonce, kernel_id, resolver_id(lookup)) + worker
        counts[ITERATIONS_COLUMN] = iterations
        counts[SURPLUS_COLUMN] = surplus
        counts[BLOCKS_COLUMN] = blocks

    # A unique name, because the linker would merge two loops of the same name that were compiled by
    # different processes and loaded from the cache.
    run_units.__qualname__ = f"run_{kernel}_units"
    return inner(run_units)


@inner
def run_decode_unit(
    launch: AttentionLaunch, lookup: Any, place: int, column: int, scratch: int
) -> tuple[int, int]:
    """Run one unit of ``decode``. Return its search steps and the KV blocks visited."""
    sequence, token, steps = find_token(lookup, place, launch.cu_seqlens_q)
    if sequence < 0:
        return steps, SURPLUS_UNIT
    begin, end = launch.cu_seqlens_q[sequence], launch.cu_seqlens_q[sequence + 1]
    # A wrong lookup may return any sequence. The clamping ensures that the unit reads only keys of
    # that sequence.
    context = int(launch.seq_lens[sequence]) if end > begin else 0
    high = max(0, min(context, context - end + token + 1))
    q_head, partition = divmod(column, launch.partitions)
    q_head *= launch.heads_per_unit
    blocks = call_body(
        launch.body, launch.params, scratch, sequence, q_head, partition, token, high
    )
    return steps, blocks


_run_decode_units = _work_loop(run_decode_unit, "decode")


@inner
def run_decode_worker(worker: int, launch: AttentionLaunch, lookup: Any) -> None:
    """Run one worker's part of ``decode``."""
    columns = launch.num_q_heads // launch.heads_per_unit * launch.partitions
    units = token_units(lookup, launch.cu_seqlens_q) * columns
    _run_decode_units(worker, units, columns, launch, lookup)


@kernel
def decode(lookup: Any, *arguments: Any) -> None:
    """Run the decode kernel: one unit per query token, group of query heads and partition.

    ``arguments`` are the fields of ``AttentionLaunch``. All units of a token follow one another, so
    that consecutive units read adjacent keys.
    """
    launch = AttentionLaunch(*arguments)
    workers = len(launch.counters) - 1
    launch.counters[workers, 0] = 0
    for worker in prange(workers):
        run_decode_worker(worker, launch, lookup)


@inner
def run_tiled_unit(
    launch: AttentionLaunch, lookup: Any, place: int, column: int, scratch: int
) -> tuple[int, int]:
    """Run one unit of ``tiled``. Return its search steps and the KV blocks visited."""
    sequence, start, steps = find_qblock(lookup, place, launch.cu_seqlens_q)
    begin, length = 0, 0
    if sequence >= 0:
        begin = int(launch.cu_seqlens_q[sequence])
        length = launch.cu_seqlens_q[sequence + 1] - begin
    if not 0 <= start < length:
        return steps, SURPLUS_UNIT
    high = launch.seq_lens[sequence] - length + start + 1
    tokens = min(BQ, length - start)
    token, q_head = begin + start, column * launch.heads_per_unit
    blocks = call_body(launch.body, launch.params, scratch, sequence, q_head, token, tokens, high)
    return steps, blocks


_run_tiled_units = _work_loop(run_tiled_unit, "tiled")


@kernel
def tiled(lookup: Any, *arguments: Any) -> None:
    """Run the tiled kernel: one unit per group of query heads and Q-block of ``BQ`` tokens.

    ``arguments`` are the fields of ``AttentionLaunch``. A packed grid has
    ``total_q // BQ + num_seqs`` Q-blocks. This upper bound does not depend on the individual query
    lengths. Surplus units exit at once.
    """
    launch = AttentionLaunch(*arguments)
    workers = len(launch.counters) - 1
    columns = launch.num_q_heads // launch.heads_per_unit
    units = qblock_units(lookup, launch.cu_seqlens_q) * columns
    launch.counters[workers, 0] = 0
    for worker in prange(workers):
        _run_tiled_units(worker, units, columns, launch, lookup)


@kernel
def reduce(
    nonce: int,
    resolver: int,  # a value of ``RESOLVER_IDS``, for the stamp
    sums: NDArray[Any],  # float32 [tokens, heads, partitions, head_dim]: sums of weighted values
    states: NDArray[Any],  # float32 [..., 2]: running maximum (base 2) and softmax sum
    sinks: NDArray[Any],  # float32 [heads], in base 2, or [0] without sinks
    out: NDArray[Any],  # float32 [tokens, heads, head_dim]
    counters: NDArray[Any],
) -> None:
    """Merge the partitions' results for every query token and head: the second step of split-KV.

    ``nonce`` and ``counters`` are as in ``AttentionLaunch``. Sinks are added here and not in the
    partitions, because a sink counts once per query.
    """
    workers = len(counters) - 1
    tokens, heads, partitions, head_dim = sums.shape
    for worker in prange(workers):
        for row in range(worker, tokens * heads, workers):
            token, head = row // heads, row % heads
            largest = states[token, head, :, 0].max()
            if len(sinks):
                largest = max(largest, sinks[head])
            total = exp2_scalar(sinks[head] - largest) if len(sinks) else np.float32(0)
            merged = out[token, head]
            merged[:] = 0
            for p in range(partitions):
                weight = states[token, head, p, 1]
                if weight != 0:
                    factor = exp2_scalar(states[token, head, p, 0] - largest)
                    total += weight * factor
                    part = sums[token, head, p]
                    for d in range(head_dim):
                        merged[d] += factor * part[d]
            if total != 0:
                for d in range(head_dim):
                    merged[d] /= total
        counters[worker, STAMP_COLUMN] = stamp(nonce, _REDUCE, resolver) + worker


@kernel
def scatter(*arguments: Any) -> None:
    """Write the keys and values of new tokens to their slots in the KV pools.

    ``arguments`` are the fields of ``KVWrite``.
    """
    write = KVWrite(*arguments)
    for token in prange(len(write.slot_mapping)):
        write_token_kv(write, token)


@inner
def write_token_kv(write: KVWrite, token: int) -> None:
    """Write the keys and values of one token to its slot, rounded to the pools' dtype."""
    slot, numbers = write.slot_mapping[token], write.token_numbers
    if slot >= 0:
        source, target = FLOAT_BYTES * token * numbers, slot * numbers
        write_row(write.pool_dtype, write.k_pool, target, write.k + source, numbers)
        write_row(write.pool_dtype, write.v_pool, target, write.v + source, numbers)


@inner
def write_row(pool_dtype: int, pool: int, first: int, source: int, numbers: int) -> None:
    """Convert ``numbers`` float32 to a pool's type, and write them from element ``first`` on.

    ``pool_dtype`` is an index into ``POOL_DTYPES``. ``pool`` and ``source`` are addresses.
    """
    if pool_dtype == _FLOAT32:
        copy_bytes(pool + 4 * first, source, 4 * numbers)
    elif pool_dtype == _FLOAT16:
        round_to_float16(pool + 2 * first, source, numbers // LANES)
    elif pool_dtype == _BFLOAT16:
        round_to_bfloat16(pool + 2 * first, source, numbers // LANES)
    elif pool_dtype == _INT8:
        target = pool + first // KV_GROUP * _INT8_GROUP_BYTES
        quantize_to_int8(target, source, numbers // KV_GROUP)
    else:
        target = pool + first // KV_GROUP * _INT4_GROUP_BYTES
        quantize_to_int4(target, source, numbers // KV_GROUP)
