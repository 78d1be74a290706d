"""The switches of the fused backends, and the kernel and grid that they choose for a batch.

The rule is the same on every device.

The grid is a launch's set of units of work. On Metal a unit is a threadgroup; on the CPU, worker
threads take units from a queue. A unit serves some query heads of one query token, or of one
Q-block of tokens. It searches for its sequence once for all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from labkit.config.engine.attention import UNITS
from labkit.engine.attention.sequence_resolvers.sequence_resolver import has_prefill
from labkit.kernel_constants import BQ

if TYPE_CHECKING:
    from labkit.engine.attention.attention_metadata import AttentionLayer, AttentionMetadata

SPLIT_TOKENS = 512  # keys per partition of split_kv=auto
MAX_PARTITIONS = 16


@dataclass(frozen=True, slots=True)
class KernelSwitches:
    """How a fused backend finds the sequence of each unit, and divides work among units.

    Raises ``ValueError`` if ``split_kv`` or ``tile_threshold`` is out of range.
    """

    # A built-in resolver's name (``config.RESOLVERS``) or ``package.module:Class``
    resolver: str = "binary_search"
    # ``off``, ``auto`` or a number of partitions among which the decode kernel divides the keys
    # of a query. Splitting changes the order of summation and thus the last bits of the result.
    # No other switch changes the result.
    split_kv: str | int = "off"
    # The query heads that a unit serves: ``head`` (one), ``kv_head`` (those of one KV head),
    # ``token`` (all), or ``auto`` (the number that is fastest on the device)
    unit: str = "auto"
    # Whether KV blocks outside a sliding window are skipped. False: they are read and masked.
    window_skip: bool = True
    # The tiled kernel is chosen if a sequence has at least this many query tokens
    tile_threshold: int = 2

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ValueError(f"unit={self.unit}: must be one of: {', '.join(UNITS)}")
        text = str(self.split_kv)
        if text not in ("off", "auto") and not (text.isdecimal() and 1 <= int(text) <= 1024):
            raise ValueError(f"split_kv={text}: must be off, auto or 1 to 1024 (partitions)")
        if self.tile_threshold < 2:
            raise ValueError(
                f"tile_threshold={self.tile_threshold}: must be 2 or more (query tokens)"
            )


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """The properties of a device that the choice of kernel and grid depends on."""

    cores: int | None  # that work on units (None: unknown)
    units_per_core: int  # units that keep a core busy
    max_sharing_heads: int  # query heads that may share one load of a key or value in decode
    # Whether the query heads of a KV head share loads in the tiled kernel. If so, ``unit=auto`` is
    # ``kv_head`` there, else ``head``.
    tiled_sharing: bool
    # The rule of ``unit=auto`` in the decode kernel: upper limit on the bytes of one token's keys
    # that a unit reads. A unit serves as many adjacent KV heads as fit and leave enough units.
    # With 0 it serves one.
    decode_unit_bytes: int
    # The tiled kernel supports keys of at most this many bytes per token and head in the pools,
    # because its matrices must fit the registers.
    max_tile_row_bytes: int

    @property
    def saturating_units(self) -> int | None:
        """The number of units that keeps every core busy."""
        return None if self.cores is None else self.cores * self.units_per_core


def cpu_limits(workers: int) -> DeviceLimits:
    """Return the limits of a CPU with ``workers`` threads.

    Units differ in cost, so four units per worker are needed to balance the load. A decode unit
    computes several KV heads, because the keys of a token's heads are contiguous and reading them
    in order is fastest. It reads at most 4 KB of keys per token, which fit the cache.
    """
    return DeviceLimits(workers, 4, 1 << 30, True, 4096, 1 << 30)


def gpu_limits(cores: int | None) -> DeviceLimits:
    """Return the limits of a GPU: eight units per core, whose registers hold eight query heads."""
    return DeviceLimits(cores, 8, 8, False, 0, 512)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A kernel and its grid. ``kernel``, ``grid`` and ``reason`` are as in ``LaunchReport``."""

    kernel: Literal["decode", "tiled"]
    grid: tuple[int, ...]
    reason: str
    rows_per_unit: int  # query tokens per unit
    # Adjacent query heads per unit: a part of those of one KV head, or those of several KV heads
    heads_per_unit: int
    sharing_heads: int  # query heads of a unit that share one load of a key or value
    partitions: int = 1  # units that share a query's keys; the reduce kernel merges them

    @property
    def groups(self) -> tuple[int, int, int]:
        """The grid as three axes: heads, tokens or Q-blocks, and all further axes as a product."""
        return self.grid[0], self.grid[1], math.prod(self.grid[2:])


