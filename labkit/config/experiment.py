"""The root of the schema: an ablation on a workload, an engine and a model, and its design."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from labkit.config.arm_sweep import MAX_NAME_BYTES, check_sweep
from labkit.config.design import Design
from labkit.config.engine import EXTERNAL_ENGINES, PRESET_LAYOUTS, Engine
from labkit.config.engine.attention import MLX_POOL_BACKENDS, Device
from labkit.config.engine.kv_cache import KVDType, Precision
from labkit.config.engine.memory_budget import BudgetPolicy
from labkit.config.model import Model, ModelShape
from labkit.config.option import Group, option, override_text, require
from labkit.config.workload import Workload
from labkit.records.metric_registry import OUTPUTS, metric_names

CONTROL = "control"
NAME_SIGNS = "_-.=,"  # in an arm's name; a swept arm is named order=a,threads=2
YAML_KEYWORDS = ("on", "off", "yes", "no", "true", "false", "y", "n", "null")


class Identity(Enum):
    """Claim about the arms' outputs.

    bitwise: bit-identical. tokens: the same tokens. noise_floor: an arm's outputs differ from the
    baseline's no more often than the A/A control's outputs do. frames: every frame equals the
    decoder's own frame at its position, and arms that pick the same frames are bit-identical.
    quality: an arm's predictions of given texts stay within the limits of claims.quality. none: no
    claim.
    """

    bitwise = "bitwise"
    tokens = "tokens"
    noise_floor = "noise_floor"
    frames = "frames"
    quality = "quality"
    none = "none"


@dataclass
class QualityLimits(Group, place="ablation.claims.quality"):
    """Limits on the quality that an arm may lose against the baseline (``identity=quality``)."""

    kl_mean: float | None = option(
        None, "Largest mean KL divergence.", gt=0, unit="nats", null_means="no limit"
    )
    perplexity_ratio: float | None = option(
        None, "Largest ratio of the perplexities.", gt=0, null_means="no limit"
    )
    top1_agreement: float | None = option(
        None,
        "Smallest share of positions with the same likeliest token.",
        gt=0,
        le=1,
        null_means="no limit",
    )

    def limits(self) -> dict[str, float]:
        return {name: limit for name, limit in vars(self).items() if limit is not None}


@dataclass
class Claims(Group, place="ablation.claims"):
    """What the study claims about its arms; the report checks every claim against the records."""

    identity: Identity = option(Identity.none)
    engaged: dict[str, list[str]] = option(
        factory=dict,
        meaning="Counters that must be above 0 in an arm: {arm: [counter]} (docs/counters.md).",
    )
    quality: QualityLimits = field(default_factory=QualityLimits)
    all_served: bool = option(
        False,
        "Claim that every request is served: a run fails if any request is refused or fails. "
        "Without the claim, such requests are only counted.",
    )
    out_of_memory: list[str] = option(
        factory=list,
        meaning="Arms all of whose runs must end for want of memory. They get no verdict, and the "
        "others keep theirs; without the claim, such a run makes every verdict invalid.",
    )


@dataclass
class Environment(Group, place="environment"):
    """What an arm's process imports. Its options may be combined."""

    python: str | None = option(
        None, "Python interpreter, a path or a name on PATH.", null_means="the study's own"
    )
    requirements: list[str] = option(
        factory=list,
        meaning="Packages, as pip spells them. They are installed without their dependencies and "
        "take precedence over the interpreter's own.",
    )
    revision: str | None = option(
        None,
        "Git revision whose files are imported: of labkit, or of the packages in `repository`.",
        null_means="labkit's present files",
    )
    repository: str | None = option(
        None, "Git checkout that `revision` belongs to.", null_means="labkit's own checkout"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            bool(self.python or self.requirements or self.revision),
            "environment: set python, requirements or revision",
        )
        require(
            bool(self.revision) or self.repository is None,
            f"environment.repository={self.repository}: set environment.revision, too",
        )
        for item in (*self.requirements, self.revision or ""):
            require(not item.startswith("-"), f"environment: {item!r} must not begin with '-'")


