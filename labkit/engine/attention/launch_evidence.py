"""The report of attention launches: the evidence for the gate *engaged* (the kernel ran).

A fused kernel writes stamps and counters. ``forward`` logs each launch, and ``report_launches``
reads what the kernels wrote.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.engine.attention.sequence_resolvers.sequence_resolver import units_of
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

# Fields of a report that become counters unchanged, with the counters' names.
_COUNTERS = {
    "search_iterations": "attention.search_iterations",
    "dependent_loads": "attention.dependent_loads",
    "surplus_threadgroups": "attention.surplus_threadgroups",
    "kv_blocks_visited": "attention.kv_blocks_visited",
    "bytes": "attention.bytes",
    "skipped_blocks": "window.skipped_blocks",
    "masked_blocks": "window.masked_blocks",
}
_SDPA_COUNTERS = {
    "keys": "attention.keys",
    "padded_keys": "attention.keys_padded",
    "bytes": "attention.bytes",
}
# Calls of MLX's attention over keys in rows, some of which are not of the query's request.
_DENSE_KERNELS = ("sdpa", "gather_padded", "masked")
_SUMMED = ("launches", "evaluations", *{**_COUNTERS, **_SDPA_COUNTERS})


@dataclass(frozen=True, slots=True)
class LaunchReport:
    """One launch of an attention kernel, or the sum of several identical ones.

    Identical launches have the same fields except counts, stamp and layer.
    """

    # decode (one query token per unit), tiled (``BQ`` query rows per unit), reference, gather,
    # gather_padded, masked or sdpa (MLX's attention over contiguous keys).
    kernel: str
    # Units launched along each axis: (heads or groups of heads, query tokens) for decode, (heads or
    # groups of heads, Q-blocks) for tiled, (query tokens,) for reference; a padded grid adds the
    # sequences, split-KV the partitions.
    grid: tuple[int, ...]
    reason: str  # why this kernel was chosen
    resolver: str  # the name of the resolver; a user's class has a name of its own
    # The stamp (uint32) that the kernel wrote, and the stamp that this launch must write. Both are
    # None for MLX's own attention, which writes no stamp. If several launches are summed, these are
    # the stamps of the first stale launch, or of the first launch if none is stale.
    stamp: int | None = None
    expected_stamp: int | None = None
    layer: int = 0  # index of the layer; of several launches, the one whose ``stamp`` is reported
    launches: int = 1  # number of launches summed in this report
    # Counted by the kernel: binary-search iterations, and units that exited without work.
    search_iterations: int = 0
    surplus_threadgroups: int = 0
    kv_blocks_visited: int = 0  # over all units, counted by the kernel
    bytes: int = 0  # keys and values in the visited blocks, queries, and output
    map_us: float = 0.0  # host time of the resolver's maps, once per step
    device: str | None = None  # cpu, metal or emulated; None: no fused kernel
    partitions: int = 1  # of each query's keys; above 1 the reduce kernel followed
    sharing_heads: int = 1  # query heads of a unit that shared one load of a key or value
    # What a unit of the grid served: ``head`` (one query head), ``kv_head`` (the query heads of one
    # KV head), ``token`` (all heads), or several of these where they are the same; else empty.
    unit: tuple[str, ...] = ()
    block_size: int | None = None  # tokens in a KV block; None: not reported
    # Loads by which all units find their sequences. A unit waits for each before it continues.
    dependent_loads: int = 0
    # KV blocks outside the sliding window, summed over all units: those that were not read, and
    # those that were read and then masked.
    skipped_blocks: int = 0
    masked_blocks: int = 0
    kv_dtype: str | None = None  # of the KV pools; None: not reported
    # sdpa only: the number of keys read, and how many of them were padding.
    keys: int = 0
    padded_keys: int = 0
    # Evaluations of MLX's graph for only these launches: an emulated kernel evaluates eagerly, and
    # so does a layer of a model on NumPy arrays.
    evaluations: int = 0

    @property
    def stale(self) -> bool:
        """Whether the kernel wrote a stamp other than the one expected.

        A stamp is the number that identifies a launch. The kernel writes it with its output, so a
        wrong stamp means that the output may be that of another launch.
        """
        return self.stamp != self.expected_stamp

    def counters(self) -> dict[str, float]:
        """Return the counters of these launches. They may be summed over reports."""
        count = self.launches
        evaluations = {"mlx.evaluations": self.evaluations} if self.evaluations else {}
        if self.kernel in _DENSE_KERNELS:
            labels = self._labelled("kernel", "kv_dtype")
            return {**evaluations, **labels, **self._counted(_SDPA_COUNTERS)}
        counters = {
            **evaluations,
            **self._labelled("kernel", "resolver"),
            **self._counted(_COUNTERS),
            **self._labelled("device", "block_size", "kv_dtype"),
        }
        if self.partitions > 1:
            counters["kernel.reduce"] = count
            counters["split_kv.partitions"] = count * self.partitions
        counters |= {f"unit.{unit}": count for unit in self.unit}
        if self.kernel == "decode":
            counters["gqa.shared" if self.sharing_heads > 1 else "gqa.unshared"] = count
        return counters

    def _labelled(self, *names: str) -> dict[str, float]:
        """Return counters ``<field>.<value>``, such as ``kernel.decode``; none for a None."""
        values = {name: getattr(self, name) for name in names}
        return {f"{name}.{v}": self.launches for name, v in values.items() if v is not None}

    def _counted(self, counters: dict[str, str]) -> dict[str, float]:
        return {counter: getattr(self, name) for name, counter in counters.items()}


Reports = tuple[LaunchReport, ...]
_VARYING = {*_SUMMED, "stamp", "expected_stamp", "layer"}
_IDENTITY = tuple(field.name for field in fields(LaunchReport) if field.name not in _VARYING)


def merge_reports(reports: Iterable[LaunchReport]) -> Reports:
    """Return one report for each group of identical launches, with their numbers summed.

    Its stamps and its layer are those of the group's first stale report, or else its first report.
    """
    groups: dict[tuple[Any, ...], list[LaunchReport]] = {}
    for report in reports:
        key = tuple(getattr(report, name) for name in _IDENTITY)
        groups.setdefault(key, []).append(report)
    return tuple(_merge(group) for group in groups.values())


def _merge(group: Sequence[LaunchReport]) -> LaunchReport:
    shown = next((report for report in group if report.stale), group[0])
    sums: dict[str, Any] = {name: sum(getattr(r, name) for r in group) for name in _SUMMED}
    return replace(shown, **sums)


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


def report_launches(
    log: Iterable[Launch | LaunchReport], metadata: AttentionMetadata, device: str
) -> Reports:
    """Return the reports of a step's launches, one for each kind of layer."""
    reports: list[LaunchReport] = []
    by_kind: dict[int, list[Launch]] = {}
    for entry in log:
        if isinstance(entry, LaunchReport):
            reports.append(entry)
        else:
            by_kind.setdefault(entry.layer.kind, []).append(entry)
    reports += [_sum_launches(launches, metadata, device) for launches in by_kind.values()]
    return tuple(reports)


