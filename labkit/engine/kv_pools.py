"""The memory of the paged KV cache: a key pool and a value pool per layer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from labkit.engine.kv_layout.base import LayerShape

Pool = NDArray[np.float32]


class KVPools:
    """Keys and values of all layers: float32 [num_blocks, block_size, kv_heads, head_dim].

    The memory is reserved at once and touched block by block, as blocks are written.
    """

    def __init__(self, shapes: tuple[LayerShape, ...], num_blocks: int, block_size: int) -> None:
        self.shapes = shapes
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = sum(shape.block_bytes(block_size) for shape in shapes)
        self.keys: list[Pool] = []
        self.values: list[Pool] = []
        for shape in shapes:
            slots = (num_blocks, block_size, shape.num_kv_heads)
            self.keys.append(np.zeros((*slots, shape.key_dim), np.float32))
            self.values.append(np.zeros((*slots, shape.value_dim), np.float32))
