"""Tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.config.option import Group, option


@dataclass
class Parallel(Group, place="engine.parallel"):
    """Tensor parallelism: every layer split across processes (ranks) of one host."""

    size: int = option(
        1,
        "Tensor-parallel size: ranks (processes) that share heads, feed-forward columns and CPU "
        "threads equally (docs/parallel.md).",
        least=1,
        most=64,
        unit="ranks",
    )

    @property
    def alone(self) -> bool:
        """Whether one process computes everything."""
        return self.size == 1
