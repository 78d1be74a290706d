"""The check behind ``engine.batch_invariant=true``: the same bits, whatever the batch.

A row's logits must not depend on the rows beside it, on how its prompt is cut into chunks,
or on the step in which it is computed. That holds where every operation gives each row
through one tile and one order of summation (design.md, "On the CPU"). The config refuses
what is known not to; what depends on the model is seen at load.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from labkit import config
from labkit.engine.base import EngineError
from labkit.engine.forward import Forward
from labkit.engine.kv_layout.kv_cache import KVLayout, LayoutKind
from labkit.engine.self_test import Expected, compute


def require_invariance(
    options: config.Engine, forward: Forward, kind: LayoutKind, expected: Expected
) -> None:
    """Compute the self-test's sequences alone and whole, then chunked beside each other.

    Raises
    ------
    EngineError
        The two differ in a bit, or the forward's BLAS is known to make them differ.
    """
    if forward.name == "mlx" and options.blas is config.Blas.openblas:
        raise EngineError(
            "engine.batch_invariant=true: this model runs on MLX, whose OpenBLAS products change "
            "with the number of rows; set engine.blas=stock, or leave it false"
        )
    first, second = map(len, expected.sequences)
    whole = replace(expected, steps=((first, 0), (0, second)))
    logits = tuple(rows for rows, _ in compute(forward, _layout(kind, expected), whole))
    for rows, reference in compute(
        forward, _layout(kind, expected), replace(expected, logits=logits)
    ):
        if not np.array_equal(rows, reference):
            raise EngineError(
                "engine.batch_invariant=true: a token's logits change with the batch "
                f"({forward.name} forward); leave it false"
            )


def _layout(kind: LayoutKind, expected: Expected) -> KVLayout:
    return kind.holding(expected.shapes, len(expected.sequences), expected.longest)
