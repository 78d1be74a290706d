"""The KV slots and blocks that requests need: in each KV layout, and in the pools of windows."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from labkit import config

# The padded layout grows in steps of this many tokens, as mlx_lm's caches do, and by default the
# contiguous layout does too (engine.kv.growth_step).
CACHE_STEP_TOKENS = 256


def round_up_to_step(tokens: int, step: int = CACHE_STEP_TOKENS) -> int:
    """Round a number of tokens up to a multiple of ``step``."""
    return -(-tokens // step) * step


def slots_for(kv: config.KV, lengths: Sequence[int]) -> int:
    """Return the KV slots (tokens) that requests of ``lengths`` tokens occupy together."""
    if kv.layout is config.KVLayout.padded:
        return len(lengths) * round_up_to_step(max(lengths, default=0))
    if kv.layout is config.KVLayout.contiguous:
        return sum(round_up_to_step(max(n, kv.set_aside or 0), kv.growth_step) for n in lengths)
    return sum(-(-n // kv.block_size) * kv.block_size for n in lengths)


def blocks_for(kv: config.KV, lengths: Sequence[int]) -> int:
    """Return the KV blocks that requests of ``lengths`` tokens need, with the paged null block."""
    null_block = kv.layout is config.KVLayout.paged
    return -(-slots_for(kv, lengths) // kv.block_size) + null_block


def num_state_snapshots(engine: config.Engine) -> int:
    """Return the number of slots for snapshots of states, which prefix caching needs."""
    if engine.prefix_cache is config.PrefixCache.none:
        return 0
    given = engine.kv.state_snapshots
    return engine.scheduler.max_num_seqs if given is None else given


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What may be in the window pools at once.

    ``num_tokens`` is the largest number of tokens of a step, and ``num_lookahead_tokens`` the
    largest number of draft tokens of a request.
    """

    num_seqs: int
    num_tokens: int
    num_lookahead_tokens: int = 0

    @classmethod
    def of(cls, engine: config.Engine) -> StepLimits:
        """Return the limits that an engine's options set."""
        scheduler = engine.scheduler
        return cls(scheduler.max_num_seqs, scheduler.max_step_tokens, engine.num_lookahead_tokens)

    def window_blocks(self, window: int, block_size: int) -> int:
        """Return the most blocks of a window that running requests hold together.

        Each holds its window and drafts, of which up to three blocks are only partly needed. Two
        steps are scheduled before the results of the first free anything (``pipeline=overlap``).
        """
        per_request = (window + self.num_lookahead_tokens) // block_size + 3
        return self.num_seqs * per_request + -(-2 * self.num_tokens // block_size)


def split_blocks(
    num_blocks: int, full_bytes: int, windows: Sequence[tuple[int, int]]
) -> tuple[int, list[int]]:
    """Divide the memory of ``num_blocks`` blocks of all layers among the groups.

    ``num_blocks``: as in ``KVCacheFactory.create``: the null block is one of them. ``full_bytes``:
    bytes of a block over the layers without a window. ``windows``: the same for each window, and
    the most blocks that can be in use.

    Returns the blocks of the full group and of each window, each with a null block. A window has no
    more blocks than the full group.
    """
    caps = [most + 1 for _, most in windows]

    def cost(blocks: int) -> int:
        pools = zip(windows, caps, strict=True)
        return blocks * full_bytes + sum(min(blocks, cap) * size for (size, _), cap in pools)

    budget = num_blocks * (full_bytes + sum(size for size, _ in windows))
    full = num_blocks
    if full_bytes:
        full = bisect_right(range(budget // full_bytes + 1), budget, key=cost) - 1
    return full, [min(full, cap) for cap in caps]


def full_blocks(engine: config.Engine, windows: Sequence[int | None], num_blocks: int) -> int:
    """Return the blocks, null block included, of the layers without a window.

    ``windows``: of each layer (None: it has none); all layers cache the same bytes per token.
    ``num_blocks``: see ``split_blocks``.
    """
    layers, limits = Counter(windows), StepLimits.of(engine)
    full = layers.pop(None, 0)
    groups = [
        (count, limits.window_blocks(window or 0, engine.kv.block_size))
        for window, count in layers.items()
    ]
    return split_blocks(num_blocks, full, groups)[0]
