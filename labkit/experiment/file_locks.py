"""Who may work: one timing cell per host, and one process per cell wherever it runs.

Both locks are the kernel's (flock): they end with the process that holds them, however that
ends, and are not inherited by workers. The file says who holds it and since when.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from labkit.experiment import Interrupted, StudyError
from labkit.machine import fingerprint
from labkit.records import SESSION_DONE, CellSession, describe_last_session, session_path

Tell = Callable[[str], None]


def lock_path(device: str = "cpu") -> Path:
    """Return the lock file of a device of this host, in the temporary folder."""
    return Path(tempfile.gettempdir()) / f"labkit-{device}.lock"


@contextmanager
def timing_lock(
    holder: str,
    *,
    device: str = "cpu",
    on_wait: Tell = lambda line: None,
    check: Callable[[], None] = lambda: None,
    poll_s: float = 0.5,
) -> Iterator[None]:
    """Hold the host's timing lock; wait for it while another cell is timing.

    Parameters
    ----------
    holder
        Who is asking, for the message that others see.
    on_wait
        Called with one line when the lock is taken, and again every minute.
    check
        Called at every poll (``poll_s`` seconds); may raise to give up.

    Raises
    ------
    StudyError
        The lock file can't be opened.
    """
    path = lock_path(device)

    def held_by() -> str:
        return describe(path)

    with _held(path, "timing lock", held_by, on_wait, check, poll_s) as descriptor:
        facts = {"holder": holder, "pid": os.getpid(), "since": time.time()}
        _write(descriptor, json.dumps(facts))
        yield


@contextmanager
def cell_lock(
    cell_dir: Path,
    *,
    on_wait: Tell = lambda line: None,
    check: Callable[[], None] = lambda: None,
    poll_s: float = 0.5,
) -> Iterator[None]:
    """Work on a cell alone, and leave a :class:`CellSession` that says how it went.

    A job of a cluster may still run when its cell is asked for again. ``on_wait``, ``check``
    and ``poll_s`` as in :func:`timing_lock`.

    Raises
    ------
    StudyError
        The folder's file system has no locks.
    """
    cell_dir.mkdir(parents=True, exist_ok=True)

    def held_by() -> str:
        return f"{cell_dir}: {describe_last_session(cell_dir)}"

    path = session_path(cell_dir)
    with _held(path, "cell's lock", held_by, on_wait, check, poll_s) as descriptor:
        sitting = CellSession(
            fingerprint.host_hash(), os.getpid(), fingerprint.utc_now(), job(os.environ)
        )
        _write(descriptor, sitting.to_text())
        how = SESSION_DONE
        try:
            yield
        except BaseException as error:
            how = _cause(error)
            raise
        finally:
            with contextlib.suppress(OSError):  # a full disk: what stopped the work says so
                _write(descriptor, sitting.end(fingerprint.utc_now(), how).to_text())


def job(environ: Mapping[str, str]) -> str | None:
    """Name the Slurm job in whose environment this is; None outside of one."""
    if "SLURM_JOB_ID" not in environ:
        return None
    array = environ.get("SLURM_ARRAY_JOB_ID")
    task = environ.get("SLURM_ARRAY_TASK_ID")
    name = f"Slurm job {environ['SLURM_JOB_ID'] if array is None else f'{array}_{task}'}"
    starts = int(environ.get("SLURM_RESTART_COUNT", "0")) + 1
    return name if starts == 1 else f"{name}, start {starts}"


def _cause(error: BaseException) -> str:
    """Say in one line what stopped a sitting."""
    if isinstance(error, Interrupted):
        return str(error)  # the signal's name
    if isinstance(error, SystemExit):
        return "its cluster's time limit, or a job that goes first; it is queued again"
    return " ".join(f"{type(error).__name__}: {error}".split())


@contextmanager
def _held(
    path: Path,
    name: str,
    held_by: Callable[[], str],
    on_wait: Tell,
    check: Callable[[], None],
    poll_s: float,
) -> Iterator[int]:
    """Hold the lock of a file, and hand its descriptor on."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise StudyError(f"{path}: the {name} can't be opened: {error.strerror}") from None
    try:
        told = -float("inf")
        while not _acquired(descriptor, path, name):
            check()
            if time.monotonic() - told >= 60:
                told = time.monotonic()
                on_wait(f"waiting: {held_by()}")
            time.sleep(poll_s)
        yield descriptor
    finally:
        os.close(descriptor)


def _acquired(descriptor: int, path: Path, name: str) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise StudyError(
            f"{path}: the {name} can't be had: {error.strerror}; choose a file system with locks"
        ) from None
    return True


def _write(descriptor: int, text: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)


def describe(path: Path) -> str:
    """Say in one line who holds a timing lock, since when and for how long."""
    try:
        facts = json.loads(path.read_text())
        since = float(facts["since"])
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since))
        held = max(0, round(time.time() - since))
        return (
            f"{facts['holder']} (pid {facts['pid']}) is timing on this host "
            f"since {clock}, for {held} s"
        )
    except (OSError, ValueError, KeyError, TypeError):
        return "another cell is timing on this host"
