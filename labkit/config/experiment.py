"""One cell's question, whole: an ablation, asked of a workload on an engine and a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from labkit.config.attention import Device, Precision
from labkit.config.budget import BudgetPolicy
from labkit.config.design import Design
from labkit.config.engine import LAYOUT_OF, Engine
from labkit.config.model import Model, ModelShape
from labkit.config.option import Group, option, require
from labkit.config.workload import Workload

CONTROL = "control"
YAML_WORDS = ("on", "off", "yes", "no", "true", "false", "y", "n", "null")


class Identity(Enum):
    """What is claimed about the outputs of the arms.

    noise_floor: no further apart than the A/A control is. frames: every frame has the pixels that
    the decoder gives at its place; arms that pick the same frames are bit-identical.
    """

    bitwise = "bitwise"
    tokens = "tokens"
    noise_floor = "noise_floor"
    frames = "frames"
    none = "none"


@dataclass
class Claims(Group, place="ablation.claims"):
    """What must be proven."""

    identity: Identity = option(Identity.none)
    engaged: dict[str, list[str]] = option(
        factory=dict, meaning="Counters of each arm that must end above 0 (docs/counters.md)."
    )
    all_served: bool = option(
        False, "No request is refused or fails; where it is not claimed, they are counted."
    )


@dataclass
class Ablation(Group, place="ablation"):
    """A question, the arms that answer it and what is claimed about them."""

    name: str = option("none", "What reports call it.")
    question: str = option("", "What is asked, in one sentence.")
    baseline: str | None = option(
        None, "The arm that the others are compared with.", null="the first arm"
    )
    arms: dict[str, Any] = option(factory=dict, meaning="Arm: {override: value}.")
    claims: Claims = field(default_factory=Claims)
    published: Any = option(
        None,
        "An article's own numbers, shown beside ours and never mixed in: {source, machine, "
        "metric, unit, rows: [{case, arms: {arm: value}, delta_pct: {arm: value}}], tables: "
        "[{title, columns, rows, notes}]}; a row may have its own metric and unit, p: {arm: "
        "value}, and when: {option: value}, the cells in which it is shown.",
        null="none",
    )

    def __post_init__(self) -> None:
        """Check the arms' names and that the baseline is one of them."""
        super().__post_init__()
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


class Scale(Enum):
    """How large an experiment's requests and models are (conf/experiment/).

    cpu: minutes on two cores. full: as the article had them.
    """

    cpu = "cpu"
    full = "full"


class Redo(Enum):
    """Which finished blocks to run again."""

    none = "none"
    failed = "failed"


