"""Kernel cases: the sizes of each batch and the memory of its inputs."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.config import Case, Precision, Workload
from labkit.cpu.precision.kv_dtypes import ITEM_BYTES, NUMPY_DTYPES, from_float32, to_float32

# A prime number, so that no two blocks (their sizes are powers of two times a head count) hold
# the same values: a kernel that reads the wrong block cannot be right by accident.
TEMPLATE_LENGTH = 1_048_573
POOL_COUNT = 2  # keys and values
# A wash-out launches the whole batch, or a part of this size if the batch is larger: a part of this
# size already exceeds the caches.
WASHOUT_FLOPS = 0.5e9
WASHOUT_BYTES = 48e6
# Another process can only lengthen a launch. So a turn, except on cold caches, times this many
# launches of a batch that takes less than some 0.3 ms, and the fastest counts. Others are launched
# once: the time of more launches per round is worth more as rounds.
TIMED_LAUNCHES = 3
BRIEF_FLOPS = 36e6
BRIEF_BYTES = 4.5e6
# On a device with a queue, the launches of a chain together do at most this much work. Waiting for
# the device costs some hundred microseconds, which is little beside a chain of ten milliseconds.
CHAIN_FLOPS = 32e9
CHAIN_BYTES = 2e9
MAX_CHAIN_LENGTH = 32


@dataclass(frozen=True, slots=True)
class CaseGeometry:
    """Sizes of a case, before anything is allocated.

    ``query_lens`` and ``seq_lens`` are int32 [num_seqs]: decodes first, then prefills, then the
    requests of ``case.uneven``. ``num_blocks`` includes the null block, ``block_size`` is the
    tokens of a block, and ``pool_bytes`` the size of keys and values together.
    """

    case: Case
    query_lens: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    num_blocks: int
    block_size: int
    pool_bytes: int

    @property
    def total_q(self) -> int:
        return int(self.query_lens.sum())


def element_bytes(workload: Workload) -> int:
    """Return the bytes of one element of the queries, keys and values."""
    return ITEM_BYTES[workload.dtype.value]


@dataclass(frozen=True, slots=True)
class MinimumWork:
    """The least work that any kernel must do for a case.

    ``flops``: a multiplication and an addition per query-key pair and head dimension, once for
    the logits and once for the values. ``bytes``: every visible key and value once per KV head,
    the queries, and the output.
    """

    flops: int
    bytes: int


def work(size: CaseGeometry, workload: Workload) -> MinimumWork:
    """Return the minimum work of a case under the causal mask and the workload's window."""
    q, kv = size.query_lens.astype(np.int64), size.seq_lens.astype(np.int64)
    window = int(kv.max()) if workload.window is None else workload.window
    first = np.repeat(kv - q - (np.cumsum(q) - q), q)
    seen = np.minimum(first + np.arange(size.total_q) + 1, window)
    keys = np.minimum(kv, q + window - 1)
    numbers = POOL_COUNT * int(keys.sum()) * workload.num_kv_heads
    numbers += 2 * size.total_q * workload.num_heads
    return MinimumWork(
        flops=4 * int(seen.sum()) * workload.num_heads * workload.head_dim,
        bytes=element_bytes(workload) * numbers * workload.head_dim,
    )


