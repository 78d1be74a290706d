"""What attention launches say about themselves: the evidence behind the gate *engaged*."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from labkit.kernel_abi import (
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

# What is added up over launches that are alike.
SUMS = (
    "launches",
    "search_iterations",
    "dependent_loads",
    "surplus_threadgroups",
    "kv_blocks_visited",
    "bytes",
    "skipped_blocks",
    "masked_blocks",
    "keys",
    "padded_keys",
    "evaluations",
)


@dataclass(frozen=True, slots=True)
class LaunchReport:
    """One launch of an attention kernel, or several that are alike, added up."""

    # decode (one query token per unit), tiled (``BQ`` query rows per unit), reference, gather or
    # sdpa (MLX's attention where the keys lie).
    kernel: str
    # Units launched along each axis: (heads or groups of heads, query tokens) for decode, (heads,
    # Q-blocks) for tiled, (query tokens,) for reference; a padded grid adds the sequences,
    # split-KV the partitions.
    grid: tuple[int, ...]
    reason: str  # why this kernel was chosen, in one line
    resolver: str  # a user's own has its own name
    # The uint32 that the kernel wrote, and the one that this launch must leave; None and None
    # where attention is MLX's own, which leaves none. Of several launches, those of the first
    # that is stale, else of the first.
    stamp: int | None = None
    expected_stamp: int | None = None
    layer: int = 0  # whose launch it was; of several, as ``stamp``
    launches: int = 1  # how many are added up here
    # Binary-search iterations, and units that found no work and exited, counted by the kernel.
    search_iterations: int = 0
    surplus_threadgroups: int = 0
    kv_blocks_visited: int = 0  # over all units, counted by the kernel
    bytes: int = 0  # of keys and values in the visited blocks, of queries and output
    map_us: float = 0.0  # the host's time of building the resolver's maps, once per step
    device: str | None = None  # cpu, metal or emulated; None: no fused kernel
    partitions: int = 1  # among which a query's keys were divided; above 1 reduce followed
    sharing_heads: int = 1  # query heads that shared one load of a key or value in decode
    block_size: int | None = None  # tokens in a KV block; None: not said
    dependent_loads: int = 0  # that units waited for, in turn, to learn their sequence
    # KV blocks outside a sliding window that were left out, or were walked for nothing: what the
    # kernel visited against what it had to, over all units.
    skipped_blocks: int = 0
    masked_blocks: int = 0
    kv_dtype: str | None = None  # what the KV pools hold; None: not said
    # sdpa only: keys that were read, padding included, and those that hold no token.
    keys: int = 0
    padded_keys: int = 0
    # Evaluations of MLX's graph for these launches alone: by an emulated kernel, which is eager,
    # or for a layer of a model on NumPy.
    evaluations: int = 0

    @property
    def stale(self) -> bool:
        """Tell whether the output is not this launch's: the stamp is another's."""
        return self.stamp != self.expected_stamp

    def counters(self) -> dict[str, float]:
        """Return the launches as counters that may be summed over reports."""
        count = self.launches
        evaluated = {"mlx.evaluations": self.evaluations} if self.evaluations else {}
        if self.kernel == "sdpa":
            return {
                **evaluated,
                "kernel.sdpa": count,
                "attention.keys": self.keys,
                "attention.keys_padded": self.padded_keys,
                "attention.bytes": self.bytes,
            }
        counters: dict[str, float] = {
            **evaluated,
            f"kernel.{self.kernel}": count,
            f"resolver.{self.resolver}": count,
            "attention.search_iterations": self.search_iterations,
            "attention.dependent_loads": self.dependent_loads,
            "attention.surplus_threadgroups": self.surplus_threadgroups,
            "attention.kv_blocks_visited": self.kv_blocks_visited,
            "attention.bytes": self.bytes,
            "window.skipped_blocks": self.skipped_blocks,
            "window.masked_blocks": self.masked_blocks,
        }
        if self.device is not None:
            counters[f"device.{self.device}"] = count
        if self.block_size is not None:
            counters[f"block_size.{self.block_size}"] = count
        if self.kv_dtype is not None:
            counters[f"kv_dtype.{self.kv_dtype}"] = count
        if self.partitions > 1:
            counters["kernel.reduce"] = count
            counters["split_kv.partitions"] = count * self.partitions
        if self.kernel == "decode":
            counters["gqa.shared" if self.sharing_heads > 1 else "gqa.unshared"] = count
        return counters


SMALL = 512  # numbers of a launch's rows, below which NumPy takes longer to begin than to read
Reports = tuple[LaunchReport, ...]


def summed(reports: Iterable[LaunchReport]) -> Reports:
    """Add up the launches that differ in nothing but counts, stamps and layer."""
    varying = {*SUMS, "stamp", "expected_stamp", "layer"}
    same = [field.name for field in fields(LaunchReport) if field.name not in varying]
    groups: dict[tuple[Any, ...], list[LaunchReport]] = {}
    for report in reports:
        groups.setdefault(tuple(getattr(report, name) for name in same), []).append(report)
    return tuple(_sum(group) for group in groups.values())


def _sum(group: Sequence[LaunchReport]) -> LaunchReport:
    shown = next((report for report in group if report.stale), group[0])
    sums: dict[str, Any] = {name: sum(getattr(r, name) for r in group) for name in SUMS}
    return replace(shown, **sums)


def launch_stamp(nonce: int, kernel: str, resolver: str) -> int:
    """Return the uint32 that a kernel writes to show that it was this one, in this launch.

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