@dataclass
class Experiment(Group):
    """One cell's question, whole."""

    engine: Engine = field(default_factory=Engine)
    model: Model = field(default_factory=Model)
    workload: Workload = field(default_factory=Workload)
    ablation: Ablation = field(default_factory=Ablation)
    design: Design = field(default_factory=Design)
    scale: Scale = option(Scale.cpu)
    scales: dict[str, Any] = option(
        factory=dict,
        meaning="What an experiment sets at each scale: {scale: {override: value}}; the command "
        "line wins.",
    )
    seed: int = option(
        0, "The seed of inputs, of sampling and of the order of runs.", least=0, most=(1 << 32) - 1
    )
    out: str = option("outputs", "The study's folder; a name (outputs/NAME) is resumed.")
    plan: bool = option(False, "Show the schedule and run nothing.")
    redo: Redo = option(Redo.none)

    def __post_init__(self) -> None:
        """Check what spans groups, and what a group's defaults alone cannot satisfy."""
        super().__post_init__()
        require(bool(self.ablation.arms), f"ablation={self.ablation.name}: there is no arm")
        self._check_scales()
        require(
            self.model.given or not self.workload.has_engine,
            f"model={self.model.name}: set model.path=PATH to a directory that mlx_lm can load or "
            "to a GGUF file",
        )
        self._check_identity()
        if not self.workload.has_engine:
            self._check_no_engine()
        elif self.workload.times_kernels:
            self._check_kernel()
        else:
            require(
                self.engine.attention.resolver != "identity",
                f"engine.attention.resolver=identity: it serves pure decode only, and workload="
                f"{self.workload.name} serves requests, which begin with a prefill",
            )
            self._check_memory()
        if self.model.shape is not None and self.engine.name == "paged":
            self._check_shares(self.model.shape, self.engine.parallel.size)

    def _check_memory(self) -> None:
        """Refuse a pool that the process's own limit cannot hold."""
        limit, budget = self.engine.memory_limit, self.engine.budget
        by_bytes = budget.policy is BudgetPolicy.fixed and budget.blocks is None
        require(
            limit is None
            or not by_bytes
            or self.engine.name not in LAYOUT_OF
            or budget.bytes < limit,
            f"engine.budget.bytes={budget.bytes}: engine.memory_limit={limit} leaves no room for "
            "such a KV pool; set less",
        )

    def _check_shares(self, shape: ModelShape, size: int) -> None:
        """Check that every rank gets as many heads and feed-forward columns as the others."""
        for name in ("num_heads", "num_kv_heads", "intermediate_size"):
            whole = getattr(shape, name)
            require(
                whole % size == 0,
                f"engine.parallel.size={size}: model.shape.{name}={whole} is not a multiple of it; "
                "set another size or shape",
            )

    def _check_scales(self) -> None:
        words = [scale.value for scale in Scale]
        for name, overrides in self.scales.items():
            require(name in words, f"scales.{name}: allowed are {', '.join(words)}")
            require(
                isinstance(overrides, dict),
                f"scales.{name}: must be a map of override to value, not {overrides!r}",
            )
        require(
            bool(self.scales) or self.scale is Scale.cpu,
            f"scale={self.scale.value}: only an experiment has scales; set experiment=NAME",
        )
        require(
            not self.scales or self.scale.value in self.scales,
            f"scale={self.scale.value}: this experiment has only {', '.join(self.scales)}",
        )

    def _check_identity(self) -> None:
        """Check that the outputs are of a kind that the claim is about."""
        identity, video = self.ablation.claims.identity, not self.workload.has_engine
        of_video = (Identity.frames, Identity.bitwise, Identity.none)
        require(
            identity in of_video if video else identity is not Identity.frames,
            f"ablation.claims.identity={identity.value}: workload={self.workload.name} has "
            + ("frames; set frames, bitwise or none" if video else "no frames"),
        )

    def _check_no_engine(self) -> None:
        """Refuse what is set of an engine or a model that nobody asks."""
        why = f"workload={self.workload.name} decodes clips and asks no engine"
        for group in (*self.engine.groups(), self.model):
            for name, _, _ in group.options():
                group.require_default(name, why)

    def _check_kernel(self) -> None:
        workload, attention, kv_dtype = self.workload, self.engine.attention, self.engine.kv.dtype
        require(
            self.engine.name == "paged",
            f"engine.name={self.engine.name}: it serves requests, and workload={workload.name} "
            "times labkit's paged attention; set workload=chat",
        )
        require(
            workload.dtype is Precision.float32
            or attention.device is not Device.cpu
            or attention.backend in ("gather", "reference"),
            f"workload.dtype={workload.dtype.value}: engine.attention.backend={attention.backend} "
            "on engine.attention.device=cpu computes in float32; set device=metal or emulated, or "
            "backend=gather, or leave workload.dtype=float32",
        )
        require(
            self.engine.parallel.alone,
            f"engine.parallel.size={self.engine.parallel.size}: workload={workload.name} times the "
            "kernels of one process; set workload=chat",
        )
        require(
            kv_dtype is Precision.float32,
            f"engine.kv.dtype={kv_dtype.value}: workload={workload.name} brings keys and values of "
            "its own; set workload=chat",
        )
