"""``gather``, ``gather_padded`` and ``masked``: MLX's attention over the keys of paged blocks.

``gather`` copies a request's blocks into one contiguous array and attends request by request. It
shows what a paged cache costs without a kernel that reads block tables: every layer copies all keys
and values that the requests of a step attend to.

The others attend once for all requests. ``gather_padded`` copies the blocks of all requests into
one rectangle, left-padded to the longest request, as vllm-mlx repacks a varlen batch before its
kernel. ``masked`` copies nothing: every query is compared with every cell of the pool up to the
last one in use, and a mask removes the cells of other requests, as in llama.cpp's unified KV
buffer. Its cells come in blocks here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from labkit.engine.attention.attention_metadata import AttentionLayer, AttentionMetadata
from labkit.engine.attention.backends import unpaged_sdpa
from labkit.engine.attention.backends.mlx_backend_base import MlxBackend
from labkit.engine.attention.launch_evidence import LaunchReport
from labkit.engine.attention.sequence_resolvers.sequence_resolver import units_of


@dataclass(frozen=True, slots=True)
class _Request:
    """A request of a step: its queries, its blocks, and which keys in these blocks it sees."""

    queries: slice
    blocks: mx.array
    keys: slice
    mask: mx.array | str | None


@dataclass(frozen=True, slots=True)
class _Rectangle:
    """The queries, keys and mask of one call of MLX's attention.

    ``queries``: indices of packed queries [rows, width]. ``outputs``: each packed query's index in
    the flattened rectangle. ``blocks``: the pool's blocks [rows, blocks per row], or the number of
    blocks at the pool's start that all queries read in place. ``mask``: bool [rows, 1, width,
    cells]. ``cells``: cells compared with a request's queries, summed over requests; ``tokens`` of
    them are the request's own.
    """

    queries: mx.array
    outputs: mx.array
    blocks: mx.array | int
    mask: mx.array
    cells: int
    tokens: int


class GatherBackend(MlxBackend):
    """Run MLX's attention on each request's gathered blocks."""

    name = "gather"

    def _check_supported(self, layer: AttentionLayer) -> None:
        unpaged_sdpa.check_softcap(layer.softcap, layer.sinks)

    def _pools(self, layer: AttentionLayer) -> list[mx.array]:
        pools = [self.keys[layer.index]]
        return pools if layer.latent else [*pools, self.values[layer.index]]

    def attend(
        self, layer: AttentionLayer, q: Any, metadata: AttentionMetadata, out: Any
    ) -> tuple[Any, LaunchReport]:
        by_kind: dict[int, tuple[_Request, ...]] = metadata.prepared.by_kind
        if layer.kind not in by_kind:
            by_kind[layer.kind] = _requests(metadata, layer.window)
        requests = by_kind[layer.kind]
        results = []
        for request in requests:
            gathered = [
                pool[request.blocks].reshape(1, -1, *pool.shape[2:])[:, request.keys]
                for pool in self._pools(layer)
            ]
            k, v = gathered[0], gathered[-1][..., : layer.value_dim]
            query, k, v = map(unpaged_sdpa.heads_first, (q[None, request.queries], k, v))
            result = unpaged_sdpa.attend(query, k, v, layer, request.mask)
            results.append(result[0].transpose(1, 0, 2).astype(q.dtype))
        keys = sum(request.keys.stop - request.keys.start for request in requests)
        empty = (0, layer.num_q_heads, layer.value_dim)
        return mx.concatenate(results) if results else mx.zeros(empty, q.dtype), LaunchReport(
            kernel="gather",
            grid=(len(requests),),
            reason="blocks are gathered for MLX's attention",
            resolver="none",
            layer=layer.index,
            kv_blocks_visited=sum(len(request.blocks) for request in requests),
            bytes=keys * layer.num_kv_heads * layer.token_bytes + 2 * q.nbytes,
            map_us=metadata.map_us,
        )


def _requests(metadata: AttentionMetadata, window: int | None) -> tuple[_Request, ...]:
    requests, starts = [], metadata.cu_seqlens_q.tolist()
    for s, context in enumerate(metadata.seq_lens.tolist()):
        start, stop = starts[s : s + 2]
        if start == stop:
            continue
        length = stop - start
        first = 0 if window is None else max(0, context - length - window + 1)
        begin = first // metadata.block_size
        blocks = metadata.block_tables[s, begin : -(-context // metadata.block_size)]
        skipped = begin * metadata.block_size
        mask = unpaged_sdpa.causal_mask(length, context - first, window)
        keys = slice(first - skipped, context - skipped)
        requests.append(_Request(slice(start, stop), mx.array(blocks), keys, mask))
    return tuple(requests)


class MaskedBackend(GatherBackend):
    """Run MLX's attention once, over all cells of the pool that are in use."""

    name = "masked"
    reason = "all queries read all cells in use, under a mask"

    def clear_values(self) -> None:
        """Set all values to 0: a masked cell has a weight of 0, and 0 times NaN is NaN."""
        for layer, pool in enumerate(self.values):
            zeros = mx.zeros_like(pool)
            mx.eval(zeros)
            if self.keys[layer] is pool:  # a latent layer
                self.keys[layer] = zeros
            self.values[layer] = zeros

    def _rectangle(self, metadata: AttentionMetadata, window: int | None) -> _Rectangle:
        size = metadata.block_size
        owners, _, positions = _queries(metadata)
        counts = -(-metadata.seq_lens // size)
        used = int(max(metadata.block_tables[s, :n].max(initial=0) for s, n in enumerate(counts)))
        num_blocks = used + 1
        mask = np.zeros((len(owners), num_blocks, size), bool)
        for s, count in enumerate(counts.tolist()):
            cells = np.arange(count * size).reshape(count, size)
            (queries,) = np.nonzero(owners == s)
            visible = _visible(cells, positions[queries, None, None], window)
            mask[np.ix_(queries, metadata.block_tables[s, :count])] = visible
        every = np.arange(len(owners))
        return _Rectangle(
            queries=mx.array(every[None]),
            outputs=mx.array(every),
            blocks=num_blocks,
            mask=mx.array(mask.reshape(1, 1, len(owners), -1)),
            cells=len(counts) * num_blocks * size,
            tokens=int(metadata.seq_lens.sum()),
        )

    def attend(
        self, layer: AttentionLayer, q: Any, metadata: AttentionMetadata, out: Any
    ) -> tuple[Any, LaunchReport]:
        if not metadata.total_q:
            return super().attend(layer, q, metadata, out)
        by_kind: dict[int, _Rectangle] = metadata.prepared.by_kind
        if layer.kind not in by_kind:
            by_kind[layer.kind] = self._rectangle(metadata, layer.window)
        rectangle = by_kind[layer.kind]
        cells = [_cells(pool, rectangle.blocks) for pool in self._pools(layer)]
        k, v = cells[0], cells[-1][..., : layer.value_dim]
        query, k, v = map(unpaged_sdpa.heads_first, (q[rectangle.queries], k, v))
        result = unpaged_sdpa.attend(query, k, v, layer, rectangle.mask).transpose(0, 2, 1, 3)
        flat = result.reshape(-1, *result.shape[2:])
        return flat[rectangle.outputs].astype(q.dtype), LaunchReport(
            kernel=self.name,
            grid=tuple(rectangle.queries.shape),
            reason=self.reason,
            resolver="none",
            layer=layer.index,
            keys=rectangle.cells,
            padded_keys=rectangle.cells - rectangle.tokens,
            bytes=sum(array.nbytes for array in cells) + 2 * q.nbytes,
            map_us=metadata.map_us,
        )


class PaddedGatherBackend(MaskedBackend):
    """Copy all requests' blocks into one left-padded rectangle, and run MLX's attention once."""

    name = "gather_padded"
    reason = "all requests' blocks are gathered into one padded rectangle"

    def _rectangle(self, metadata: AttentionMetadata, window: int | None) -> _Rectangle:
        size, (owners, offsets, positions) = metadata.block_size, _queries(metadata)
        lengths, contexts = np.diff(metadata.cu_seqlens_q), metadata.seq_lens
        rows, width = len(contexts), int(lengths.max())
        counts = -(-contexts // size)
        longest = int(counts.max())
        columns = longest * size
        # Rows end together, in whole blocks; the null block fills them from the left.
        blocks = np.zeros((rows, longest), np.int32)
        for s, count in enumerate(counts.tolist()):
            blocks[s, longest - count :] = metadata.block_tables[s, :count]
        outputs = owners * width + width - lengths[owners] + offsets
        queries = np.zeros(rows * width, np.int64)
        queries[outputs] = np.arange(len(owners))
        cells = np.arange(columns) - (columns - counts * size)[:, None]  # positions; < 0: padding
        mask = np.zeros((rows * width, columns), bool)
        mask[:, 0] = True  # a padding query sees one cell: a softmax over none is NaN
        mask[outputs] = _visible(cells[owners], positions[:, None], window)
        return _Rectangle(
            queries=mx.array(queries.reshape(rows, width)),
            outputs=mx.array(outputs),
            blocks=mx.array(blocks),
            mask=mx.array(mask.reshape(rows, 1, width, columns)),
            cells=rows * columns,
            tokens=int(contexts.sum()),
        )


def _cells(pool: mx.array, blocks: mx.array | int) -> mx.array:
    """Return cells of the pool as [rows, cells, heads, dim]: copies, or its first blocks."""
    chosen = pool[None, :blocks] if isinstance(blocks, int) else pool[blocks]
    return chosen.reshape(len(chosen), -1, *pool.shape[2:])


def _queries(metadata: AttentionMetadata) -> tuple[NDArray[np.int64], ...]:
    """Return each packed query's request, its index among the request's queries, its position."""
    lengths = np.diff(metadata.cu_seqlens_q)
    owners, offsets = units_of(lengths, 1)
    return owners, offsets, (metadata.seq_lens - lengths)[owners] + offsets


def _visible(cells: Any, positions: Any, window: int | None) -> Any:
    visible = (cells >= 0) & (cells <= positions)
    return visible if window is None else visible & (cells > positions - window)
