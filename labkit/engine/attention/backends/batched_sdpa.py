"""``gather_padded`` and ``masked``: one call of MLX's attention for all requests over blocks.

``gather_padded`` copies the blocks of all requests into one rectangle, left-padded to the longest
request, as vllm-mlx repacks a varlen batch before its kernel. ``masked`` copies nothing: every
query is compared with every cell of the pool up to the last one in use, and a mask removes the
cells of other requests, as in llama.cpp's unified KV buffer. Its cells come in blocks here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from labkit.engine.attention.attention_metadata import AttentionLayer, AttentionMetadata
from labkit.engine.attention.backends import unpaged_sdpa
from labkit.engine.attention.backends.gather import GatherBackend
from labkit.engine.attention.backends.mlx_backend_base import MlxPrepared
from labkit.engine.attention.launch_report import LaunchReport


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


@dataclass(slots=True)
class _Prepared(MlxPrepared):
    """The rectangles of a step, by kind of layer."""

    rectangles: dict[int, _Rectangle] = field(default_factory=dict)


class MaskedBackend(GatherBackend):
    """Run MLX's attention once, over all cells of the pool that are in use."""

    name = "masked"
    reason = "all queries read all cells in use, under a mask"

    def new_prepared(self) -> Any:
        return _Prepared()

    def clear_values(self) -> None:
        """Set all values to 0: a masked cell has a weight of 0, and 0 times NaN is NaN."""
        for layer, pool in enumerate(self.values):
            zeros = mx.zeros_like(pool)
            mx.eval(zeros)
            if self.keys[layer] is pool:  # a latent layer
                self.keys[layer] = zeros
            self.values[layer] = zeros

    def _rectangle(self, metadata: AttentionMetadata, window: int | None) -> _Rectangle:
        size, owners, positions = metadata.block_size, *_query_positions(metadata)
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
        prepared: _Prepared = metadata.prepared
        if layer.kind not in prepared.rectangles:
            prepared.rectangles[layer.kind] = self._rectangle(metadata, layer.window)
        rectangle = prepared.rectangles[layer.kind]
        pools = [self.keys[layer.index]]
        if not layer.latent:
            pools.append(self.values[layer.index])
        cells = [_cells(pool, rectangle.blocks) for pool in pools]
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
        size, (owners, positions) = metadata.block_size, _query_positions(metadata)
        lengths, contexts = np.diff(metadata.cu_seqlens_q), metadata.seq_lens
        rows, width = len(contexts), int(lengths.max())
        counts = -(-contexts // size)
        longest = int(counts.max())
        columns = longest * size
        # Rows end together, in whole blocks; the null block fills them from the left.
        blocks = np.zeros((rows, longest), np.int32)
        for s, count in enumerate(counts.tolist()):
            blocks[s, longest - count :] = metadata.block_tables[s, :count]
        outputs = owners * width + width - lengths[owners] + _offsets(metadata)
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


def _offsets(metadata: AttentionMetadata) -> NDArray[np.int64]:
    """Return each packed query's index among the queries of its request."""
    starts, lengths = metadata.cu_seqlens_q[:-1], np.diff(metadata.cu_seqlens_q)
    return np.arange(metadata.total_q) - np.repeat(starts, lengths)


def _query_positions(metadata: AttentionMetadata) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the request of each packed query, and the query's position in it."""
    lengths = np.diff(metadata.cu_seqlens_q)
    owners = np.repeat(np.arange(len(lengths)), lengths)
    return owners, (metadata.seq_lens - lengths)[owners] + _offsets(metadata)


def _visible(cells: Any, positions: Any, window: int | None) -> Any:
    visible = (cells >= 0) & (cells <= positions)
    return visible if window is None else visible & (cells > positions - window)
