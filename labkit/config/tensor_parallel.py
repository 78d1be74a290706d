"""How many processes compute a step together."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.config.option import Group, option


@dataclass
class Parallel(Group, place="engine.parallel"):
    """Tensor parallelism: every layer divided among processes of one host, the ranks."""

    size: int = option(
        1,
        "Processes (ranks) that compute every step together, each with its share of the heads "
        "and of the feed-forward part, and of the CPU budget (docs/parallel.md).",
        least=1,
        most=64,
        unit="ranks",
    )

    @property
    def alone(self) -> bool:
        """Whether one process computes everything."""
        return self.size == 1
