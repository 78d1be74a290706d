"""Logits of a step: a NumPy array, or an object that has greedy tokens and returns rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]


class DeviceLogits:
    """Logits of an MLX model. The greedy tokens are computed on the device.

    ``logits`` is a lazy MLX array [rows, vocabulary] of any floating type.
    """

    def __init__(self, logits: Any) -> None:
        import mlx.core as mx

        self._logits = logits.astype(mx.float32)
        self._host: Rows | None = None
        if len(logits):
            best = mx.argmax(self._logits, axis=1)
            ids = mx.arange(logits.shape[1])
            others = mx.where(ids == best[:, None], -mx.inf, self._logits)
            # A maximum may lose a NaN, so a NaN is added to the margin of a row that has one.
            nan_rows = mx.where(mx.isnan(self._logits).any(axis=1), mx.nan, 0.0)
            margins = self._logits.max(axis=1) - others.max(axis=1) + nan_rows
        else:
            best, margins = mx.zeros(0, mx.uint32), mx.zeros(0)
        self._best, self._margins = best, margins

    def choices(self) -> list[Any]:
        """Return the lazy arrays whose evaluation computes the step."""
        return [self._best, self._margins]

    def greedy(self) -> tuple[list[int], list[float]]:
        """Return each row's best token and its margin (NaN for a row with a NaN)."""
        return np.asarray(self._best).tolist(), np.asarray(self._margins).tolist()

    def __len__(self) -> int:
        return int(self._logits.shape[0])

    def __getitem__(self, row: int | slice) -> Rows:
        """Return a row or a slice of rows. The first call copies all rows to the host."""
        if self._host is None:
            self._host = np.array(self._logits)
        logits: Rows = self._host[row]
        return logits

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Rows:
        return np.array(self._logits, dtype)


@dataclass(slots=True, eq=False)
class GreedyLogits:
    """NumPy logits, float32 [rows, vocabulary], with greedy tokens computed by the forward.

    ``best`` has each row's token with the largest logit, ``margins`` its margin over the second
    largest.
    """

    rows: Rows
    best: list[int]
    margins: list[float]

    def greedy(self) -> tuple[list[int], list[float]]:
        """Return each row's best token and its margin (NaN for a row with a NaN)."""
        return self.best, self.margins

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: Any) -> Rows:
        """Return a row, float32 [vocabulary]."""
        logits: Rows = self.rows[row]
        return logits

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Rows:
        return np.array(self.rows, dtype)


Logits = Rows | DeviceLogits | GreedyLogits
# Waits for a launched step and returns its logits.
WaitLogits = Callable[[], Logits]
