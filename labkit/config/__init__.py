"""The schema: every option with its type, unit, range and rule.

One tree of dataclasses, ``Experiment``. Hydra composes it in the parent process (the
tree is registered in ``labkit.app``), ``__post_init__`` checks ranges and pairs that
make no sense, and ``to_plain``/``from_plain`` carry it into a worker as JSON, so that a
worker imports neither Hydra nor OmegaConf. An enum lists only what exists.
"""

from labkit.config.ablation import CONTROL, YAML_WORDS, Ablation, Claims, Identity
from labkit.config.attention import KV, Attention
from labkit.config.budget import DEFAULT_FRACTION, DEFAULT_POOL_BYTES, MACHINES, Budget
from labkit.config.choices import (
    ATTENTION_BACKENDS,
    ENGINES,
    RESOLVERS,
    Admission,
    Blas,
    BudgetPolicy,
    CacheState,
    ChunkPolicy,
    Composition,
    DecodeShape,
    Device,
    DType,
    KVLayout,
    Order,
    Pipeline,
    Precision,
    PrefixAlign,
    PrefixCache,
    Queue,
    Reservation,
    Speculation,
    Verification,
    WiredCollector,
)
from labkit.config.design import Design, Isolation, Look
from labkit.config.drafts import Drafts
from labkit.config.engine import LAYOUT_OF, MLX_LM_OPTIONS, Engine, own_classes
from labkit.config.experiment import Experiment, Redo
from labkit.config.mlx import Mlx
from labkit.config.model import Architecture, Model, ModelShape
from labkit.config.plain import from_plain, to_plain
from labkit.config.rules import (
    SCHEMA_VERSION,
    ConfigError,
    is_class_path,
    require,
    require_strategy,
)
from labkit.config.scheduler import DEFAULT_WATERMARK, Scheduler
from labkit.config.workload import Case, State, Workload, WorkloadKind

__all__ = [
    "ATTENTION_BACKENDS",
    "CONTROL",
    "DEFAULT_FRACTION",
    "DEFAULT_POOL_BYTES",
    "DEFAULT_WATERMARK",
    "ENGINES",
    "KV",
    "LAYOUT_OF",
    "MACHINES",
    "MLX_LM_OPTIONS",
    "RESOLVERS",
    "SCHEMA_VERSION",
    "YAML_WORDS",
    "Ablation",
    "Admission",
    "Architecture",
    "Attention",
    "Blas",
    "Budget",
    "BudgetPolicy",
    "CacheState",
    "Case",
    "ChunkPolicy",
    "Claims",
    "Composition",
    "ConfigError",
    "DType",
    "DecodeShape",
    "Design",
    "Device",
    "Drafts",
    "Engine",
    "Experiment",
    "Identity",
    "Isolation",
    "KVLayout",
    "Look",
    "Mlx",
    "Model",
    "ModelShape",
    "Order",
    "Pipeline",
    "Precision",
    "PrefixAlign",
    "PrefixCache",
    "Queue",
    "Redo",
    "Reservation",
    "Scheduler",
    "Speculation",
    "State",
    "Verification",
    "WiredCollector",
    "Workload",
    "WorkloadKind",
    "from_plain",
    "is_class_path",
    "own_classes",
    "require",
    "require_strategy",
    "to_plain",
]
