"""What ``claims.engaged`` may name: arms that there are, and counters that somebody counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from labkit.config import Engine, options_page, own_classes, require
from labkit.records import counters


def check(
    engaged: Mapping[str, Sequence[str]],
    arms: Mapping[str, Engine],
    dropped: Sequence[str] = (),
) -> None:
    """Refuse claims on no arm or on no counter.

    Parameters
    ----------
    engaged
        Counters by arm, as claimed.
    arms
        The arms' engines.
    dropped
        Arms that the command line took away; what is claimed of them is ignored.

    Raises
    ------
    ConfigError
        One line with the nearest name.
    """
    for arm, claimed in engaged.items():
        if arm in dropped:
            continue
        require(
            arm in arms,
            f"ablation.claims.engaged.{arm}: no such arm{counters.nearest(arm, arms)}; "
            f"the arms are {', '.join(arms)}",
        )
        for name in claimed:
            require(
                _may_claim(name, arms[arm]),
                f"ablation.claims.engaged.{arm}: no counter {name!r}"
                f"{counters.nearest(name, counters.names(choices))}; docs/counters.md lists them",
            )


def _may_claim(name: str, arm: Engine) -> bool:
    own = own_classes(arm)
    if name.startswith(counters.OWN) or own.keys() & {"engine.name", "engine.attention.backend"}:
        return True
    if own and name.startswith("resolver."):
        return True
    return counters.find(name, choices) is not None


def choices(option: str) -> Sequence[str]:
    """Return the words that an option of the config may have."""
    found = options_page.find(option)
    if found is None or not found.choices:
        raise ValueError(f"{option}: not an option with a list of words")
    return found.choices
