"""Who is served before whom: a strategy per file."""

from __future__ import annotations

from labkit import config
from labkit.engine.queueing.base import Queue
from labkit.engine.queueing.fcfs import Fcfs
from labkit.engine.queueing.priority import Priority

__all__ = ["Queue", "create"]


def create(name: config.Queue) -> Queue:
    """Return the policy that the config names."""
    kinds: dict[config.Queue, type[Queue]] = {
        config.Queue.fcfs: Fcfs,
        config.Queue.priority: Priority,
    }
    return kinds[name]()
