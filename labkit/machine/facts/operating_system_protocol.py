"""One interface to the operating system's facts, which ``linux`` and ``macos`` implement."""

from __future__ import annotations

import sys
from typing import Any, Protocol

from labkit.machine.facts import linux, macos


class OperatingSystem(Protocol):
    """A module that reads one operating system's facts.

    The dicts' keys are those of the record (:mod:`labkit.machine.facts.fingerprint`). A fact that
    the system does not provide is absent.
    """

    def facts(self) -> dict[str, Any]:
        """Return the facts that stay the same while a study runs."""

    def state(self) -> dict[str, Any]:
        """Return the facts that change, in a few milliseconds and without starting a process."""

    def surroundings(self) -> dict[str, Any]:
        """Return the facts that only the system's tools report. Starts processes."""

    def sample(self) -> dict[str, Any]:
        """Return the few facts that ``MachineObserver`` samples once a second."""

    def memory(self) -> tuple[int, int]:
        """Return total and available memory in bytes."""

    def process_memory(self, pid: int | None = None) -> dict[str, int]:
        """Return the memory of a process (None: this one) and its descendants.

        ``rss_bytes``: resident bytes; a page shared by several processes counts for each.
        ``swap_bytes``: swapped bytes, where the system reports them. Raises ``OSError`` if the
        process does not exist, or the system does not report its memory.
        """

    def compressed_memory(self) -> dict[str, int]:
        """Return the RAM that compressed memory occupies, as ``compressed_bytes``, if any."""

    def process_cpu_s(self, pid: int) -> float:
        """Return the CPU seconds of a process and its descendants (0.0 if it has ended)."""

    def peak_rss(self) -> int:
        """Return this process's peak resident size in bytes."""

    def busy_s(self) -> float:
        """Return the busy CPU seconds of all cores since boot."""

    def stolen_s(self) -> float | None:
        """Return the CPU seconds that the hypervisor gave to other guests, or None if unknown.

        The seconds count from boot.
        """


def operating_system() -> OperatingSystem:
    """Return the module for this operating system."""
    return macos if sys.platform == "darwin" else linux
