"""Contracts: what a class of each Protocol must do, as checks that run in seconds.

labkit's own implementations pass the same contracts (``tests/contracts``).
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
    """One demand of a contract.

    ``demand``: what must hold, in words. ``run``: raises ``ContractError`` if it does not hold, or
    whatever the class itself raises. ``needed``: whether the checks after it cannot run if it
    fails.
    """

    demand: str
    run: Callable[[], None]
    needed: bool = False


@dataclass(frozen=True)
class Contract:
    """The checks of one kind of class.

    Parameters
    ----------
    kind
        The kind's name, such as ``resolver``.
    telling
        The methods by which a class is recognised.
    methods
        The methods that it must have.
    checks
        Yields the checks of the class ``package.module:Class``, in order.
    """

    kind: str
    telling: tuple[str, ...]
    methods: tuple[str, ...]
    checks: Callable[[str, Compose], Iterator[Check]]

    def fits(self, own_class: Any) -> bool:
        """Return whether a class has a method by which this kind is recognised."""
        return any(callable(getattr(own_class, method, None)) for method in self.telling)


def demand(condition: bool, message: str) -> None:
    """Raise ``ContractError(message)`` unless ``condition`` holds."""
    if not condition:
        raise ContractError(message)
