"""The variables that MLX reads when it starts, as options of an arm."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from labkit.config.rules import require


@dataclass
class Mlx:
    """What MLX decides when a process starts; null leaves MLX's own choice.

    On Metal: ``tf32``: products of float32 matrices may be rounded to fewer bits (MLX's
    choice: they may). ``max_ops_per_buffer``, ``max_mb_per_buffer``: operations, and
    megabytes of their inputs, after which a command buffer is committed.
    ``fast_synch``: the faster way of waiting between CPU and GPU (macOS 15).
    ``sdpa_blocks``: partitions of the keys in MLX's own attention of one query; it rounds
    them up to a multiple of 32.
    Anywhere: ``bfs_max_width``: how wide MLX orders a graph breadth first before it goes
    deep. ``compile``: whether ``mx.compile`` does anything.

    Source: MLX's documentation, "Environment Variables" (MLX 0.32).
    """

    tf32: bool | None = None
    max_ops_per_buffer: int | None = None
    max_mb_per_buffer: int | None = None
    fast_synch: bool | None = None
    sdpa_blocks: int | None = None
    bfs_max_width: int | None = None
    compile: bool | None = None

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name, most in MOST.items():
            value = getattr(self, name)
            require(
                value is None or 1 <= value <= most,
                f"engine.mlx.{name}={value}: allowed are 1 to {most}, or null for MLX's own",
            )

    def environment(self) -> dict[str, str]:
        """Return the variables to set, as MLX reads them."""
        asked = {
            VARIABLES[item.name]: getattr(self, item.name)
            for item in dataclasses.fields(self)
            if item.name != "compile"
        }
        found = {name: str(int(value)) for name, value in asked.items() if value is not None}
        if self.compile is False:
            found[VARIABLES["compile"]] = "1"  # its presence alone says so
        return found

    def only_on_metal(self) -> str | None:
        """Return the name of an option that is set and changes nothing but Metal; else None."""
        return next((name for name in ON_METAL if getattr(self, name) is not None), None)


VARIABLES = {
    "tf32": "MLX_ENABLE_TF32",
    "max_ops_per_buffer": "MLX_MAX_OPS_PER_BUFFER",
    "max_mb_per_buffer": "MLX_MAX_MB_PER_BUFFER",
    "fast_synch": "MLX_METAL_FAST_SYNCH",
    "sdpa_blocks": "MLX_SDPA_BLOCKS",
    "bfs_max_width": "MLX_BFS_MAX_WIDTH",
    "compile": "MLX_DISABLE_COMPILE",
}
ON_METAL = ("tf32", "max_ops_per_buffer", "max_mb_per_buffer", "fast_synch", "sdpa_blocks")
MOST = {
    "max_ops_per_buffer": 100_000,
    "max_mb_per_buffer": 1_000_000,
    "sdpa_blocks": 1024,
    "bfs_max_width": 100_000,
}
