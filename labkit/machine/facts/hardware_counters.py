"""Hardware counters of this process, by Linux's ``perf_event_open``: misses, stalls, instructions.

Counters count user code in all threads that the process has when they are opened. Many machines
have none: virtual ones often hide them, containers often forbid them, and macOS has no such call.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Mapping

SYSCALL_NUMBERS = {"x86_64": 298, "aarch64": 241}
HARDWARE, SOFTWARE = 0, 1  # types of events
Events = Mapping[str, tuple[int, int]]  # by name, an event's type and number
EVENTS: Events = {
    "cycles": (HARDWARE, 0),
    "instructions": (HARDWARE, 1),
    "cache_misses": (HARDWARE, 3),
    "stalled_cycles": (HARDWARE, 8),
}
ATTRIBUTE_BYTES, FLAGS_OFFSET = 128, 40
WITHOUT_KERNEL = 1 << 5 | 1 << 6  # exclude_kernel, exclude_hv
ANY_CPU = NO_GROUP = -1
CLOSE_ON_EXEC = 8


class NoHardwareCounters(Exception):
    """No event can be counted here. The message is the reason in one line."""


class HardwareCounters:
    """Counts of events since the constructor; ``close`` ends the counting.

    Events that this machine lacks are left out.

    Raises
    ------
    NoHardwareCounters
        There is none.
    """

    def __init__(self, events: Events = EVENTS) -> None:
        self._files: dict[str, list[int]] = {}
        number = SYSCALL_NUMBERS.get(platform.machine())
        if platform.system() != "Linux" or number is None:
            raise NoHardwareCounters(f"no perf_event_open on {platform.system()}")
        reason = ""
        threads = [int(name) for name in os.listdir("/proc/self/task")]
        for name, event in events.items():
            try:
                self._files[name] = [_open(number, event, thread) for thread in threads]
            except OSError as error:
                reason = error.strerror or str(error)
        if not self._files:
            raise NoHardwareCounters(f"perf_event_open: {reason}")

    def read(self) -> dict[str, int]:
        """Return the counts so far, summed over the threads."""
        return {
            name: sum(struct.unpack("q", os.read(file, 8))[0] for file in files)
            for name, files in self._files.items()
        }

    def close(self) -> None:
        """End the counting."""
        for file in (file for files in self._files.values() for file in files):
            os.close(file)
        self._files = {}


def _open(number: int, event: tuple[int, int], thread: int) -> int:
    """Return the file of one event of one thread."""
    attribute = bytearray(ATTRIBUTE_BYTES)
    struct.pack_into("IIQ", attribute, 0, event[0], ATTRIBUTE_BYTES, event[1])
    struct.pack_into("Q", attribute, FLAGS_OFFSET, WITHOUT_KERNEL)
    libc = ctypes.CDLL(None, use_errno=True)
    file = libc.syscall(
        number, ctypes.c_char_p(bytes(attribute)), thread, ANY_CPU, NO_GROUP, CLOSE_ON_EXEC
    )
    if file < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(file)
