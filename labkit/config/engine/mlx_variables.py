"""Environment variables that MLX reads at start-up, as options of an arm."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from labkit.config.option import GPU, Group, option

MLX_DEFAULT = "MLX's own choice"
mlx_option = partial(option, None, null_means=MLX_DEFAULT, mlx_lm=True)


@dataclass
class Mlx(Group, place="engine.mlx"):
    """MLX's environment variables, read when a process starts.

    Source: MLX's documentation, "Environment Variables" (MLX 0.32).
    """

    tf32: bool | None = mlx_option(
        "Allow TF32 (reduced precision) in float32 matrix products.",
        null_means=f"{MLX_DEFAULT} (on)",
        gpu=GPU.any,
    )
    max_ops_per_buffer: int | None = mlx_option(
        "Operations per command buffer before it is committed.",
        ge=1,
        le=100_000,
        unit="operations",
        gpu=GPU.any,
    )
    max_mb_per_buffer: int | None = mlx_option(
        "Megabytes of inputs per command buffer before it is committed.",
        ge=1,
        le=1_000_000,
        unit="MB",
        gpu=GPU.any,
    )
    fast_synch: bool | None = mlx_option(
        "Fast synchronisation between CPU and GPU (macOS 15).", gpu=GPU.metal
    )
    sdpa_blocks: int | None = mlx_option(
        "Partitions of the keys in MLX's scaled_dot_product_attention for one query, rounded up to "
        "a multiple of 32.",
        ge=1,
        le=1024,
        unit="partitions",
        gpu=GPU.metal,
    )
    bfs_max_width: int | None = mlx_option(
        "Maximum width of MLX's breadth-first traversal of the graph, beyond which it goes depth "
        "first.",
        ge=1,
        le=100_000,
        unit="operations",
    )
    compile: bool | None = mlx_option("Enable mx.compile.", null_means=f"{MLX_DEFAULT} (on)")

    def environment(self) -> dict[str, str]:
        values = {variable: getattr(self, name) for name, variable in VARIABLES.items()}
        variables = {name: str(int(value)) for name, value in values.items() if value is not None}
        if self.compile is False:
            variables[DISABLE_COMPILE] = "1"  # MLX only tests whether it is set
        return variables

    def gpu_options(self) -> list[tuple[str, GPU]]:
        """Return the options that are set and need a GPU: name, and the GPUs that they need."""
        return [
            (name, spec.gpu)
            for name, spec, value in self.options()
            if spec.gpu is not None and value is not None
        ]


VARIABLES = {
    "tf32": "MLX_ENABLE_TF32",
    "max_ops_per_buffer": "MLX_MAX_OPS_PER_BUFFER",
    "max_mb_per_buffer": "MLX_MAX_MB_PER_BUFFER",
    "fast_synch": "MLX_METAL_FAST_SYNCH",
    "sdpa_blocks": "MLX_SDPA_BLOCKS",
    "bfs_max_width": "MLX_BFS_MAX_WIDTH",
}
DISABLE_COMPILE = "MLX_DISABLE_COMPILE"
