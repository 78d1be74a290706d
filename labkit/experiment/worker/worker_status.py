"""The status of a worker process: the arm that has the turn, and how far the worker is.

The worker writes it to memory that it shares with its parent. The write costs less than a
microsecond, makes no system call, and is still there after the process has died, however it died.
The parent reads it about once a second for the progress line, and once after the process has ended
to name the arm that had the turn.

In the other direction, the parent writes for how long it has stopped the worker. It does so while
the worker is stopped. So every thread of the worker sees the whole stop in its first read after it.

The file descriptor of the memory is in the environment variable ``LABKIT_STATUS_FD``. A worker of
an older version ignores the variable, and a worker without it writes to memory of its own.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from contextlib import AbstractContextManager

VARIABLE = "LABKIT_STATUS_FD"
SIZE = 256  # bytes
STOPPED = struct.Struct("<d")  # seconds
STOPPED_START = SIZE - STOPPED.size
TURN = struct.Struct("<i")  # 1 + the index of the arm among the process's arms; 0: no arm
TEXT_LENGTH = struct.Struct("<H")
TEXT_START = TURN.size + TEXT_LENGTH.size


class WorkerStatus:
    """The worker's side: ``begin_turn`` and ``show`` write to the shared memory."""

    def __init__(self, fd: int | None = None) -> None:
        self._memory = mmap.mmap(-1 if fd is None else fd, SIZE)

    @classmethod
    def from_environment(cls) -> WorkerStatus:
        """Return the status that this process shares with its parent, or one of its own."""
        fd = os.environ.pop(VARIABLE, None)
        return cls(None if fd is None else int(fd))

    def begin_turn(self, arm: int) -> None:
        """Note that the arm with this index (among the process's arms) has the turn."""
        TURN.pack_into(self._memory, 0, arm + 1)

    def end_turn(self) -> None:
        """Note that no arm has the turn."""
        TURN.pack_into(self._memory, 0, 0)

    def show(self, text: str) -> None:
        """Replace the text that says what the worker does, for example ``8 of 32 requests``."""
        content = text.encode("ascii", "replace")[: STOPPED_START - TEXT_START]
        TEXT_LENGTH.pack_into(self._memory, TURN.size, len(content))
        self._memory[TEXT_START : TEXT_START + len(content)] = content

    def stopped_s(self) -> float:
        """Return the seconds for which the parent has stopped this process so far."""
        (seconds,) = STOPPED.unpack_from(self._memory, STOPPED_START)
        return float(seconds)


class SharedStatus(AbstractContextManager["SharedStatus"]):
    """The parent's side: creates the memory and reads it. A context manager closes it."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("labkit-status")
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())
        os.write(self.fd, bytes(SIZE))
        self._memory = mmap.mmap(self.fd, SIZE)

    def __exit__(self, *_: object) -> None:
        self._memory.close()
        os.close(self.fd)

    @property
    def environment(self) -> dict[str, str]:
        """The variable that a worker with the descriptor ``fd`` reads."""
        return {VARIABLE: str(self.fd)}

    @property
    def turn(self) -> int | None:
        """The index of the arm that has the turn, or None."""
        (arm,) = TURN.unpack_from(self._memory, 0)
        return None if arm <= 0 else arm - 1

    @property
    def text(self) -> str:
        """What the worker does, in a few words; empty before it has said so."""
        (length,) = TEXT_LENGTH.unpack_from(self._memory, TURN.size)
        content = self._memory[TEXT_START : TEXT_START + min(length, STOPPED_START - TEXT_START)]
        return content.decode("ascii", "replace")

    def add_stop(self, seconds: float) -> None:
        """Add the duration of a stop, before the worker continues."""
        (before,) = STOPPED.unpack_from(self._memory, STOPPED_START)
        STOPPED.pack_into(self._memory, STOPPED_START, before + seconds)
