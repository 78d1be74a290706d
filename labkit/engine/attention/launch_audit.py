"""The launches of fused kernels in a step: the stamps and counters that the kernels wrote."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.engine.attention.launch_report import LaunchReport, Reports
from labkit.kernel_constants import (
    BLOCKS_COLUMN,
    ITERATIONS_COLUMN,
    KERNEL_IDS,
    RESOLVER_IDS,
    STAMP_COLUMN,
    STAMP_FACTORS,
    STAMP_MASK,
    SURPLUS_COLUMN,
)

if TYPE_CHECKING:
    from labkit.engine.attention.attention_metadata import AttentionLayer, AttentionMetadata
    from labkit.engine.attention.kernel_dispatch import Dispatch


class Launch(NamedTuple):
    """One launch of a fused kernel, as ``forward`` logs it.

    ``rows`` is the NumPy or MLX array of integers that the kernel wrote, [units, 4 or more], with a
    row per threadgroup or worker and the columns of ``kernel_constants``. ``reduce_rows`` is the
    array of the reduce kernel, or None if the keys were not split.
    """

    layer: AttentionLayer
    dispatch: Dispatch
    nonce: int  # uint32, different for every launch
    rows: Any
    reduce_rows: Any = None


@dataclass(frozen=True, slots=True)
class LaunchTotals:
    """The summed counters of all launches of one kind of layer."""

    layer: AttentionLayer  # of the first launch that has a wrong stamp, or else of the first
    dispatch: Dispatch
    launches: int
    expected_stamp: int  # of the launch that ``layer`` is taken from
    stamp_error: int  # the stamp written minus the expected stamp (uint32); 0: right
    search_iterations: int
    kv_blocks_visited: int
    surplus_threadgroups: int


def launch_stamp(nonce: int, kernel: str, resolver: str) -> int:
    """Return the stamp: the uint32 that proves that a kernel ran in this launch.

    Parameters
    ----------
    nonce
        uint32, different for every launch.
    kernel, resolver
        Keys of ``KERNEL_IDS`` and ``RESOLVER_IDS``, as compiled into the kernel.
    """
    by_nonce, by_kernel, by_resolver = STAMP_FACTORS
    fixed = KERNEL_IDS[kernel] * by_kernel + RESOLVER_IDS[resolver] * by_resolver
    return (nonce * by_nonce + fixed) & STAMP_MASK


def stamp_errors(rows: NDArray[Any], expected: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Return, for each launch, by how much its first wrong stamp is wrong, or 0 if none is.

    ``rows`` is [launches, units, columns], ``expected`` the stamp of each launch. Row ``i`` of a
    launch must have this stamp plus ``i``, so that a row copied from another row is detected.
    """
    units = np.arange(rows.shape[1], dtype=np.uint32)
    errors = rows[:, :, STAMP_COLUMN].astype(np.uint32) - (units + expected[:, None])  # wraps
    if not errors.any():
        return np.zeros(len(rows), np.int64)
    first: NDArray[np.int64] = (errors != 0).argmax(axis=1)
    return errors[np.arange(len(rows)), first].astype(np.int64)


def sum_launches(launches: Sequence[Launch], resolver: str) -> LaunchTotals:
    """Check the stamps of the launches of one kind of layer, and sum their counters.

    ``resolver`` is the resolver that is compiled into their kernel.
    """
    dispatch = launches[0].dispatch
    nonces = np.array([launch.nonce for launch in launches], np.uint64)
    rows = np.stack([np.asarray(launch.rows) for launch in launches])
    expected = _stamps(nonces, dispatch.kernel, resolver)
    errors = stamp_errors(rows, expected)
    if dispatch.partitions > 1:
        reduce_rows = np.stack([np.asarray(launch.reduce_rows) for launch in launches])
        reduce_errors = stamp_errors(reduce_rows, _stamps(nonces, "reduce", resolver))
        errors = np.where(errors, errors, reduce_errors)
    shown = int((errors != 0).argmax())
    # One column at a time takes NumPy a quarter of the time of all columns at once.
    iterations, blocks, surplus = (
        int(rows[:, :, column].sum(dtype=np.int64))
        for column in (ITERATIONS_COLUMN, BLOCKS_COLUMN, SURPLUS_COLUMN)
    )
    return LaunchTotals(
        layer=launches[shown].layer,
        dispatch=dispatch,
        launches=len(launches),
        expected_stamp=int(expected[shown]),
        stamp_error=int(errors[shown]),
        search_iterations=iterations,
        kv_blocks_visited=blocks,
        surplus_threadgroups=surplus,
    )