@dataclass
class Ablation(Group, place="ablation"):
    """The ablation: its question, its arms, and the claims about them."""

    name: str = option("none", "Name in reports.")
    question: str = option("", "The ablation's question, in one sentence.")
    baseline: str | None = option(
        None, "Arm that the others are compared with.", null_means="the first arm"
    )
    arms: dict[str, Any] = option(
        factory=dict,
        meaning="Arms by name, each with its overrides: {arm: {option: value}}; the key "
        "environment sets what the arm's process imports (docs/regression.md).",
    )
    metric: Any = option(
        None,
        "Primary metric, which the answer is about, or a list of primary metrics that share alpha "
        "(docs/metrics.md). The name outputs stands for the claim about the outputs.",
        type_name="a name or a list of names",
        null_means="goodput if workload.limits are set, latency if requests arrive at a rate, else "
        "the speed of the workload",
    )
    sweep: dict[str, Any] = option(
        factory=dict,
        meaning="Options to compare: {option: [values]}. Every combination of values is an arm, "
        "and the report names the best (docs/sweeps.md). The ablation itself has one arm.",
    )
    claims: Claims = field(default_factory=Claims)
    published: Any = option(
        None,
        "Published numbers, shown beside the measured ones: {source, machine, metric, unit, rows: "
        "[{case, arms: {arm: value}, delta_pct: {arm: value}}], tables: [{title, columns, rows, "
        "notes}]}; a row may have its own metric and unit, p: {arm: value}, and when: {option: "
        "value}, which selects the cells that show it. delta_pct and p are left out where they are "
        "from another arm than the baseline.",
        null_means="none",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sweep(self.sweep, "ablation.sweep")
        names_by_lower_case: dict[str, str] = {}
        for arm, overrides in self.arms.items():
            require(
                bool(arm)
                and all(c.isalnum() or c in NAME_SIGNS for c in arm)
                and arm[0] not in ".-",
                f"ablation.arms: {arm!r} is not a valid name (letters, digits, '_', '-', '.')",
            )
            require(
                len(arm.encode()) <= MAX_NAME_BYTES,
                f"ablation.arms.{arm}: the name must have at most {MAX_NAME_BYTES} bytes",
            )
            require(
                arm.lower() not in YAML_KEYWORDS,
                f"ablation.arms.{arm}: YAML reads {arm!r} as a boolean or null, not as a name; "
                "choose another",
            )
            require(
                arm.casefold() != CONTROL,
                f"ablation.arms.{arm}: this is the A/A arm's name; choose another name",
            )
            twin = names_by_lower_case.setdefault(arm.casefold(), arm)
            require(
                twin == arm,  # each arm has files of its name
                f"ablation.arms.{arm}: only its case differs from {twin}, and some file systems "
                "do not tell them apart; choose another name",
            )
            require(
                isinstance(overrides, dict),
                f"ablation.arms.{arm}: must be a map {{option: value}}, not {overrides!r}",
            )
        require(
            self.baseline is None or self.baseline in self.arms,
            f"ablation.baseline={self.baseline}: no such arm; the arms are {', '.join(self.arms)}",
        )

        require(
            self.metric is None or isinstance(self.metric, str | list | tuple),
            f"ablation.metric={self.metric}: must be the name of a metric or a list of names",
        )
        names = self.metrics
        require(
            all(isinstance(name, str) and name for name in names)
            and len(set(names)) == len(names)
            and (self.metric is None or bool(names)),
            f"ablation.metric={override_text(self.metric)}: must be the name of a metric, or a "
            "list of different names, such as ablation.metric=[ttft_p50_ms,output_tok_s]",
        )

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics in ``metric``, the most important first; empty if ``metric`` is null."""
        if self.metric is None:
            return ()
        return (self.metric,) if isinstance(self.metric, str) else tuple(self.metric)

    @property
    def baseline_arm(self) -> str:
        return self.baseline if self.baseline is not None else next(iter(self.arms))


class Scale(Enum):
    """Size of an experiment's requests and models (conf/experiment/).

    cpu: minutes on two cores. full: as in the article.
    """

    cpu = "cpu"
    full = "full"

    def __str__(self) -> str:
        return self.value


class Redo(Enum):
    """Finished blocks to run again when a study is resumed."""

    none = "none"
    failed = "failed"


@dataclass
class Experiment(Group):
    """Options of the command itself: scale, seed, output folder."""

    engine: Engine = field(default_factory=Engine)
    model: Model = field(default_factory=Model)
    workload: Workload = field(default_factory=Workload)
    ablation: Ablation = field(default_factory=Ablation)
    design: Design = field(default_factory=Design)
    scale: Scale = option(Scale.cpu)
    scales: dict[str, Any] = option(
        factory=dict,
        meaning="Overrides of an experiment per scale: {scale: {option: value}}; the command line "
        "takes precedence.",
    )
    seed: int = option(0, "Seed of inputs, sampling and the order of runs.", ge=0, le=(1 << 32) - 1)
    out: str = option("outputs", "Output folder of the study; an existing study there is resumed.")
    plan: bool = option(False, "Print the schedule without running anything.")
    redo: Redo = option(Redo.none)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            bool(self.ablation.arms),
            f"ablation={self.ablation.name}: there is no arm; set ablation.arms",
        )
        self._check_scales()
        require(
            self.model.has_source or not self.workload.has_engine,
            f"model={self.model.name}: set model.path=PATH to a directory that mlx_lm can load or "
            "to a GGUF file",
        )
        require(
            self.engine.scheduler.queue != "priority",
            "engine.scheduler.queue=priority: no workload gives its requests priorities; leave "
            "engine.scheduler.queue=fcfs, or set a class of your own (docs/extending.md)",
        )
        self._check_identity()
        self._check_metrics()
        if not self.workload.has_engine:
            self._check_no_engine()
        elif self.workload.times_kernels:
            self._check_kernel()
        else:
            require(
                self.engine.attention.resolver != "identity",
                "engine.attention.resolver=identity: it handles decode only, and requests of "
                f"workload={self.workload.name} begin with a prefill; set another resolver",
            )
            self._check_memory()
            self._check_step_trace()
        if self.model.shape is not None and self.engine.name == "paged":
            self._check_shares(self.model.shape, self.engine.parallel.size)

    def _check_memory(self) -> None:
        limit, budget = self.engine.memory_limit, self.engine.budget
        by_bytes = budget.policy is BudgetPolicy.fixed and budget.blocks is None
        require(
            limit is None
            or not by_bytes
            or self.engine.name not in PRESET_LAYOUTS
            or budget.bytes < limit,
            f"engine.budget.bytes={budget.bytes}: must be below engine.memory_limit={limit}; set a "
            "smaller pool or a larger limit",
        )

    def _check_step_trace(self) -> None:
        steps, engine = self.workload.step_trace, self.engine
        ranks = engine.parallel.size
        own = engine.name not in EXTERNAL_ENGINES and ranks == 1
        which = f"engine.parallel.size={ranks}" if ranks > 1 else f"engine={engine.name}"
        require(
            steps is None or own,
            f"workload.step_trace={steps}: {which} runs its steps in another process or library, "
            "where they cannot be traced; set workload.step_trace=null for this arm",
        )

    def _check_shares(self, shape: ModelShape, size: int) -> None:
        for name in ("num_heads", "num_kv_heads", "intermediate_size"):
            total = getattr(shape, name)
            require(
                total % size == 0,
                f"engine.parallel.size={size}: model.shape.{name}={total} is not a multiple of "
                f"{size}; set another engine.parallel.size or model.shape",
            )

    def _check_scales(self) -> None:
        choices = [scale.value for scale in Scale]
        for name, overrides in self.scales.items():
            require(name in choices, f"scales.{name}: must be one of: {', '.join(choices)}")
            require(
                isinstance(overrides, dict),
                f"scales.{name}: must be a map {{option: value}}, not {overrides!r}",
            )
        require(
            bool(self.scales) or self.scale is Scale.cpu,
            f"scale={self.scale.value}: only an experiment has scales; set experiment=NAME",
        )
        require(
            not self.scales or self.scale.value in self.scales,
            f"scale={self.scale.value}: this experiment has only scale={', '.join(self.scales)}",
        )

    def _check_identity(self) -> None:
        identity, video = self.ablation.claims.identity, not self.workload.has_engine
        of_video = (Identity.frames, Identity.bitwise, Identity.none)
        require(
            identity in of_video if video else identity is not Identity.frames,
            f"ablation.claims.identity={identity.value}: workload={self.workload.name} has "
            + ("frames; set frames, bitwise or none" if video else "no frames; set another claim"),
        )
        self._check_quality()

    @property
    def primary_metrics(self) -> tuple[str, ...]:
        """The metrics that the answer is about, the most important first.

        It is empty for a workload class of the user's own, because only its records say it.
        """
        return self.ablation.metrics or self.workload.primary_metrics

    def _check_metrics(self) -> None:
        workload, known = self.workload, metric_names(self.workload.kind)
        for name in self.ablation.metrics:
            where = f"ablation.metric={name}"
            if name == OUTPUTS:
                require(
                    self.ablation.claims.identity is not Identity.none,
                    f"{where}: nothing is claimed about the outputs; set ablation.claims.identity",
                )
                continue
            require(
                name in known or not known,
                f"{where}: workload={workload.name} has no such metric; it must be one of: "
                f"{', '.join(known)}, {OUTPUTS}",
            )
            missing = workload.missing_for(name)
            require(missing is None, f"{where}: workload={workload.name} needs {missing} for it")

    def _check_quality(self) -> None:
        claims = self.ablation.claims
        claimed = claims.identity is Identity.quality
        require(
            claimed == bool(claims.quality.limits()),
            "ablation.claims.identity=quality and ablation.claims.quality go together: set both or "
            "neither, such as ablation.claims.quality.kl_mean=0.01",
        )
        require(
            not claimed or self.workload.kind == "scoring",
            f"ablation.claims.identity=quality: workload={self.workload.name} scores no texts; set "
            "workload=scoring",
        )

    def _check_no_engine(self) -> None:
        why = f"workload={self.workload.name} decodes clips and uses no engine or model"
        for group in (*self.engine.groups(), self.model):
            for name, _, _ in group.options():
                group.require_default(name, why)

    def _check_kernel(self) -> None:
        workload, attention, kv_dtype = self.workload, self.engine.attention, self.engine.kv.dtype
        require(
            self.engine.name == "paged",
            f"engine.name={self.engine.name}: it serves requests, and workload={workload.name} "
            "times labkit's paged attention; set engine=paged or workload=chat",
        )
        require(
            workload.dtype is Precision.float32
            or attention.device is not Device.cpu
            or attention.backend in (*MLX_POOL_BACKENDS, "reference"),
            f"workload.dtype={workload.dtype.value}: engine.attention.backend={attention.backend} "
            "on engine.attention.device=cpu computes in float32; set device=metal or emulated, or "
            "backend=gather, or leave workload.dtype=float32",
        )
        require(
            self.engine.parallel.single_process,
            f"engine.parallel.size={self.engine.parallel.size}: workload={workload.name} times the "
            "kernels of a single process; set workload=chat or engine.parallel.size=1",
        )
        require(
            kv_dtype is KVDType.float32,
            f"engine.kv.dtype={kv_dtype.value}: workload={workload.name} generates keys and values "
            "in workload.dtype; leave engine.kv.dtype=float32",
        )