def _sum_launches(
    launches: Sequence[Launch], metadata: AttentionMetadata, device: str
) -> LaunchReport:
    """Check the stamps of the launches of one kind of layer, and sum their counters."""
    dispatch, resolver = launches[0].dispatch, metadata.resolver.variant
    nonces = np.array([launch.nonce for launch in launches], np.uint64)
    rows = np.stack([np.asarray(launch.rows) for launch in launches])
    expected = _stamps(nonces, dispatch.kernel, resolver)
    errors = _stamp_errors(rows, expected)
    if dispatch.partitions > 1:
        reduce_rows = np.stack([np.asarray(launch.reduce_rows) for launch in launches])
        reduce_errors = _stamp_errors(reduce_rows, _stamps(nonces, "reduce", resolver))
        errors = np.where(errors, errors, reduce_errors)
    shown = int((errors != 0).argmax())
    # One column at a time takes NumPy a quarter of the time of all columns at once.
    iterations, blocks, surplus = (
        int(rows[:, :, column].sum(dtype=np.int64))
        for column in (ITERATIONS_COLUMN, BLOCKS_COLUMN, SURPLUS_COLUMN)
    )
    return report_kind(
        launches[shown].layer, dispatch, metadata, device, launches=len(launches),
        expected_stamp=int(expected[shown]), stamp_error=int(errors[shown]),
        iterations=iterations, blocks=blocks, surplus=surplus,
    )  # fmt: skip


