"""What an attention launch says about itself: the evidence behind the gate *engaged*."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LaunchReport:
    """One launch of an attention kernel.

    Parameters
    ----------
    kernel
        ``decode`` (one query token per unit), ``tiled`` (``BQ`` query rows per unit),
        ``reference`` or ``gather``.
    grid
        Units launched along each axis: (heads or groups of heads, query tokens) for
        ``decode``, (heads, Q-blocks) for ``tiled``, (query tokens,) for ``reference``; a
        padded grid adds the sequences, split-KV the partitions.
    reason
        Why this kernel was chosen, in one line.
    resolver
        Name of the resolver; a user's own resolver has its own name.
    stamp, expected_stamp
        The uint32 that the kernel wrote, and the one that this launch must leave; None and
        None where attention is MLX's own, which leaves none.
    search_iterations
        Binary-search iterations, counted by the kernel, over all units.
    dependent_loads
        Loads that units waited for, one after the other, to learn their sequence.
    surplus_threadgroups
        Units that found no work and exited, counted by the kernel.
    kv_blocks_visited
        KV blocks walked, counted by the kernel, over all units.
    bytes
        Bytes of K and V in the visited blocks, plus queries and output.
    map_us
        Host time (us) of building the resolver's maps, once per step; 0 without maps.
    device
        Where a fused kernel ran: ``cpu``, ``metal`` or ``emulated``; None: not one of these.
    partitions
        Units among which the keys of a query were divided; above 1 a reduce kernel ran.
    sharing_heads
        Query heads that shared one load of a key or value in the decode kernel; 1: none.
    block_size
        Tokens in a KV block; None: not said.
    skipped_blocks, masked_blocks
        KV blocks outside a sliding window that were left out, or were walked for nothing:
        what the kernel visited against what it had to, over all units.
    kv_dtype
        What the KV pools hold; None: not said.
    """

    kernel: str
    grid: tuple[int, ...]
    reason: str
    resolver: str
    stamp: int | None
    expected_stamp: int | None
    search_iterations: int
    surplus_threadgroups: int
    kv_blocks_visited: int
    bytes: int
    map_us: float
    device: str | None = None
    partitions: int = 1
    sharing_heads: int = 1
    block_size: int | None = None
    dependent_loads: int = 0
    skipped_blocks: int = 0
    masked_blocks: int = 0
    kv_dtype: str | None = None

    @property
    def stale(self) -> bool:
        """Tell whether the output is not this launch's: the stamp is another's."""
        return self.stamp != self.expected_stamp

    def counters(self) -> dict[str, float]:
        """Return the launch as counters that may be summed over launches."""
        counters: dict[str, float] = {
            f"kernel.{self.kernel}": 1,
            f"resolver.{self.resolver}": 1,
            "attention.search_iterations": self.search_iterations,
            "attention.dependent_loads": self.dependent_loads,
            "attention.surplus_threadgroups": self.surplus_threadgroups,
            "attention.kv_blocks_visited": self.kv_blocks_visited,
            "attention.bytes": self.bytes,
            "window.skipped_blocks": self.skipped_blocks,
            "window.masked_blocks": self.masked_blocks,
        }
        if self.device is not None:
            counters[f"device.{self.device}"] = 1
        if self.block_size is not None:
            counters[f"block_size.{self.block_size}"] = 1
        if self.kv_dtype is not None:
            counters[f"kv_dtype.{self.kv_dtype}"] = 1
        if self.partitions > 1:
            counters |= {"kernel.reduce": 1, "split_kv.partitions": self.partitions}
        if self.kernel == "decode":
            counters["gqa.shared" if self.sharing_heads > 1 else "gqa.unshared"] = 1
        return counters
