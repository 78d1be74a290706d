"""One cell's question, whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from labkit.config.ablation import Ablation
from labkit.config.choices import Device, Precision
from labkit.config.design import Design
from labkit.config.engine import Engine
from labkit.config.model import Model
from labkit.config.rules import require
from labkit.config.workload import Workload, WorkloadKind


class Redo(Enum):
    """Which finished blocks to run again."""

    none = "none"
    failed = "failed"


@dataclass
class Experiment:
    """One cell's question, whole."""

    engine: Engine = field(default_factory=Engine)
    model: Model = field(default_factory=Model)
    workload: Workload = field(default_factory=Workload)
    ablation: Ablation = field(default_factory=Ablation)
    design: Design = field(default_factory=Design)
    seed: int = 0
    out: str = "outputs"
    plan: bool = False
    redo: Redo = Redo.none

    def __post_init__(self) -> None:
        """Check what spans groups, and what a group's defaults alone cannot satisfy."""
        require(bool(self.ablation.arms), f"ablation={self.ablation.name}: there is no arm")
        require(
            self.model.given,
            f"model={self.model.name}: set model.path=PATH to a directory that mlx_lm can load or "
            "to a GGUF file",
        )
        require(
            self.engine.name == "paged" or self.workload.kind is not WorkloadKind.kernel,
            f"engine.name={self.engine.name}: it serves requests, and workload="
            f"{self.workload.name} times labkit's paged attention; set workload=chat",
        )
        attention, dtype = self.engine.attention, self.workload.dtype
        require(
            dtype is Precision.float32
            or attention.device is not Device.cpu
            or attention.backend in ("gather", "reference"),
            f"workload.dtype={dtype.value}: engine.attention.backend={attention.backend} on "
            "engine.attention.device=cpu computes in float32; set device=metal or emulated, or "
            "backend=gather, or leave workload.dtype=float32",
        )
        require(
            self.engine.kv.dtype is Precision.float32
            or self.workload.kind is not WorkloadKind.kernel,
            f"engine.kv.dtype={self.engine.kv.dtype.value}: workload={self.workload.name} brings "
            "keys and values of its own; set workload=chat",
        )
        require(
            self.engine.attention.resolver != "identity"
            or self.workload.kind is WorkloadKind.kernel,
            f"engine.attention.resolver=identity: it serves pure decode only, and workload="
            f"{self.workload.name} serves requests, which begin with a prefill",
        )
        require(0 <= self.seed < 1 << 32, f"seed={self.seed}: allowed are 0 to 4294967295")
