"""Where a cell's runs happen: all arms in one process in turn, or each in one of its own."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.config import ConfigError, Design, Experiment, Isolation


def settle(design: Design, experiments: Sequence[Experiment]) -> tuple[Isolation, str | None]:
    """Decide where the runs of these arms happen, and say why they are apart if they are.

    Raises
    ------
    ConfigError
        ``in_process`` was asked for and cannot be.
    """
    if design.isolation is Isolation.process:
        return Isolation.process, "design.isolation=process asks for it"
    from labkit import workload

    reason = workload.apart(experiments)
    if reason is None:
        return Isolation.in_process, None
    if design.isolation is Isolation.in_process:
        raise ConfigError(
            f"design.isolation=in_process: {reason}; set design.isolation=process, or leave auto"
        )
    return Isolation.process, reason
