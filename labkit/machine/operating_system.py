"""The operating system's facts behind one interface, which ``linux`` and ``macos`` implement."""

from __future__ import annotations

import sys
from typing import Any, Protocol

from labkit.machine import linux, macos


class OperatingSystem(Protocol):
    """A module that reads one operating system's facts.

    The keys of the dicts are those of the record (:mod:`labkit.machine.fingerprint`); a fact that
    the system does not provide is absent.
    """

    def facts(self) -> dict[str, Any]:
        """Return the facts that stay the same while a study runs."""

    def state(self) -> dict[str, Any]:
        """Return the facts that change, in a few milliseconds and without starting a process."""

    def surroundings(self) -> dict[str, Any]:
        """Return what the system's tools report."""

    def sample(self) -> dict[str, Any]:
        """Return the few facts that ``MachineObserver`` samples once a second."""

    def memory(self) -> tuple[int, int]:
        """Return total and available memory in bytes."""

    def process_memory(self, pid: int | None = None) -> dict[str, int]:
        """Return the memory of a process (None: this one) and its descendants.

        ``rss_bytes``: resident bytes; pages that they share count for each of them.
        ``swap_bytes``: swapped bytes, where the system reports them.

        Raises
        ------
        OSError
            The process does not exist, or the system does not report its memory.
        """

    def process_cpu_s(self, pid: int) -> float:
        """Return the CPU seconds of a process and its descendants (0.0 if it has ended)."""

    def peak_rss(self) -> int:
        """Return this process's peak resident size in bytes."""

    def busy_s(self) -> float:
        """Return all cores' busy CPU seconds since boot."""

    def stolen_s(self) -> float | None:
        """Return the CPU seconds given to other guests since boot, or None where unknown."""


def operating_system() -> OperatingSystem:
    """Return the module for this operating system."""
    return macos if sys.platform == "darwin" else linux
