"""The memory of the paged KV cache: a key pool and a value pool per layer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.engine.attention.elements import STORED_AS
from labkit.engine.kv_layout.base import LayerShape

Pool = NDArray[Any]


class KVPools:
    """Keys and values of all layers: [num_blocks, block_size, kv_heads, head_dim] each.

    The memory is reserved at once and touched block by block, as blocks are written.
    ``dtype``: float32, float16 or bfloat16; see ``attention.elements``.
    """

    def __init__(
        self,
        shapes: tuple[LayerShape, ...],
        num_blocks: int,
        block_size: int,
        dtype: str = "float32",
    ) -> None:
        stored = STORED_AS[dtype]
        self.shapes = shapes
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = sum(shape.block_bytes(block_size, stored.itemsize) for shape in shapes)
        self.keys: list[Pool] = []
        self.values: list[Pool] = []
        for shape in shapes:
            slots = (num_blocks, block_size, shape.num_kv_heads)
            self.keys.append(np.zeros((*slots, shape.key_dim), stored))
            self.values.append(np.zeros((*slots, shape.value_dim), stored))
