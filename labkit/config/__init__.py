"""The configuration schema: every option with its type, unit, range and meaning.

The root is the dataclass ``Experiment``, which Hydra composes in the parent process. Every group of
options checks its values when it is created. ``to_plain`` and ``from_plain`` convert a config to
JSON and back for a worker, which imports neither Hydra nor OmegaConf. docs/options.md is generated
from the schema.
"""

from labkit.config.design import Design, Isolation, PlannedLook
from labkit.config.engine import (
    ENGINES,
    EXTERNAL_ENGINES,
    PRESET_LAYOUTS,
    Activations,
    Blas,
    DecodeShape,
    DType,
    Engine,
    Forward,
    Pipeline,
    PrefixAlign,
    PrefixCache,
    TensorParallel,
    Weights,
    user_classes,
)
from labkit.config.engine.attention import ATTENTION_BACKENDS, RESOLVERS, Attention, Device
from labkit.config.engine.kv_cache import (
    KV,
    FreeList,
    KVDType,
    KVLayout,
    Precision,
    PrefixInsert,
)
from labkit.config.engine.memory_budget import (
    DEFAULT_FRACTION,
    DEFAULT_FREE_FRACTION,
    FRACTION_POLICIES,
    SIMULATED_MAC_NAMES,
    Budget,
    BudgetPolicy,
    WiredCollector,
)
from labkit.config.engine.mlx_variables import Mlx
from labkit.config.engine.openai_server import (
    MAX_PROMPT_LOGPROBS,
    PRESETS,
    Api,
    EosHandling,
    OpenAIServer,
)
from labkit.config.engine.scheduler import (
    DEFAULT_WATERMARK,
    Admission,
    ChunkPolicy,
    Composition,
    Order,
    Reservation,
    Scheduler,
)
from labkit.config.engine.speculation import Drafts, Speculation, Verification
from labkit.config.experiment import (
    CONTROL,
    Ablation,
    Claims,
    Environment,
    Experiment,
    Identity,
    Redo,
    Scale,
)
from labkit.config.model import Model, ModelShape, PackagedFile
from labkit.config.option import GPU, ConfigError, count_text, is_class_path, require
from labkit.config.requests import (
    ArrivalKind,
    Arrivals,
    LatencySLO,
    LengthKind,
    Lengths,
    ListedRequest,
    Message,
    Prompts,
)
from labkit.config.serialization import from_plain, to_plain
from labkit.config.server import ServeConfig, Server, SpecialTokens
from labkit.config.video import Clip, Decoder, FramePicks
from labkit.config.workload import CacheState, Case, State, Workload