@dataclass(frozen=True, slots=True)
class Rows:
    """What one kernel wrote in launches that are alike.

    ``written``: integers [launches, units, 4 or more], columns as in ``spec``;
    ``expected``: the stamp of each launch.
    """

    written: NDArray[Any]
    expected: Sequence[int] | NDArray[np.uint64]

    def total(self, column: int) -> int:
        """Add up a column of all launches; one at a time, which NumPy does four times faster."""
        return int(self.written[:, :, column].sum(dtype=np.int64))

    def wrong(self) -> NDArray[np.int64]:
        """Return by how much the stamps of each launch are off: the first wrong one's, or 0."""
        units = np.arange(self.written.shape[1], dtype=np.uint32)
        expected = np.array(self.expected, np.uint32)[:, None]
        off = self.written[:, :, STAMP_COLUMN].astype(np.uint32) - (units + expected)  # wraps
        if not off.any():
            return np.zeros(len(off), np.int64)
        first: NDArray[np.int64] = off[np.arange(len(off)), (off != 0).argmax(axis=1)].astype(int)
        return first


@dataclass(slots=True)
class Launch:
    """What a fused kernel's launch leaves in the metadata.

    ``rows``: integers [units, 4 or more] as in ``spec``, NumPy's or MLX's; ``merged``: those
    of the reduce kernel, where the keys were split.
    """

    layer: AttentionLayer
    nonce: int
    rows: Any
    merged: Any = None


@dataclass(frozen=True, slots=True)
class Launches:
    """Launches that are alike: their layers are of one kind.

    ``nonces``: uint64; ``rows``: integers [launches, units, 4 or more]; ``merged`` as ``Launch``'s.
    """

    layers: Sequence[AttentionLayer]
    nonces: NDArray[np.uint64]
    rows: NDArray[Any]
    merged: NDArray[Any] | None = None


@dataclass(frozen=True, slots=True)
class LaunchTotals:
    """What launches that are alike left, added up.

    ``layer``: of the first whose stamp is wrong, else of the first; ``expected``: its stamp, and by
    how much that is ``off``.
    """

    layer: AttentionLayer
    count: int
    expected: int
    off: int
    iterations: int
    blocks: int
    surplus: int


def report_step(metadata: AttentionMetadata, device: str) -> Reports:
    """Report the launches of fused kernels since the last report, by kind of layers."""
    found: list[LaunchTotals] = []
    kinds: dict[int, list[Launch]] = {}
    for launch in metadata.taken():
        if isinstance(launch, LaunchTotals):
            found.append(launch)
        else:
            kinds.setdefault(launch.layer.kind, []).append(launch)
    found += [
        _read_one(metadata, *alike)
        if len(alike) == 1 and alike[0].rows.size <= SMALL
        else _read(metadata, _joined(alike))
        for alike in kinds.values()
    ]
    return tuple(_report(metadata, evidence, device) for evidence in found)


