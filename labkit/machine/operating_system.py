"""The system that this process runs on: what ``linux`` and ``macos`` both tell."""

from __future__ import annotations

import sys
from typing import Any, Protocol

from labkit.machine import linux, macos


class OperatingSystem(Protocol):
    """A module that reads one operating system.

    What a dict lacks is not told; its keys are those of the record
    (:mod:`labkit.machine.fingerprint`).
    """

    def facts(self) -> dict[str, Any]:
        """Return what stays while a study runs."""

    def state(self) -> dict[str, Any]:
        """Return what changes, in some milliseconds and without starting a process."""

    def surroundings(self) -> dict[str, Any]:
        """Return what the system's tools tell."""

    def sample(self) -> dict[str, Any]:
        """Return the little that the observer looks at once a second."""

    def memory(self) -> tuple[int, int]:
        """Return the machine's memory and how much of it is free, in bytes."""

    def process_memory(self, pid: int | None = None) -> dict[str, int]:
        """Return what a process (None: this one) and those below it have in memory and in swap.

        ``rss_bytes``, in which what they share counts for each, and, where the system tells,
        ``swap_bytes``.

        Raises
        ------
        OSError
            There is no such process, or the system does not say.
        """

    def process_cpu_s(self, pid: int) -> float:
        """Return the CPU seconds that a process and its children have used (0.0: it is gone)."""

    def peak_rss(self) -> int:
        """Return the largest resident size (bytes) that this process has had."""

    def busy_s(self) -> float:
        """Return the CPU seconds that all cores have been busy since boot."""

    def stolen_s(self) -> float | None:
        """Return the CPU seconds that the hypervisor gave to others since boot."""


def operating_system() -> OperatingSystem:
    """Return this process's system."""
    return macos if sys.platform == "darwin" else linux
