"""Contracts: what a class of each Protocol must do, as checks that run in seconds.

labkit's own implementations pass the same contracts (``tests/conformance``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from labkit.config import Experiment

# Composes a checked config from overrides; raises ``ConfigError`` with one line.
Compose = Callable[[Mapping[str, str]], Experiment]


class ContractError(AssertionError):
    """A class does not do what its Protocol demands. The message is one line."""


@dataclass(frozen=True)
class Check:
    """One check of a contract."""

    demand: str  # what must hold, as a sentence
    # Raises ``ContractError`` if it does not hold. Exceptions of the checked class pass through.
    run: Callable[[], None]
    needed: bool = False  # whether the following checks are skipped if this one fails


@dataclass(frozen=True)
class Contract:
    """What a class of one kind must do, as a series of checks."""

    kind: str  # such as ``resolver``
    telling: tuple[str, ...]  # a class with one of these methods is recognised as this kind
    methods: tuple[str, ...]  # that the class must have
    # Takes ``package.module:Class`` and a ``Compose``, and yields the checks in order.
    checks: Callable[[str, Compose], Iterator[Check]]

    def fits(self, own_class: Any) -> bool:
        """Return whether a class has a method by which this kind is recognised."""
        return any(callable(getattr(own_class, method, None)) for method in self.telling)

    def lacking(self, own_class: Any) -> list[str]:
        """Return the methods of this kind that a class does not have."""
        return [name for name in self.methods if not callable(getattr(own_class, name, None))]


def demand(condition: bool, message: str) -> None:
    """Raise ``ContractError(message)`` unless ``condition`` holds."""
    if not condition:
        raise ContractError(message)