def _joined(alike: Sequence[Launch]) -> Launches:
    nonces = np.array([one.nonce for one in alike], np.uint64)
    rows = np.stack([np.asarray(one.rows) for one in alike])
    merged = None
    if alike[0].merged is not None:
        merged = np.stack([np.asarray(one.merged) for one in alike])
    return Launches([one.layer for one in alike], nonces, rows, merged)


def _read_one(metadata: AttentionMetadata, launch: Launch) -> LaunchTotals:
    """As ``_read``, of one launch with few rows: without NumPy in a fifth of the time."""
    dispatch: Dispatch = metadata.prepared[launch.layer.kind].dispatch
    expected = launch_stamp(launch.nonce, dispatch.kernel, metadata.resolver.variant)
    rows: list[list[int]] = launch.rows.tolist()
    off = _first_off(rows, expected)
    if dispatch.partitions > 1 and not off:
        off = _first_off(
            launch.merged.tolist(), launch_stamp(launch.nonce, "reduce", metadata.resolver.variant)
        )
    return LaunchTotals(
        layer=launch.layer,
        count=1,
        expected=expected,
        off=off,
        iterations=sum(row[ITERATIONS_COLUMN] for row in rows),
        blocks=sum(row[BLOCKS_COLUMN] for row in rows),
        surplus=sum(row[SURPLUS_COLUMN] for row in rows),
    )


def _first_off(rows: Sequence[Sequence[int]], expected: int) -> int:
    offs = ((row[STAMP_COLUMN] - unit - expected) & STAMP_MASK for unit, row in enumerate(rows))
    return next((off for off in offs if off), 0)


def _read(metadata: AttentionMetadata, alike: Launches) -> LaunchTotals:
    dispatch: Dispatch = metadata.prepared[alike.layers[0].kind].dispatch

    def rows(kernel: str, written: NDArray[Any]) -> Rows:
        fixed = np.uint64(launch_stamp(0, kernel, metadata.resolver.variant))
        stamps = alike.nonces * np.uint64(STAMP_FACTORS[0]) + fixed
        return Rows(written, stamps & np.uint64(STAMP_MASK))

    main = rows(dispatch.kernel, alike.rows)
    off = main.wrong()
    if dispatch.partitions > 1:
        assert alike.merged is not None
        off = np.where(off, off, rows("reduce", alike.merged).wrong())
    shown = int((off != 0).argmax())
    return LaunchTotals(
        layer=alike.layers[shown],
        count=len(alike.layers),
        expected=int(main.expected[shown]),
        off=int(off[shown]),
        iterations=main.total(ITERATIONS_COLUMN),
        blocks=main.total(BLOCKS_COLUMN),
        surplus=main.total(SURPLUS_COLUMN),
    )


def _report(metadata: AttentionMetadata, evidence: LaunchTotals, device: str) -> LaunchReport:
    layer, count = evidence.layer, evidence.count
    iterations, visited = evidence.iterations, evidence.blocks
    dispatch: Dispatch = metadata.prepared[layer.kind].dispatch
    walks = layer.num_q_heads // dispatch.sharing_heads
    skipped = masked = 0
    if layer.window is not None:
        whole, needed = window_blocks(metadata, dispatch.rows_per_unit, layer.window)
        skipped, masked = whole * walks * count - visited, visited - needed * walks * count
    units = count * math.prod(dispatch.grid)
    queries = 2 * metadata.total_q * layer.num_q_heads * layer.query_bytes
    return LaunchReport(
        kernel=dispatch.kernel,
        grid=dispatch.grid,
        reason=dispatch.reason,
        resolver=metadata.resolver.name,
        stamp=(evidence.expected + evidence.off) & STAMP_MASK,
        expected_stamp=evidence.expected,
        layer=layer.index,
        launches=count,
        search_iterations=iterations,
        dependent_loads=metadata.resolver.dependent_loads(iterations, units),
        surplus_threadgroups=evidence.surplus,
        kv_blocks_visited=visited,
        bytes=visited * layer.block_bytes + count * queries,
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
    """Return the KV blocks that units walk for one head: all of them, and those that they need.

    ``rows``: query tokens of a unit; ``window``: keys that a query sees.
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
