"""Whether a process that a test watches is still running."""

import psutil


def running(pid):
    """Return whether a process runs; a zombie that nobody has collected yet does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