def report_kind(
    layer: AttentionLayer,
    dispatch: Dispatch,
    metadata: AttentionMetadata,
    device: str,
    *,
    launches: int,
    expected_stamp: int,
    stamp_error: int,
    iterations: int,
    blocks: int,
    surplus: int,
) -> LaunchReport:
    """Return the report of all launches of one kind of layer, from their summed counters.

    ``layer`` is that of the first launch with a wrong stamp, or else of the first launch, and
    ``expected_stamp`` its stamp. ``stamp_error`` is the stamp written minus this (uint32).
    """
    skipped = masked = 0
    if layer.window is not None:
        # ``blocks`` counts all launches, and every unit along the grid's axis of heads.
        columns = launches * (layer.num_q_heads // dispatch.sharing_heads)
        context, in_window = window_blocks(metadata, dispatch.rows_per_unit, layer.window)
        skipped, masked = context * columns - blocks, blocks - in_window * columns
    units = launches * math.prod(dispatch.grid)
    query_bytes = 2 * metadata.total_q * layer.num_q_heads * layer.query_bytes
    return LaunchReport(
        kernel=dispatch.kernel,
        grid=dispatch.grid,
        reason=dispatch.reason,
        resolver=metadata.resolver.name,
        stamp=(expected_stamp + stamp_error) & STAMP_MASK,
        expected_stamp=expected_stamp,
        layer=layer.index,
        launches=launches,
        search_iterations=iterations,
        dependent_loads=metadata.resolver.dependent_loads(iterations, units),
        surplus_threadgroups=surplus,
        kv_blocks_visited=blocks,
        bytes=blocks * layer.block_bytes + launches * query_bytes,
        map_us=metadata.map_us,
        device=device,
        partitions=dispatch.partitions,
        sharing_heads=dispatch.sharing_heads,
        unit=_served(layer, dispatch.heads_per_unit),
        block_size=layer.block_size,
        kv_dtype=layer.dtype,
        skipped_blocks=skipped,
        masked_blocks=masked,
        evaluations=launches * (1 + (dispatch.partitions > 1)) if device == "emulated" else 0,
    )


def _served(layer: AttentionLayer, heads: int) -> tuple[str, ...]:
    """Return the values of ``LaunchReport.unit`` for units of this many query heads."""
    group = layer.num_q_heads // layer.num_kv_heads
    served = {"head": 1, "kv_head": group, "token": layer.num_q_heads}
    return tuple(unit for unit, number in served.items() if number == heads)


def launch_stamp(nonce: int, kernel: str, resolver: str) -> int:
    """Return the stamp: the uint32 that proves that a kernel ran in this launch.

    ``nonce``: uint32, different for every launch. ``kernel``, ``resolver``: keys of ``KERNEL_IDS``
    and ``RESOLVER_IDS``, as compiled into the kernel.
    """
    by_nonce, by_kernel, by_resolver = STAMP_FACTORS
    fixed = KERNEL_IDS[kernel] * by_kernel + RESOLVER_IDS[resolver] * by_resolver
    return (nonce * by_nonce + fixed) & STAMP_MASK


def _stamp_errors(rows: NDArray[Any], expected: NDArray[np.uint32]) -> NDArray[np.int64]:
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


def _stamps(nonces: NDArray[np.uint64], kernel: str, resolver: str) -> NDArray[np.uint32]:
    fixed = np.uint64(launch_stamp(0, kernel, resolver))
    stamps = nonces * np.uint64(STAMP_FACTORS[0]) + fixed
    return (stamps & np.uint64(STAMP_MASK)).astype(np.uint32)


def window_blocks(metadata: AttentionMetadata, rows: int, window: int) -> tuple[int, int]:
    """Return how many KV blocks a head's units of ``rows`` visit, without and with window."""
    lengths = np.diff(metadata.cu_seqlens_q)
    sequence, first = units_of(lengths, rows)
    last = np.minimum(first + rows, lengths[sequence]) - 1
    past = (metadata.seq_lens - lengths)[sequence]
    end = -(-(past + last + 1) // metadata.block_size)
    begin = np.maximum(0, past + first + 1 - window) // metadata.block_size
    return int(end.sum()), int((end - begin).sum())
