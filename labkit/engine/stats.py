"""Counters of one engine: flat names, numbers only, sums and peaks kept where the work is done."""

from __future__ import annotations

from collections.abc import Mapping


class Counters:
    """Named sums and peaks.  Each engine owns one; nothing is shared."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Add ``amount`` to ``name``."""
        self._values[name] = self._values.get(name, 0) + amount

    def at_least(self, name: str, amount: float) -> None:
        """Raise ``name`` to ``amount`` if it is below: for peaks."""
        self._values[name] = max(self._values.get(name, 0), amount)

    def add_all(self, amounts: Mapping[str, float]) -> None:
        """Add every amount to its name."""
        values = self._values
        for name, amount in amounts.items():
            values[name] = values.get(name, 0) + amount

    def reset(self) -> None:
        """Forget everything."""
        self._values.clear()

    def as_dict(self) -> dict[str, float]:
        """Return a copy."""
        return dict(self._values)
