"""Which kernel a batch goes to, on which grid, and why: one rule for every device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from labkit.engine.attention.attention_metadata import Layer, Plan
from labkit.engine.attention.kernel_switches import BQ, Switches

SPLIT_TOKENS = 512  # keys per partition of split_kv=auto
MOST_PARTITIONS = 16


@dataclass(frozen=True, slots=True)
class Device:
    """What the rule must know of where the kernels run."""

    busy: int  # with so many units none of its cores is idle
    most_sharing: int  # query heads that may share one load of a key or value in decode
    tiles_share: bool  # whether the tiled kernel's unit is a KV head (else a query head)
    # Bytes of a key's heads, side by side, that one decode unit reads where there are units
    # enough; 0: one head.
    stream_bytes: int
    # Bytes of a query row up to which the tiled kernel takes a type and head size, whose matrices
    # must fit the registers.
    tile_bytes: int


def cpu(workers: int) -> Device:
    """Return the CPU: units cost differently, so a worker needs four to even that out.

    A key's heads lie side by side, memory is read fastest in order, and a tile of 4 KB of
    them fits the cache.
    """
    return Device(4 * workers, 1 << 30, True, 4096, 1 << 30)


# Eight threadgroups for each of 14 cores; eight query heads fill a threadgroup's registers.
METAL = Device(112, 8, False, 0, 512)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A kernel and its grid; ``kernel``, ``grid`` and ``reason`` as in ``LaunchReport``."""

    kernel: Literal["decode", "tiled"]
    grid: tuple[int, ...]
    reason: str
    rows: int  # query tokens of a unit
    sharing: int  # query heads of a KV head that share one load of a key or value
    heads: int = 1  # KV heads that one unit serves
    partitions: int = 1  # units that divide a query's keys; above 1 ``reduce`` follows

    @property
    def groups(self) -> tuple[int, int, int]:
        """The grid on three axes: heads, tokens or Q-blocks, the rest."""
        return self.grid[0], self.grid[1], math.prod(self.grid[2:])


def choose(
    plan: Plan, layer: Layer, switches: Switches, device: Device, kernel: str = "auto"
) -> Dispatch:
    """Choose for a batch and a layer; ``kernel``: ``auto``, or the one to take.

    Raises
    ------
    ValueError
        ``kernel`` is none, or does not take such a layer; one line.
    """
    name, reason = _kernel(plan, layer, switches, device, kernel)
    group, tiled = layer.num_heads // layer.num_kv_heads, name == "tiled"
    places = plan.resolver.places(plan.lookup, tiled, plan.cu_seqlens_q)
    if tiled:
        sharing = group if device.tiles_share else 1
        return Dispatch("tiled", (layer.num_heads // sharing, *places), reason, BQ, sharing)
    sharing = _divisor(group, device.most_sharing if switches.gqa_sharing else 1)
    heads = 1
    if device.stream_bytes and plan.total_q >= device.busy:
        fitting = device.stream_bytes // (4 * layer.head_dim)
        heads = _divisor(layer.num_kv_heads, max(1, fitting))
    columns = layer.num_heads // (sharing * heads)
    parts, why = _partitions(plan, switches, columns * plan.total_q, device.busy)
    grid = (columns, *places, *([parts] if parts > 1 else []))
    return Dispatch("decode", grid, reason + why, 1, sharing, heads, parts)


def _kernel(
    plan: Plan, layer: Layer, switches: Switches, device: Device, kernel: str
) -> tuple[str, str]:
    """Return the kernel and why."""
    fits = layer.row_bytes <= device.tile_bytes
    kind = f"{layer.dtype} with head size {layer.head_dim}"
    work = f"{plan.total_q} query tokens of {plan.num_seqs} sequences"
    if kernel not in ("auto", "decode", "tiled"):
        raise ValueError(f"kernel={kernel}: allowed are auto, decode and tiled")
    if kernel == "tiled" and not fits:
        raise ValueError(f"kernel=tiled: does not take {kind}")
    if kernel != "auto":
        return kernel, f"{kernel} was asked for ({work})"
    if plan.total_q <= plan.num_seqs:
        return "decode", f"no prefill ({work})"
    if plan.max_query_len < switches.tile_threshold:
        return "decode", f"{plan.max_query_len} query tokens at most: below tile_threshold"
    if not fits:
        return "decode", f"prefill ({work}), but the tiled kernel does not take {kind}"
    return "tiled", f"prefill ({work})"


def _divisor(number: int, most: int) -> int:
    """Return the largest divisor of ``number`` that is at most ``most``."""
    return max(n for n in range(1, min(number, most) + 1) if number % n == 0)


def _partitions(plan: Plan, switches: Switches, units: int, busy: int) -> tuple[int, str]:
    """Return into how many partitions ``units`` split their keys, and the end of the reason."""
    if switches.split_kv == "off":
        return 1, ""
    if switches.split_kv != "auto":
        return int(switches.split_kv), f"; split_kv={switches.split_kv}"
    wanted = min(-(-plan.max_seq_len // SPLIT_TOKENS), MOST_PARTITIONS)
    if plan.max_query_len > 1 or units >= busy or wanted < 2:
        return 1, "; split_kv=auto: not split"
    return wanted, f"; split_kv=auto: {units} units leave cores idle"
