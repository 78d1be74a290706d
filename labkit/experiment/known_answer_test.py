"""Does MLX still compute? Known values, checked before and after a measurement.

An exception inside an MLX evaluation can leave arrays marked as evaluated whose memory
was never written (ml-explore/mlx #3675, up to 0.32.0): later results are then stale
bytes that look like numbers. The check computes values that no earlier buffer holds.
"""

from __future__ import annotations

import itertools
import os
import sys

SIZE = 256
_calls = itertools.count(os.getpid() % 1000)


class StaleResult(RuntimeError):
    """MLX returned something else than what it was asked to compute."""

    outcome = "stale"  # of the run that raises it: labkit.experiment.run_failures


def check() -> bool:
    """Check known values if this process has imported MLX; tell whether it has.

    Raises
    ------
    StaleResult
        A product, a sum or a value kept across an evaluation is wrong.
    """
    if "mlx.core" not in sys.modules:
        return False
    import mlx.core as mx

    seed = float(next(_calls) % 1000 + 3)
    kept = mx.full((SIZE,), seed) * 2
    product = mx.full((16, SIZE), seed) @ mx.full((SIZE, 16), 0.5)
    total = mx.sum(kept)
    mx.eval(kept, product, total)
    fresh = mx.sum(mx.full((SIZE,), seed + 1))
    for name, got, expected in (
        ("a kept array", mx.min(kept).item(), 2 * seed),
        ("a product", mx.max(product).item(), seed * SIZE / 2),
        ("a sum", total.item(), 2 * seed * SIZE),
        ("a fresh sum", fresh.item(), (seed + 1) * SIZE),
    ):
        if got != expected:
            raise StaleResult(f"canary: {name} is {got}, not {expected}: MLX gives stale results")
    return True
