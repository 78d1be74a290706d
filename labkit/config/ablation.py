"""A question, its arms, and what is claimed about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from labkit.config.rules import require


class Identity(Enum):
    """What is claimed about the outputs of the arms."""

    bitwise = "bitwise"
    tokens = "tokens"
    noise_floor = "noise_floor"
    none = "none"


@dataclass
class Claims:
    """What must be proven: the identity of outputs, and per arm counters above 0."""

    identity: Identity = Identity.none
    engaged: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class Ablation:
    """A question, the arms that answer it and what is claimed about them.

    ``arms``: name -> {override: value}. ``baseline``: null means the first arm.
    ``published``: ``{source, machine, metric, unit, rows: [{case, arms: {arm: value},
    delta_pct: {arm: value}}]}``, shown beside ours and never mixed in.
    """

    name: str = "none"
    question: str = ""
    baseline: str | None = None
    arms: dict[str, Any] = field(default_factory=dict)
    claims: Claims = field(default_factory=Claims)
    published: Any = None

    def __post_init__(self) -> None:
        """Check the arms' names and that the baseline is one of them."""
        for arm, overrides in self.arms.items():
            require(
                bool(arm) and all(c.isalnum() or c in "_-." for c in arm) and arm[0] not in ".-",
                f"ablation.arms: {arm!r} is not a name (letters, digits, '_', '-', '.')",
            )
            require(
                arm.lower() not in YAML_WORDS,
                f"ablation.arms.{arm}: YAML reads {arm!r} as a boolean or null, not as a name; "
                "choose another",
            )
            require(
                arm != CONTROL,
                f"ablation.arms.{CONTROL}: the A/A arm is named so; choose another name",
            )
            require(
                isinstance(overrides, dict),
                f"ablation.arms.{arm}: must be a map of override to value, not {overrides!r}",
            )
        require(
            self.baseline is None or self.baseline in self.arms,
            f"ablation.baseline={self.baseline}: no such arm; the arms are {', '.join(self.arms)}",
        )

    @property
    def baseline_arm(self) -> str:
        """The arm that the others are compared with."""
        return self.baseline if self.baseline is not None else next(iter(self.arms))


CONTROL = "control"
YAML_WORDS = ("on", "off", "yes", "no", "true", "false", "y", "n", "null")
