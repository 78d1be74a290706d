"""Known-answer test of MLX, run before and after a measurement. Records call it the canary.

An exception inside an MLX evaluation can leave arrays that are marked as evaluated, although their
memory was never written (ml-explore/mlx #3675, up to 0.32.0). Later results are then stale bytes
that look like numbers. The test computes values that no earlier buffer holds, so stale bytes fail.
"""

from __future__ import annotations

import itertools
import os
import sys

SIZE = 256
_calls = itertools.count(os.getpid() % 1000)


class StaleResult(RuntimeError):
    """MLX returned a value other than the known answer."""

    outcome = "stale"  # of a run that raises this error (labkit.experiment.worker.run_failures)


def check() -> bool:
    """Test MLX if this process has imported it. Return whether the test was run.

    Raises ``StaleResult`` if a computed value is not the known answer.
    """
    if "mlx.core" not in sys.modules:
        return False
    import mlx.core as mx

    seed = float(next(_calls) % 1000 + 3)
    doubled = mx.full((SIZE,), seed) * 2
    product = mx.full((16, SIZE), seed) @ mx.full((SIZE, 16), 0.5)
    total = mx.sum(doubled)
    mx.eval(doubled, product, total)
    fresh = mx.sum(mx.full((SIZE,), seed + 1))
    for name, value, expected in (
        ("the minimum of an array of doubled values", mx.min(doubled).item(), 2 * seed),
        ("the maximum of a product", mx.max(product).item(), seed * SIZE / 2),
        ("the sum", total.item(), 2 * seed * SIZE),
        ("the sum of a second array", fresh.item(), (seed + 1) * SIZE),
    ):
        if value != expected:
            raise StaleResult(
                f"MLX's known-answer test: {name} is {value}, not {expected}; MLX returns wrong or "
                "stale results"
            )
    return True
