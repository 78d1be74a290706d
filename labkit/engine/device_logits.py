"""A step's logits: NumPy's, or rows that stay on the device until somebody asks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]


class DeviceLogits:
    """Logits of an MLX model: the greedy choice is made where they lie, and comes back.

    ``logits``: MLX's [rows, vocabulary], of any floating type; lazy.
    """

    def __init__(self, logits: Any) -> None:
        import mlx.core as mx

        self._logits = logits.astype(mx.float32)
        self._host: Rows | None = None
        if len(logits):
            best = mx.argmax(self._logits, axis=1)
            ids = mx.arange(logits.shape[1])
            others = mx.where(ids == best[:, None], -mx.inf, self._logits)
            # A maximum may lose a NaN, a sum keeps it.
            spoilt = mx.where(mx.isnan(self._logits).any(axis=1), mx.nan, 0.0)
            margins = self._logits.max(axis=1) - others.max(axis=1) + spoilt
        else:
            best, margins = mx.zeros(0, mx.uint32), mx.zeros(0)
        self._best, self._margins = best, margins

    def choices(self) -> list[Any]:
        """Return the lazy arrays that end the step's graph."""
        return [self._best, self._margins]

    def greedy(self) -> tuple[list[int], list[float]]:
        """Return each row's best token and its lead over the next; NaN where a row has one."""
        return np.asarray(self._best).tolist(), np.asarray(self._margins).tolist()

    def __len__(self) -> int:
        return int(self._logits.shape[0])

    def __getitem__(self, row: int) -> Rows:
        """Return a row, float32 [vocabulary]; all of them cross over at the first."""
        if self._host is None:
            self._host = np.array(self._logits)
        wanted: Rows = self._host[row]
        return wanted

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Rows:
        return np.array(self._logits, dtype)


class GreedyLogits:
    """NumPy's logits whose greedy choice was made where they were computed.

    ``rows``: float32 [rows, vocabulary]; of each row ``best``, its best token, and ``leads``, by
    how much it is better than the next.
    """

    __slots__ = ("_best", "_leads", "_rows")

    def __init__(self, rows: Rows, best: list[int], leads: list[float]) -> None:
        self._rows = rows
        self._best = best
        self._leads = leads

    def greedy(self) -> tuple[list[int], list[float]]:
        """Return each row's best token and its lead over the next; NaN where a row has one."""
        return self._best, self._leads

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: Any) -> Rows:
        """Return a row, float32 [vocabulary]."""
        wanted: Rows = self._rows[row]
        return wanted

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Rows:
        return np.array(self._rows, dtype)


Logits = Rows | DeviceLogits | GreedyLogits
# Waits for a step that was launched, and returns its logits.
WaitLogits = Callable[[], Logits]