def choose_kernel(
    metadata: AttentionMetadata,
    layer: AttentionLayer,
    switches: KernelSwitches,
    limits: DeviceLimits,
    kernel: str = "auto",
) -> Dispatch:
    """Return the kernel and the grid for a batch and a layer.

    ``kernel`` is ``auto``, or forces ``decode`` or ``tiled``. Raises ``ValueError`` if ``kernel``
    is unknown, or does not support the layer's head size and dtype.
    """
    name, reason = _kernel(metadata, layer, switches, limits, kernel)
    group, tiled = layer.num_q_heads // layer.num_kv_heads, name == "tiled"
    axes = metadata.resolver.grid_axes(metadata.lookup, tiled, metadata.cu_seqlens_q)
    max_sharing = limits.max_sharing_heads if limits.tiled_sharing or not tiled else 1
    sharing = _largest_divisor(group, max_sharing)
    heads = {"head": 1, "kv_head": group, "token": layer.num_q_heads}.get(switches.unit, sharing)
    if switches.unit == "auto" and not tiled:
        heads = sharing * _adjacent_kv_heads(layer, metadata.total_q, limits)
    sharing = min(sharing, heads)
    columns = layer.num_q_heads // heads
    if tiled:
        return Dispatch("tiled", (columns, *axes), reason, BQ, heads, sharing)
    units = columns * metadata.total_q
    partitions, split_reason = _partitions(metadata, switches, units, limits.saturating_units)
    grid = (columns, *axes, *([partitions] if partitions > 1 else []))
    return Dispatch("decode", grid, reason + split_reason, 1, heads, sharing, partitions)


def _kernel(
    metadata: AttentionMetadata,
    layer: AttentionLayer,
    switches: KernelSwitches,
    limits: DeviceLimits,
    kernel: str,
) -> tuple[str, str]:
    """Return the kernel's name, and the reason for the choice as text."""
    fits = layer.row_bytes <= limits.max_tile_row_bytes
    row = f"{layer.dtype} with head size {layer.head_dim}"
    batch = f"query tokens: {metadata.total_q}, sequences: {metadata.num_seqs}"
    if kernel not in ("auto", "decode", "tiled"):
        raise ValueError(f"kernel={kernel}: must be auto, decode or tiled")
    if kernel == "tiled" and not fits:
        raise ValueError(f"kernel=tiled does not support {row}")
    if kernel != "auto":
        return kernel, f"{kernel} was requested ({batch})"
    if not has_prefill(metadata.cu_seqlens_q):
        return "decode", f"no prefill ({batch})"
    if metadata.max_query_len < switches.tile_threshold:
        return "decode", f"longest query {metadata.max_query_len} tokens, below tile_threshold"
    if not fits:
        return "decode", f"prefill ({batch}), but the tiled kernel does not support {row}"
    return "tiled", f"prefill ({batch})"


def _largest_divisor(number: int, limit: int) -> int:
    return max(n for n in range(1, min(number, limit) + 1) if number % n == 0)


def _adjacent_kv_heads(layer: AttentionLayer, total_q: int, limits: DeviceLimits) -> int:
    """Return the KV heads of a decode unit under ``unit=auto``.

    They read a token's keys in order, in about half the time that a unit for each head takes. So
    dividing them among units pays only if more than half of the cores would have no unit.
    """
    fitting = limits.decode_unit_bytes // (4 * layer.head_dim)
    units_wanted = -(-(limits.cores or 1) // 2)
    columns = -(-units_wanted // max(1, total_q))
    return _largest_divisor(layer.num_kv_heads, max(1, min(fitting, layer.num_kv_heads // columns)))


def _partitions(
    metadata: AttentionMetadata, switches: KernelSwitches, units: int, saturating_units: int | None
) -> tuple[int, str]:
    """Return the number of partitions of each query's keys, and text for ``Dispatch.reason``."""
    if switches.split_kv == "off":
        return 1, ""
    if switches.split_kv != "auto":
        return int(switches.split_kv), f"; split_kv={switches.split_kv}"
    if saturating_units is None:
        raise ValueError(
            "split_kv=auto: this GPU's cores could not be counted; set a number of partitions"
        )
    partitions = min(-(-metadata.max_seq_len // SPLIT_TOKENS), MAX_PARTITIONS)
    if metadata.max_query_len > 1 or units >= saturating_units or partitions < 2:
        return 1, "; split_kv=auto: not split"
    return partitions, f"; split_kv=auto: unsplit units ({units}) would leave cores idle"
