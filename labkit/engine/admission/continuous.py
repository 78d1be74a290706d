"""Continuous admission: a request joins as soon as a place and blocks are free."""

from __future__ import annotations


class Continuous:
    """Admits whenever tokens are left, so that blocks are not held before they are used."""

    name = "continuous"

    def open(self, num_running: int, budget: int) -> bool:
        """See ``Admission.open``."""
        return budget > 0
