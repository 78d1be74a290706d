"""The cell's lock, which lets only one process at a time work on a cell.

The kernel keeps the lock (``flock``) and releases it when the process that holds it ends, even if
that process is killed. Workers do not inherit the lock. The locked file describes the session that
works on the cell.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from labkit.experiment import Interrupted, StudyError
from labkit.experiment.schedule.timing_lock import OnWait
from labkit.machine.exception_text import one_line_with_type
from labkit.machine.facts import machine_snapshot
from labkit.records import SESSION_DONE, CellSession, describe_last_session, session_path


@contextmanager
def cell_lock(
    cell_dir: Path,
    *,
    on_wait: OnWait = lambda line: None,
    check: Callable[[], None] = lambda: None,
    poll_s: float = 0.5,
) -> Iterator[None]:
    """Hold a cell's lock, and write a :class:`CellSession` at its start and end.

    The lock matters on a cluster, where an earlier job may still work on the cell. ``on_wait`` is
    called with one line on the lock's holder when the wait begins, and again every minute.
    ``check`` is called at every poll (``poll_s`` seconds); it may raise an exception to stop
    waiting. Raises ``StudyError`` if the folder's file system has no locks.
    """
    cell_dir.mkdir(parents=True, exist_ok=True)
    with _lock(cell_dir, on_wait, check, poll_s) as descriptor:
        session = CellSession(
            machine_snapshot.host_hash(),
            os.getpid(),
            machine_snapshot.utc_now(),
            _slurm_job(os.environ),
        )
        _write(descriptor, session.to_text())
        how = SESSION_DONE
        try:
            yield
        except BaseException as error:
            how = _cause(error)
            raise
        finally:
            # A full disk is reported by the error that stopped the work.
            with contextlib.suppress(OSError):
                _write(descriptor, session.end(machine_snapshot.utc_now(), how).to_text())


def _slurm_job(environ: Mapping[str, str]) -> str | None:
    if "SLURM_JOB_ID" not in environ:
        return None
    array = environ.get("SLURM_ARRAY_JOB_ID")
    task = environ.get("SLURM_ARRAY_TASK_ID")
    name = f"Slurm job {environ['SLURM_JOB_ID'] if array is None else f'{array}_{task}'}"
    starts = int(environ.get("SLURM_RESTART_COUNT", "0")) + 1
    return name if starts == 1 else f"{name}, start {starts}"


def _cause(error: BaseException) -> str:
    if isinstance(error, Interrupted):
        return str(error)  # such as SIGTERM
    if isinstance(error, SystemExit):
        return "the cluster's time limit, or preemption by another job; it is queued again"
    return one_line_with_type(error)


@contextmanager
def _lock(
    cell_dir: Path, on_wait: OnWait, check: Callable[[], None], poll_s: float
) -> Iterator[int]:
    path = session_path(cell_dir)
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        raise StudyError(f"{path}: the cell's lock can't be opened: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise StudyError(
                f"{path}: the cell's lock must be a file with this name only; remove it"
            )
        last_call = -float("inf")
        while not _acquired(descriptor, path):
            check()
            if time.monotonic() - last_call >= 60:
                last_call = time.monotonic()
                on_wait(f"waiting: {cell_dir}: {describe_last_session(cell_dir)}")
            select.select([], [], [], poll_s)  # see child_process: time.sleep may fail
        yield descriptor
    finally:
        os.close(descriptor)


def _acquired(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise StudyError(
            f"{path}: the cell's lock can't be acquired: {error.strerror}; "
            "choose a folder on a file system with locks"
        ) from None
    return True


def _write(descriptor: int, text: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)
