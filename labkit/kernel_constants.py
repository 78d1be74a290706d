"""Constants shared by the CPU kernels, the Metal kernels and the host code.

The Metal sources (``labkit/metal/kernels/*.metal``) define the same numbers again; a test checks
that they agree.
"""

from __future__ import annotations

from labkit.config.engine.attention import RESOLVERS

BQ = 32  # query rows in a Q-block, the tiled kernels' unit of work
# Ids that are encoded in a launch's stamp.
KERNEL_IDS = {"decode": 1, "tiled": 2, "reference": 3, "reduce": 4}
RESOLVER_IDS = {name: number for number, name in enumerate(RESOLVERS, 1)}
# A launch's stamp is ``(nonce * f0 + kernel_id * f1 + resolver_id * f2) & STAMP_MASK``.
STAMP_FACTORS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)
STAMP_MASK = 0xFFFFFFFF
# Columns of the counter rows that a kernel writes, one row per threadgroup or worker. Row ``i``
# contains the launch's stamp plus ``i``, so that a row copied from another one is detected.
STAMP_COLUMN, ITERATIONS_COLUMN, BLOCKS_COLUMN, SURPLUS_COLUMN = range(4)
