"""The timing lock: a host times only one cell at a time, in the order of arrival.

A process that wants to time takes a ticket: a numbered file in a folder that all users of the host
share. The process locks the ticket (``flock``) and may time as soon as no ticket with a smaller
number is locked. The kernel releases the lock when the process ends, even if it is killed, so the
ticket of a killed process delays nobody. The next process that takes a ticket removes the dead
ones. Workers do not inherit the lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from labkit.experiment import StudyError

LOCK_DIR = "LABKIT_LOCK_DIR"  # the variable that names another folder
# Not the folder of TMPDIR, which differs between users, and between sessions on macOS.
SHARED_FOLDER = Path("/tmp/labkit-locks")
SHARED_MODE = 0o1777  # everyone may take a ticket and remove only their own, as in /tmp

OnWait = Callable[[str], None]  # called with a line about the process that is waited for


@dataclass(frozen=True)
class Ticket:
    """A place in the queue for a device: the file ``DEVICE-NUMBER.ticket``."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.stem.rpartition("-")[2])

    @property
    def is_live(self) -> bool:
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def describe(self) -> str:
        """Return a phrase that names the ticket's holder and, if it is timing, since when."""
        try:
            facts = json.loads(self.path.read_text())
            who = f"{facts['holder']} (pid {facts['pid']}, user {self._user()})"
            if facts["since"] is None:
                return f"{who} is next to time on this host"
            since = time.localtime(float(facts["since"]))
            held_s = round(time.monotonic() - float(facts["since_monotonic"]))
            clock = time.strftime("%Y-%m-%d %H:%M:%S", since)
            return f"{who} has been timing on this host since {clock} ({held_s} s)"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process is timing on this host"

    def _user(self) -> str:
        try:
            return self.path.owner()
        except KeyError:  # the user's id has no name on this host
            return str(self.path.stat().st_uid)


@contextmanager
def timing_lock(
    holder: str,
    *,
    device: str = "cpu",
    on_wait: OnWait = lambda line: None,
    check: Callable[[], None] = lambda: None,
    poll_s: float = 0.5,
) -> Iterator[None]:
    """Hold the host's timing lock; wait for all processes that arrived before.

    ``holder``: a name for this process, shown to others that wait. ``device``: what is timed; each
    has a lock of its own. ``on_wait`` is called with one line when the wait begins, when the
    process that is timing changes, and again every minute. ``check`` is called at every poll
    (``poll_s`` seconds); it may raise an exception to stop waiting. Raises ``StudyError`` if the
    folder of the locks can't be used.
    """
    with ExitStack() as held:
        with _errors_as_one_line():
            ticket, descriptor = held.enter_context(_take_ticket(holder, device))
            tickets = timing_tickets(device)
            ahead = [t for t in tickets if t.number < ticket.number and t.is_live]
        last_call, last_first = -float("inf"), None
        while ahead:
            check()
            first = ahead[0].number
            if first != last_first or time.monotonic() - last_call >= 60:
                last_call, last_first = time.monotonic(), first
                more = len(ahead) - 1
                queue = f"; {more} more {'comes' if more == 1 else 'come'} first" if more else ""
                on_wait(f"waiting: {ahead[0].describe()}{queue}")
            select.select([], [], [], poll_s)  # see child_process: time.sleep may fail
            ahead = [before for before in ahead if before.is_live]
        # For the date and the duration in describe().
        _write(descriptor, holder, time.time(), time.monotonic())
        yield


@contextmanager
def _take_ticket(holder: str, device: str) -> Iterator[tuple[Ticket, int]]:
    """Take the next ticket, yield it and its locked file's descriptor, and remove it at the end."""
    folder = _folder()
    with suppress(FileExistsError):
        folder.mkdir()
        folder.chmod(SHARED_MODE)
    guard = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(guard, fcntl.LOCK_EX)  # so that no two tickets have the same number
        tickets = timing_tickets(device)
        for old in tickets:
            if not old.is_live:
                with suppress(OSError):  # another user's, which only its owner may remove
                    old.path.unlink()
        number = tickets[-1].number + 1 if tickets else 1
        ticket = Ticket(folder / f"{device}-{number}.ticket")
        descriptor = os.open(ticket.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.fchmod(descriptor, 0o644)  # whatever the umask
        _write(descriptor, holder, None, None)
    finally:
        os.close(guard)
    try:
        yield ticket, descriptor
    finally:
        with suppress(OSError):  # it was removed from outside
            ticket.path.unlink()
        os.close(descriptor)


def _write(descriptor: int, holder: str, since: float | None, monotonic: float | None) -> None:
    facts = {"holder": holder, "pid": os.getpid(), "since": since, "since_monotonic": monotonic}
    # One write over the old text, without truncation: a waiting process may read at any moment.
    text = json.dumps(facts).ljust(os.fstat(descriptor).st_size)
    os.pwrite(descriptor, text.encode(), 0)


@contextmanager
def _errors_as_one_line() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StudyError(
            f"{error.filename or _folder()}: the timing lock can't be used: {error.strerror}; "
            f"every user must be able to write in {_folder()} (chmod 1777), "
            f"or set {LOCK_DIR} to a folder that all users of the host share"
        ) from None


def timing_tickets(device: str = "cpu") -> list[Ticket]:
    """Return the device's tickets in the order of arrival, those of killed processes included."""
    paths = _folder().glob(f"{device}-*.ticket")
    return sorted(map(Ticket, paths), key=lambda ticket: ticket.number)


def _folder() -> Path:
    chosen = os.environ.get(LOCK_DIR)
    return Path(chosen).resolve() if chosen else SHARED_FOLDER
