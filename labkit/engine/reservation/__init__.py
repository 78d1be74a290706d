"""What a request must find free to be admitted: a strategy per file."""

from __future__ import annotations

from labkit import config
from labkit.engine.reservation.base import Reservation
from labkit.engine.reservation.full import Full
from labkit.engine.reservation.optimistic import Optimistic

__all__ = ["Reservation", "create"]


def create(options: config.Scheduler) -> Reservation:
    """Return the reservation that the config names."""
    if options.reservation is config.Reservation.full:
        return Full()
    given = options.watermark
    return Optimistic(config.DEFAULT_WATERMARK if given is None else given)
