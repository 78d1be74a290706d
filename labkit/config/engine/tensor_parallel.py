"""Tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.config.option import Group, option


@dataclass
class TensorParallel(Group, place="engine.parallel"):
    """Tensor parallelism, which splits every layer across processes (ranks) of one host."""

    size: int = option(
        1,
        "Tensor-parallel size: ranks (processes) that share heads, feed-forward columns and CPU "
        "threads equally (docs/parallel.md).",
        ge=1,
        le=64,
        unit="ranks",
    )

    @property
    def single_process(self) -> bool:
        """Whether one process computes everything."""
        return self.size == 1
