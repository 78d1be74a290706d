"""The innermost products of the decode kernel: queries with keys, and weights with values.

Keys and values are read once, directly from the KV pools. Addresses are int64, strides are in
bytes. Elements are float32, except in the pools, whose dtype the launch's parameters specify.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numba import types

from labkit.cpu.precision.pool_elements import PoolElement, QuantizedType, element_type
from labkit.cpu.runtime.aligned_memory import CACHE_LINE_BYTES
from labkit.cpu.simd.register_tile_sizes import HOST_REGISTERS, LANES
from labkit.cpu.simd.simd_emitter import F32, FLOAT_BYTES, I64, VECTOR_BYTES, Emitter, emitted

RUN_KEYS = 4  # adjacent keys or values that are read together
# Query rows that are multiplied by each run: as many as fit the registers. Quantised keys are read
# one by one, so that more rows fit, because it takes longer to dequantise a key than to load it.
_MAX_ROWS = 4
_RUN_ROWS = HOST_REGISTERS.tile_rows(RUN_KEYS, _MAX_ROWS)


def _max_rows(element: PoolElement, keys: int) -> int:
    if keys == 1:
        return 1
    return _MAX_ROWS if isinstance(element, QuantizedType) else _RUN_ROWS


@emitted(types.int64, params=None)
def run_rows(code: Emitter, params: Any) -> Any:
    """Return the largest number of rows of ``dot_run`` and ``add_value_run``."""
    return I64(_max_rows(element_type(params), RUN_KEYS))


class _Keys:
    """Emits code that loads ``count`` keys or values, vector by vector, and prefetches later ones.

    The loaded keys start at address ``key`` and are ``stride`` bytes apart. The same number of
    later keys is prefetched. These start at address ``ahead`` and are ``RUN_KEYS`` keys apart.
    """

    def __init__(
        self, code: Emitter, element: PoolElement, count: int, key: Any, stride: Any, ahead: Any
    ) -> None:
        self.code, self.element, self.count = code, element, count
        self._keys = code.strided(key, stride, count)
        self._keys_ahead = code.strided(ahead, code.builder.mul(stride, I64(RUN_KEYS)), count)

    def load(self, block: Any, vector: int, keys: Sequence[int]) -> list[Any]:
        """Return one vector of each key of ``keys`` (indices), widened to float32.

        It is vector ``vector`` of block ``block`` in the key's row (see ``pool_elements``). If
        ``vector`` is 0, the same block of the keys to prefetch is prefetched.
        """
        code, size = self.code, self.element.block_bytes
        for i in keys if vector == 0 else ():
            place = code.offset(self._keys_ahead[i], block, size)
            for line in range(0, size, CACHE_LINE_BYTES):
                code.prefetch(code.offset(place, I64(line), 1) if line else place)
        return [self.element.load_vector(code, self._keys[i], block, vector) for i in keys]


def _intrinsic(emit_rows: Callable[[Emitter, int, _Keys, Any, list[Any]], None], keys: int) -> Any:
    """Return an intrinsic for the product of 1 to ``_max_rows`` rows and ``keys`` keys or values.

    ``emit_rows(code, rows, keys, vectors, addresses)`` emits the product for one number of rows.
    The intrinsic contains this code for each possible number of rows, and branches on its argument
    ``rows``. Its other arguments are the addresses and bytes per row of the result (``sums``,
    ``pitch``) and of the queries or weights (``other``, ``width``); ``key``, ``stride`` and
    ``ahead`` of ``_Keys``; and the vectors per key.
    """

    @emitted(params=None)
    def product(code, params, rows, sums, pitch, other, width, key, stride, vectors, ahead):  # type: ignore[no-untyped-def]
        element, addresses = element_type(params), [sums, pitch, other, width]

        def emit_height(height: int) -> None:
            block = _Keys(code, element, keys, key, stride, ahead)
            emit_rows(code, height, block, vectors, addresses)

        code.switch(rows, range(1, _max_rows(element, keys) + 1), emit_height)

    return product


def _emit_dots(code: Emitter, rows: int, keys: _Keys, vectors: Any, addresses: list[Any]) -> None:
    """Multiply queries by keys, lane by lane.

    ``addresses`` contains the address of the sums, their bytes per row, the address of the queries
    and their bytes per row. The product of a query row and key ``k`` is a vector of ``LANES`` sums,
    which becomes the ``k``-th vector of the row's sums. Lane ``i`` is one chain of multiply-adds
    over the elements ``i``, ``i + LANES``, ...
    """
    sums, pitch, queries, width = addresses
    targets, sources = code.strided(sums, pitch, rows), code.strided(queries, width, rows)
    size, numbers = keys.element.block_vectors, range(keys.count)
    blocks = code.blocks(vectors, size)
    for run in [numbers] if size == 1 else [range(k, k + 1) for k in numbers]:

        def multiply(block: Any, totals: list[Any], run: range = run) -> list[Any]:
            for v in range(size):
                vectors, sums = keys.load(block, v, run), []
                for row, source in enumerate(sources):
                    query = code.load(
                        code.offset(source, block, VECTOR_BYTES * size), VECTOR_BYTES * v
                    )
                    for k, vector in enumerate(vectors):
                        sums.append(code.fma(query, vector, totals[row * len(run) + k]))
                totals = sums
            return totals

        totals = code.loop(blocks, multiply, [code.constant(0.0)] * (rows * len(run)))
        for i, total in enumerate(totals):
            row, k = divmod(i, len(run))
            code.store(total, targets[row], VECTOR_BYTES * run[k])


def _emit_add_values(
    code: Emitter, rows: int, keys: _Keys, vectors: Any, addresses: list[Any]
) -> None:
    """Add weighted values to rows of sums, in the order of the values.

    ``addresses`` contains the address of the sums, their bytes per row, the address of the weights
    and their bytes per row. The weights of a row are contiguous.
    """
    sums, pitch, weights, width = addresses
    targets, sources = code.strided(sums, pitch, rows), code.strided(weights, width, rows)
    factors = [
        [code.splat(code.load(source, FLOAT_BYTES * k, F32)) for k in range(keys.count)]
        for source in sources
    ]

    size = keys.element.block_vectors

    def add(block: Any) -> None:
        for v in range(size):
            vectors = keys.load(block, v, range(keys.count))
            for target, weights in zip(targets, factors, strict=True):
                address = code.offset(target, block, VECTOR_BYTES * size)
                total = code.load(address, VECTOR_BYTES * v)
                for weight, vector in zip(weights, vectors, strict=True):
                    total = code.fma(weight, vector, total)
                code.store(total, address, VECTOR_BYTES * v)

    code.for_each(code.blocks(vectors, size), add)


dot_run, add_value_run = _intrinsic(_emit_dots, RUN_KEYS), _intrinsic(_emit_add_values, RUN_KEYS)
# For keys that are not in a run of ``RUN_KEYS``: one key with one row.
dot_key, add_value = _intrinsic(_emit_dots, 1), _intrinsic(_emit_add_values, 1)


@emitted()
def sum_lanes(code: Emitter, scores: Any, sums: Any) -> None:
    """Sum the lanes of each of ``LANES`` vectors, and write the ``LANES`` results.

    ``sums`` is the address of the vectors, ``scores`` that of the results. The lanes of every
    vector are added in the same order.
    """
    vectors = [code.load(sums, VECTOR_BYTES * i) for i in range(LANES)]
    width = LANES // 2  # partial sums of each vector after this step
    while width:
        low = [i // width * 2 * width + i % width for i in range(LANES)]
        high = [i + width for i in low]
        vectors = [
            code.builder.fadd(code.shuffle(a, b, low), code.shuffle(a, b, high))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        width //= 2
    code.store(vectors[0], scores)
