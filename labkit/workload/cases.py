"""The geometry and the input of kernel cases: who has how many tokens, and where."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from labkit.config import Case, Workload

F32 = 4  # bytes
# A prime, so that no two blocks (their sizes are powers of two times a head count) hold
# the same values: a kernel that walks the wrong block table cannot be right by accident.
TEMPLATE = 1_048_573
POOLS = 2  # keys and values


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of a case, before anything is allocated.

    ``query_lens`` and ``seq_lens`` are int32 [num_seqs], decodes first; ``num_blocks``
    counts the null block; ``pool_bytes`` is keys and values together.
    """

    case: Case
    query_lens: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    num_blocks: int
    pool_bytes: int

    @property
    def total_q(self) -> int:
        """Query tokens of all requests."""
        return int(self.query_lens.sum())


def block_bytes(workload: Workload, block_size: int) -> int:
    """Return the bytes of one block of keys and values in float32."""
    return POOLS * F32 * block_size * workload.num_kv_heads * workload.head_dim


@dataclass(frozen=True, slots=True)
class Work:
    """What a dispatch must do at least, whatever the kernel.

    ``flops``: a product and a sum per query-key pair and head dimension, once for the
    logits and once for the values. ``bytes``: every key and value that a query sees once
    per KV head, the queries, and the output (float32).
    """

    flops: int
    bytes: int


def work(size: Geometry, workload: Workload) -> Work:
    """Count a case's work under the causal mask and the workload's window."""
    q, kv = size.query_lens.astype(np.int64), size.seq_lens.astype(np.int64)
    window = int(kv.max()) if workload.window is None else workload.window
    first = np.repeat(kv - q - (np.cumsum(q) - q), q)
    seen = np.minimum(first + np.arange(size.total_q) + 1, window)
    keys = np.minimum(kv, q + window - 1)
    numbers = POOLS * int(keys.sum()) * workload.num_kv_heads
    numbers += 2 * size.total_q * workload.num_heads
    return Work(
        flops=4 * int(seen.sum()) * workload.num_heads * workload.head_dim,
        bytes=F32 * numbers * workload.head_dim,
    )


def geometry(case: Case, workload: Workload, block_size: int) -> Geometry:
    """Size a case: decodes first, as the scheduler packs them."""
    query_lens = _per_request(case, 1, case.chunk)
    seq_lens = _per_request(case, case.context, case.past + case.chunk)
    num_blocks = 1 + int((-(-seq_lens // block_size)).sum())
    return Geometry(
        case=case,
        query_lens=query_lens,
        seq_lens=seq_lens,
        num_blocks=num_blocks,
        pool_bytes=num_blocks * block_bytes(workload, block_size),
    )


def _per_request(case: Case, decode: int, prefill: int) -> NDArray[np.int32]:
    values = np.array([decode, prefill], np.int32)
    return np.repeat(values, [case.decode, case.prefill])


def skip_reason(size: Geometry, workload: Workload) -> str | None:
    """Say why a case is not run, or None."""
    if size.pool_bytes <= workload.max_pool_bytes:
        return None
    return (
        f"its KV pool needs {size.pool_bytes} bytes; raise workload.max_pool_bytes "
        f"(now {workload.max_pool_bytes})"
    )


def block_tables(size: Geometry, block_size: int, seed: int) -> NDArray[np.int32]:
    """Deal the blocks 1, 2, ... to the requests at random, each to one request only.

    Returns
    -------
    int32 [num_seqs, max_blocks], padded with 0. They depend on the seed and the case
    alone, not on which other cases run.
    """
    counts = -(-size.seq_lens // block_size)
    rng = np.random.default_rng([seed, zlib.crc32(size.case.name.encode())])
    tables = np.zeros((len(counts), int(counts.max())), np.int32)
    used = np.arange(tables.shape[1]) < counts[:, None]
    tables[used] = rng.permutation(np.arange(1, size.num_blocks, dtype=np.int32))
    return tables


@dataclass(frozen=True, slots=True)
class Arrays:
    """The arrays that all cases share; a case takes the beginning of each.

    ``q`` and ``out`` are float32 [tokens, num_heads, head_dim]; the pools are float32
    [num_blocks, block_size, num_kv_heads, head_dim].
    """

    q: NDArray[np.float32]
    out: NDArray[np.float32]
    k_pool: NDArray[np.float32]
    v_pool: NDArray[np.float32]


def allocate(sizes: list[Geometry], workload: Workload, block_size: int, seed: int) -> Arrays:
    """Make one pool and one query big enough for every case, and fill them.

    Random numbers for a gigabyte would take seconds, so a short random sequence is
    repeated; the first touch of the pages (about 2 s per GB) is shared by two threads.
    """
    blocks = max(size.num_blocks for size in sizes)
    tokens = max(size.total_q for size in sizes)
    template = np.random.default_rng(seed).standard_normal(TEMPLATE, dtype=np.float32)
    pool_shape = (blocks, block_size, workload.num_kv_heads, workload.head_dim)
    q_shape = (tokens, workload.num_heads, workload.head_dim)
    k_pool, v_pool = np.empty(pool_shape, np.float32), np.empty(pool_shape, np.float32)
    q, out = np.empty(q_shape, np.float32), np.empty(q_shape, np.float32)
    with ThreadPoolExecutor(2) as threads:
        fills = [
            threads.submit(_tile, array.reshape(-1), np.roll(template, shift))
            for array, shift in ((k_pool, 0), (v_pool, TEMPLATE // 3), (q, TEMPLATE // 2))
        ]
        for fill in fills:
            fill.result()
    return Arrays(q=q, out=out, k_pool=k_pool, v_pool=v_pool)


def _tile(target: NDArray[np.float32], template: NDArray[np.float32]) -> None:
    for start in range(0, target.size, template.size):
        part = target[start : start + template.size]
        part[:] = template[: part.size]