def _stamps(nonces: NDArray[np.uint64], kernel: str, resolver: str) -> NDArray[np.uint32]:
    """Return ``launch_stamp`` of every nonce."""
    fixed = np.uint64(launch_stamp(0, kernel, resolver))
    stamps = nonces * np.uint64(STAMP_FACTORS[0]) + fixed
    return (stamps & np.uint64(STAMP_MASK)).astype(np.uint32)


def report_launches(
    log: Iterable[Launch | LaunchTotals], metadata: AttentionMetadata, device: str
) -> Reports:
    """Return the reports of a step's launches, one for each kind of layer."""
    totals: list[LaunchTotals] = []
    by_kind: dict[int, list[Launch]] = {}
    for entry in log:
        if isinstance(entry, LaunchTotals):
            totals.append(entry)
        else:
            by_kind.setdefault(entry.layer.kind, []).append(entry)
    variant = metadata.resolver.variant
    totals += [sum_launches(launches, variant) for launches in by_kind.values()]
    return tuple(_report(one, metadata, device) for one in totals)


def _report(totals: LaunchTotals, metadata: AttentionMetadata, device: str) -> LaunchReport:
    layer, dispatch, count = totals.layer, totals.dispatch, totals.launches
    visited = totals.kv_blocks_visited
    skipped = masked = 0
    if layer.window is not None:
        # ``visited`` counts all launches, and every unit along the grid's axis of heads.
        columns = count * (layer.num_q_heads // dispatch.sharing_heads)
        context, in_window = window_blocks(metadata, dispatch.rows_per_unit, layer.window)
        skipped, masked = context * columns - visited, visited - in_window * columns
    units = count * math.prod(dispatch.grid)
    query_bytes = 2 * metadata.total_q * layer.num_q_heads * layer.query_bytes
    return LaunchReport(
        kernel=dispatch.kernel,
        grid=dispatch.grid,
        reason=dispatch.reason,
        resolver=metadata.resolver.name,
        stamp=(totals.expected_stamp + totals.stamp_error) & STAMP_MASK,
        expected_stamp=totals.expected_stamp,
        layer=layer.index,
        launches=count,
        search_iterations=totals.search_iterations,
        dependent_loads=metadata.resolver.dependent_loads(totals.search_iterations, units),
        surplus_threadgroups=totals.surplus_threadgroups,
        kv_blocks_visited=visited,
        bytes=visited * layer.block_bytes + count * query_bytes,
        map_us=metadata.map_us,
        device=device,
        partitions=dispatch.partitions,
        sharing_heads=dispatch.sharing_heads,
        block_size=layer.block_size,
        kv_dtype=layer.dtype,
        skipped_blocks=skipped,
        masked_blocks=masked,
        evaluations=count * (1 + (dispatch.partitions > 1)) if device == "emulated" else 0,
    )


def window_blocks(metadata: AttentionMetadata, rows: int, window: int) -> tuple[int, int]:
    """Return the number of KV blocks that one head's units visit, without and with the window.

    ``rows`` is the number of query tokens per unit. ``window`` is the number of keys that a query
    sees.
    """
    lengths = np.diff(metadata.cu_seqlens_q)
    units = -(-lengths // rows)
    sequence = np.repeat(np.arange(metadata.num_seqs), units)
    first = (np.arange(len(sequence)) - np.repeat(np.cumsum(units) - units, units)) * rows
    last = np.minimum(first + rows, lengths[sequence]) - 1
    past = (metadata.seq_lens - lengths)[sequence]
    end = -(-(past + last + 1) // metadata.block_size)
    begin = np.maximum(0, past + first + 1 - window) // metadata.block_size
    return int(end.sum()), int((end - begin).sum())
