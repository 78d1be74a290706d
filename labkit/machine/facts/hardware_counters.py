"""Hardware counters of this process, by Linux's ``perf_event_open``: misses, stalls, instructions.

Counters count user code in all threads that the process has when they are opened. Many machines
have none: virtual ones often hide them, containers often forbid them, and macOS has no such call.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Callable, Mapping

SYSCALL_NUMBERS = {"x86_64": 298, "aarch64": 241}  # of perf_event_open on Linux
HARDWARE, SOFTWARE = 0, 1  # types of events
# By name, the type and number of an event.
EVENTS: Mapping[str, tuple[int, int]] = {
    "cycles": (HARDWARE, 0),
    "instructions": (HARDWARE, 1),
    "cache_misses": (HARDWARE, 3),
    "stalled_cycles": (HARDWARE, 8),
}
ATTRIBUTE_BYTES, FLAGS_OFFSET = 128, 40
WITHOUT_KERNEL = 1 << 5 | 1 << 6  # exclude_kernel, exclude_hv
ANY_CPU = NO_GROUP = -1
CLOSE_ON_EXEC = 8


def count(
    work: Callable[[], object], events: Mapping[str, tuple[int, int]] = EVENTS
) -> dict[str, int]:
    """Return the counts of events during ``work``. Events that the machine lacks are left out.

    Raises ``OSError`` if no event can be counted here. Then ``work`` is not called.
    """
    files: dict[str, list[int]] = {}
    error = OSError(f"no perf_event_open on {platform.system()}")
    number = SYSCALL_NUMBERS.get(platform.machine()) if platform.system() == "Linux" else None
    try:
        for name, event in events.items() if number is not None else ():
            opened = files.setdefault(name, [])
            try:
                for thread in map(int, os.listdir("/proc/self/task")):
                    opened.append(_open(number, event, thread))
            except OSError as lacking:
                error = lacking
                for file in files.pop(name):
                    os.close(file)
        if not files:
            raise error
        work()
        return {name: sum(map(_read, opened)) for name, opened in files.items()}
    finally:
        for file in (file for opened in files.values() for file in opened):
            os.close(file)


def _open(number: int | None, event: tuple[int, int], thread: int) -> int:
    attribute = bytearray(ATTRIBUTE_BYTES)
    struct.pack_into("IIQ", attribute, 0, event[0], ATTRIBUTE_BYTES, event[1])
    struct.pack_into("Q", attribute, FLAGS_OFFSET, WITHOUT_KERNEL)
    libc = ctypes.CDLL(None, use_errno=True)
    pointer = ctypes.c_char_p(bytes(attribute))
    file = int(libc.syscall(number, pointer, thread, ANY_CPU, NO_GROUP, CLOSE_ON_EXEC))
    if file < 0:
        raise OSError(ctypes.get_errno(), f"perf_event_open: {os.strerror(ctypes.get_errno())}")
    return file


def _read(file: int) -> int:
    return int.from_bytes(os.read(file, 8), "little")
