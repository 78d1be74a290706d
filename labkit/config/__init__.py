"""The schema: every option with its type, unit, range, meaning and readers.

One tree of dataclasses, ``Experiment``. Hydra composes it in the parent process (the tree is
registered in ``labkit.app``), every group checks itself when it is made, and
``to_plain``/``from_plain`` carry it into a worker as JSON, so that a worker imports neither
Hydra nor OmegaConf. An enum lists only what exists. docs/options.md is generated from it.
"""

from labkit.config.attention import (
    ATTENTION_BACKENDS,
    KV,
    RESOLVERS,
    Attention,
    Device,
    KVLayout,
    Precision,
)
from labkit.config.budget import (
    DEFAULT_FRACTION,
    DEFAULT_POOL_BYTES,
    MACHINES,
    Budget,
    BudgetPolicy,
    WiredCollector,
)
from labkit.config.design import Design, Isolation, Look
from labkit.config.engine import (
    ELSEWHERE,
    ENGINES,
    LAYOUT_OF,
    Blas,
    DecodeShape,
    DType,
    Engine,
    Pipeline,
    PrefixAlign,
    PrefixCache,
    Weights,
    own_classes,
)
from labkit.config.experiment import (
    CONTROL,
    YAML_WORDS,
    Ablation,
    Claims,
    Experiment,
    Identity,
    Redo,
    Scale,
)
from labkit.config.mlx import Mlx
from labkit.config.model import Model, ModelShape, PackagedFile
from labkit.config.openai_server import PRESETS, Api, Ending, Opponent, Preset
from labkit.config.option import ConfigError, is_class_path, require
from labkit.config.request_mix import (
    ArrivalKind,
    Arrivals,
    LengthKind,
    Lengths,
    Limits,
    ListedRequest,
    Message,
    Prompts,
)
from labkit.config.scheduler import (
    DEFAULT_WATERMARK,
    Admission,
    ChunkPolicy,
    Composition,
    Order,
    Queue,
    Reservation,
    Scheduler,
)
from labkit.config.serialization import from_plain, to_plain
from labkit.config.server import Serve, Server
from labkit.config.speculation import Drafts, Speculation, Verification
from labkit.config.tensor_parallel import Parallel
from labkit.config.video import Clip, Decoder, Picks
from labkit.config.workload import CacheState, Case, State, Workload

__all__ = [
    "ATTENTION_BACKENDS",
    "CONTROL",
    "DEFAULT_FRACTION",
    "DEFAULT_POOL_BYTES",
    "DEFAULT_WATERMARK",
    "ELSEWHERE",
    "ENGINES",
    "KV",
    "LAYOUT_OF",
    "MACHINES",
    "PRESETS",
    "RESOLVERS",
    "YAML_WORDS",
    "Ablation",
    "Admission",
    "Api",
    "ArrivalKind",
    "Arrivals",
    "Attention",
    "Blas",
    "Budget",
    "BudgetPolicy",
    "CacheState",
    "Case",
    "ChunkPolicy",
    "Claims",
    "Clip",
    "Composition",
    "ConfigError",
    "DType",
    "DecodeShape",
    "Decoder",
    "Design",
    "Device",
    "Drafts",
    "Ending",
    "Engine",
    "Experiment",
    "Identity",
    "Isolation",
    "KVLayout",
    "LengthKind",
    "Lengths",
    "Limits",
    "ListedRequest",
    "Look",
    "Message",
    "Mlx",
    "Model",
    "ModelShape",
    "Opponent",
    "Order",
    "PackagedFile",
    "Parallel",
    "Picks",
    "Pipeline",
    "Precision",
    "PrefixAlign",
    "PrefixCache",
    "Preset",
    "Prompts",
    "Queue",
    "Redo",
    "Reservation",
    "Scale",
    "Scheduler",
    "Serve",
    "Server",
    "Speculation",
    "State",
    "Verification",
    "Weights",
    "WiredCollector",
    "Workload",
    "from_plain",
    "is_class_path",
    "own_classes",
    "require",
    "to_plain",
]