def geometry(case: Case, workload: Workload, block_size: int) -> CaseGeometry:
    """Return the sizes of a case. Decodes come first, as the scheduler packs a batch."""
    own = np.array(case.uneven, np.int32).reshape(-1, 2)
    kinds = np.array([[1, case.context], [case.chunk, case.past + case.chunk]], np.int32)
    rows = np.concatenate(
        [np.repeat(kinds, [case.decode, case.prefill], axis=0), own.cumsum(axis=1, dtype=np.int32)]
    )
    query_lens, seq_lens = np.ascontiguousarray(rows.T)
    num_blocks = 1 + int((-(-seq_lens // block_size)).sum())
    pool_elements = num_blocks * block_size * workload.num_kv_heads * workload.head_dim
    pool_bytes = POOL_COUNT * element_bytes(workload) * pool_elements
    return CaseGeometry(case, query_lens, seq_lens, num_blocks, block_size, pool_bytes)


def washout_share(size: CaseGeometry, workload: Workload) -> float:
    """Return the share of a batch that is launched as its wash-out: 1 unless the batch is large."""
    least = work(size, workload)
    return min(1.0, WASHOUT_FLOPS / least.flops, WASHOUT_BYTES / least.bytes)


def timed_launches(size: CaseGeometry, workload: Workload) -> int:
    """Return the number of launches that a turn times, except on cold caches, in all runs."""
    least = work(size, workload)
    brief = least.flops <= BRIEF_FLOPS and least.bytes <= BRIEF_BYTES
    return TIMED_LAUNCHES if brief else 1


def chain_length(size: CaseGeometry, workload: Workload) -> int:
    """Return the number of launches in a chain of this batch. It is the same in all runs."""
    least = work(size, workload)
    longest = min(MAX_CHAIN_LENGTH, CHAIN_FLOPS / least.flops, CHAIN_BYTES / least.bytes)
    return max(1, math.floor(longest))


def scaled_case(case: Case, share: float) -> Case:
    """Return a case with ``share`` of the requests of each kind, rounded up."""

    def scaled(count: int) -> int:
        return max(1, math.ceil(count * share)) if count else 0

    return replace(
        case,
        decode=scaled(case.decode),
        prefill=scaled(case.prefill),
        uneven=case.uneven[: scaled(len(case.uneven))],
    )


def skip_reason(size: CaseGeometry, workload: Workload) -> str | None:
    """Return the reason that a case is skipped (its KV pool is too large), or None if it runs."""
    from labkit.engine.memory_budget.budget_decision import format_bytes

    if size.pool_bytes <= workload.max_pool_bytes:
        return None
    needed, limit = map(format_bytes, (size.pool_bytes, workload.max_pool_bytes))
    return f"its KV pool needs {needed}; raise workload.max_pool_bytes (now {limit})"


def block_tables(size: CaseGeometry, seed: int) -> NDArray[np.int32]:
    """Assign the blocks 1, 2, ... to the requests at random, each block to one request.

    Returns int32 [num_seqs, max_blocks], padded with 0. It depends only on the seed and the case.
    """
    counts = -(-size.seq_lens // size.block_size)
    rng = np.random.default_rng([seed, zlib.crc32(size.case.name.encode())])
    tables = np.zeros((len(counts), int(counts.max())), np.int32)
    used = np.arange(tables.shape[1]) < counts[:, None]
    tables[used] = rng.permutation(np.arange(1, size.num_blocks, dtype=np.int32))
    return tables


@dataclass(frozen=True, slots=True)
class KernelMemory:
    """Memory that all arms and cases share, so that addresses do not differ between arms.

    The inputs are NumPy arrays or arrays on a device. ``out`` is always a NumPy array. All are
    flat and have the same element type, which is stored in the NumPy type that ``NUMPY_DTYPES``
    gives. In the shape of a case (``view``), ``q`` and ``out`` are [tokens, num_heads, head_dim],
    and the pools are [num_blocks, block_size, num_kv_heads, head_dim].
    """

    q: Any
    out: NDArray[Any]
    k_pool: Any
    v_pool: Any

    def moved(self, put: Callable[[NDArray[Any]], Any]) -> KernelMemory:
        return replace(self, q=put(self.q), k_pool=put(self.k_pool), v_pool=put(self.v_pool))

    def widened(self) -> KernelMemory:
        """Return the memory converted to float32, or this memory itself if it is float32."""
        memory = self.moved(as_float32)
        return memory if memory.q is self.q else replace(memory, out=np.empty_like(memory.q))

    def view(self, size: CaseGeometry, workload: Workload) -> KernelMemory:
        """Return views of the first elements of each array, in the shapes of a case."""
        rows = (size.total_q, workload.num_heads, workload.head_dim)
        pool = (size.num_blocks, size.block_size, workload.num_kv_heads, workload.head_dim)
        return KernelMemory(
            _shaped(self.q, rows),
            _shaped(self.out, rows),
            _shaped(self.k_pool, pool),
            _shaped(self.v_pool, pool),
        )


def _shaped(flat: Any, shape: tuple[int, ...]) -> Any:
    return flat[: math.prod(shape)].reshape(shape)


def query_elements(size: CaseGeometry, workload: Workload) -> int:
    """Return the number of elements of a case's queries, which is also that of its output."""
    return size.total_q * workload.num_heads * workload.head_dim


def allocate(
    pool_bytes: int, query_elements: int, seed: int, dtype: Precision = Precision.float32
) -> KernelMemory:
    """Allocate memory for the largest case and fill it with random values.

    Every dtype gets the same float32 values, rounded to the dtype. Drawing a gigabyte of random
    values would take seconds, so a short random sequence is repeated. Two threads fill the
    arrays, because the first touch of the pages takes about 2 s per GB.
    """
    numbers = np.random.default_rng(seed).standard_normal(TEMPLATE_LENGTH, dtype=np.float32)
    template, stored = from_float32(numbers, dtype.value), NUMPY_DTYPES[dtype.value]
    half = pool_bytes // POOL_COUNT // stored.itemsize
    keys, values = np.empty(half, stored), np.empty(half, stored)
    q, out = np.empty(query_elements, stored), np.empty(query_elements, stored)
    shifts = (0, TEMPLATE_LENGTH // 3, TEMPLATE_LENGTH // 2)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(_tile, (keys, values, q), (np.roll(template, shift) for shift in shifts)))
    return KernelMemory(q, out, keys, values)


def as_float32(stored: NDArray[Any]) -> NDArray[np.float32]:
    """Convert stored values to float32 without rounding. A float32 array is returned as it is."""
    return stored if stored.dtype == np.float32 else to_float32(stored)


def _tile(target: NDArray[Any], template: NDArray[Any]) -> None:
    for start in range(0, target.size, template.size):
        part = target[start : start + template.size]
        part[:] = template[: part.size]
