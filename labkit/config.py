"""The schema: every option with its type, unit, range and rule.

One tree of dataclasses, ``Experiment``. Hydra composes it in the parent process (the
tree is registered in ``labkit.app``), ``__post_init__`` checks ranges and pairs that
make no sense, and ``to_plain``/``from_plain`` carry it into a worker as JSON, so that a
worker imports neither Hydra nor OmegaConf. An enum lists only what exists.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from types import NoneType, UnionType
from typing import Any, TypeVar, cast

SCHEMA_VERSION = 1
T = TypeVar("T")


class ConfigError(ValueError):
    """A mistake in the configuration, said in one line."""


def require(condition: bool, message: str) -> None:
    """Raise ``ConfigError(message)`` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(message)


# --------------------------------------------------------------------------- engine

# Named by one of these words, or by ``package.module:Class`` for a user's own.
ENGINES = ("naive", "padded", "contiguous", "paged", "mlx_lm")
ATTENTION_BACKENDS = ("fused", "gather", "sdpa", "reference")
RESOLVERS = ("binary_search", "seq_map", "identity", "padded_grid", "work_plan")


def is_class_path(text: str) -> bool:
    """Tell whether ``text`` looks like ``package.module:Class``."""
    module, colon, name = text.partition(":")
    return bool(colon) and name.isidentifier() and all(p.isidentifier() for p in module.split("."))


def require_strategy(key: str, value: str, words: tuple[str, ...]) -> None:
    """Check that a strategy is one of ``words`` or looks like a user's own class."""
    require(
        value in words or is_class_path(value),
        f"{key}={value}: allowed are {', '.join(words)} or package.module:Class",
    )


class Blas(Enum):
    """Which BLAS MLX's CPU build multiplies with (Linux)."""

    openblas = "openblas"
    stock = "stock"


class DecodeShape(Enum):
    """How many rows a step of decodes alone has.

    exact: its tokens. bucketed: the next power of two. fixed: as many as there can be.
    """

    exact = "exact"
    bucketed = "bucketed"
    fixed = "fixed"


class PrefixCache(Enum):
    """How computed KV blocks are found for reuse between requests."""

    none = "none"
    hash = "hash"
    radix = "radix"


class PrefixAlign(Enum):
    """Where reuse of a cached prefix may end: after any block, or where a chunk ends too.

    With chunk, a prompt that is chunked by ``engine.scheduler.chunk`` alone is computed in
    the same chunks with and without a cache.
    """

    block = "block"
    chunk = "chunk"


class CacheState(Enum):
    """What the prefix cache holds when measuring begins.

    cold: nothing. warm: what it keeps after all requests were served once, unmeasured.
    """

    cold = "cold"
    warm = "warm"


class Speculation(Enum):
    """Who drafts tokens: nobody, the request's own text, or a smaller model."""

    none = "none"
    ngram = "ngram"
    draft = "draft"


class Verification(Enum):
    """How drafts are laid out: one causal segment, or a segment of one token for each."""

    window = "window"
    staircase = "staircase"


class Pipeline(Enum):
    """When a step's results are processed: at once, or while the next step runs."""

    sync = "sync"
    overlap = "overlap"


class KVLayout(Enum):
    """How keys and values lie in memory.

    padded: one rectangle for all requests. contiguous: a growing cache per request.
    paged: blocks of a pool.
    """

    padded = "padded"
    contiguous = "contiguous"
    paged = "paged"


class Device(Enum):
    """Where the fused attention kernels run."""

    cpu = "cpu"
    emulated = "emulated"
    metal = "metal"


class Admission(Enum):
    """When waiting requests may join: at any step, or only when none runs."""

    continuous = "continuous"
    static = "static"


class Order(Enum):
    """Whose tokens come first in a step's budget."""

    decode_first = "decode_first"
    prefill_first = "prefill_first"


class Composition(Enum):
    """Whether prefill and decode share a step."""

    mixed = "mixed"
    split = "split"


class Reservation(Enum):
    """How many KV blocks a request must find free to be admitted."""

    full = "full"
    optimistic = "optimistic"


class Queue(Enum):
    """Who is served before whom."""

    fcfs = "fcfs"
    priority = "priority"


class ChunkPolicy(Enum):
    """Whether the cap on a request's chunk shrinks with the decode load."""

    static = "static"
    shrinking = "shrinking"


class BudgetPolicy(Enum):
    """How the size of the KV pool is found; each policy's formula is in its own file."""

    fixed = "fixed"
    fraction = "fraction"
    vllm = "vllm"
    mistralrs = "mistralrs"
    llamacpp = "llamacpp"
    tiered_reserve = "tiered_reserve"


# What engine.scheduler.reservation=optimistic takes where watermark is null, as vLLM does.
DEFAULT_WATERMARK = 0.01


class WiredCollector(Enum):
    """The state of macOS's wired collector that an arm demands of the machine."""

    any = "any"
    enabled = "enabled"
    disabled = "disabled"


# What a policy that reads engine.budget.fraction takes where it is null, as vLLM does.
DEFAULT_FRACTION = 0.9
DEFAULT_POOL_BYTES = 1 << 30
# The Macs that budgets can be computed for anywhere (labkit.platform.memory_machine).
MACHINES = (
    "sim_m1_8gb",
    "sim_m1_pro_16gb",
    "sim_m2_24gb",
    "sim_m1_pro_32gb",
    "sim_m3_pro_36gb",
    "sim_m4_pro_48gb",
    "sim_m1_max_64gb",
    "sim_m2_max_96gb",
    "sim_m4_max_128gb",
    "sim_m5_max_128gb",
    "sim_m2_ultra_192gb",
    "sim_m3_ultra_512gb",
)


@dataclass
class KV:
    """Key/value memory: its layout and the tokens in a block."""

    layout: KVLayout = KVLayout.paged
    block_size: int = 16

    def __post_init__(self) -> None:
        """Check the ranges."""
        require(
            self.block_size in (8, 16, 32),
            f"engine.kv.block_size={self.block_size}: allowed are 8, 16 and 32 (tokens)",
        )


@dataclass
class Attention:
    """The attention operation: backend and device, and the fused kernels' switches.

    ``backend``: fused, gather, sdpa, reference or ``package.module:Class``.
    ``resolver``: binary_search, seq_map, identity, padded_grid, work_plan or
    ``package.module:Class``. ``split_kv``: off, auto or a number of partitions of the keys.
    ``gqa_sharing``: query heads of one KV head share its loads in the decode kernel.
    ``window_skip``: KV blocks outside a sliding window are left out, not read and masked.
    ``tile_threshold``: query tokens of the longest sequence from which a batch goes to the
    tiled kernel.
    """

    backend: str = "fused"
    device: Device = Device.cpu
    resolver: str = "binary_search"
    split_kv: str = "off"
    gqa_sharing: bool = True
    window_skip: bool = True
    tile_threshold: int = 2

    def __post_init__(self) -> None:
        """Check the words; a class path is checked by importing it in the worker."""
        require_strategy("engine.attention.backend", self.backend, ATTENTION_BACKENDS)
        require_strategy("engine.attention.resolver", self.resolver, RESOLVERS)
        number = self.split_kv.isdecimal() and 2 <= int(self.split_kv) <= 1024
        require(
            self.split_kv in ("off", "auto") or number,
            f"engine.attention.split_kv={self.split_kv}: allowed are off, auto or 2 to 1024 "
            "(partitions)",
        )
        require(
            2 <= self.tile_threshold <= 1 << 20,
            f"engine.attention.tile_threshold={self.tile_threshold}: allowed are 2 to 1048576 "
            "(query tokens)",
        )
        if self.backend != "fused":
            self._refuse_switches()

    def _refuse_switches(self) -> None:
        read = {"backend", "resolver"} if is_class_path(self.backend) else {"backend"}
        for item in dataclasses.fields(self):
            name, default, value = item.name, item.default, getattr(self, item.name)
            require(
                name in read or value == default,
                f"engine.attention.{name}={getattr(value, 'value', value)}: only "
                "engine.attention.backend=fused has this switch; leave it "
                f"{getattr(default, 'value', default)}",
            )


@dataclass
class Scheduler:
    """Who runs in a step: admission, queue, order, budget (tokens) and caps.

    ``chunk``: at most this many prompt tokens of one request per step; null: no cap
    besides ``max_num_batched_tokens``. ``watermark``: the share of KV blocks that an
    optimistic admission leaves free; null: 0.01.
    """

    admission: Admission = Admission.continuous
    order: Order = Order.decode_first
    composition: Composition = Composition.mixed
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    chunk: int | None = None
    chunk_policy: ChunkPolicy = ChunkPolicy.static
    reservation: Reservation = Reservation.full
    watermark: float | None = None
    queue: Queue = Queue.fcfs

    def __post_init__(self) -> None:
        """Check the ranges."""
        require(
            1 <= self.max_num_seqs <= 4096,
            f"engine.scheduler.max_num_seqs={self.max_num_seqs}: allowed are 1 to 4096",
        )
        require(
            self.max_num_seqs <= self.max_num_batched_tokens <= 1 << 20,
            f"engine.scheduler.max_num_batched_tokens={self.max_num_batched_tokens}: must be at "
            f"least engine.scheduler.max_num_seqs={self.max_num_seqs} (one token each), "
            "at most 1048576",
        )
        require(
            self.chunk is None or 1 <= self.chunk <= self.max_num_batched_tokens,
            f"engine.scheduler.chunk={self.chunk}: allowed are 1 to "
            f"engine.scheduler.max_num_batched_tokens={self.max_num_batched_tokens}, or null",
        )
        require(
            self.admission is not Admission.static or self.order is Order.prefill_first,
            "engine.scheduler.admission=static: a batch begins with its prompts, so that "
            "engine.scheduler.order=decode_first has nothing to order; set prefill_first",
        )
        self._check_shrinking()
        self._check_reservation()

    def _check_shrinking(self) -> None:
        if self.chunk_policy is ChunkPolicy.static:
            return
        where = "engine.scheduler.chunk_policy=shrinking"
        require(
            self.chunk is not None and self.chunk >= self.max_num_seqs,
            f"{where}: takes a token of the chunk per decode; set engine.scheduler.chunk to "
            f"engine.scheduler.max_num_seqs={self.max_num_seqs} or more",
        )
        require(
            self.composition is Composition.mixed,
            f"{where}: a prefill step of engine.scheduler.composition=split has no decodes to "
            "shrink for; set mixed, or static",
        )

    def _check_reservation(self) -> None:
        if self.reservation is Reservation.full:
            require(
                self.watermark is None,
                f"engine.scheduler.watermark={self.watermark}: engine.scheduler.reservation=full "
                "never preempts and does not read it; set optimistic, or leave it null",
            )
            return
        require(
            self.watermark is None or 0 <= self.watermark <= 0.5,
            f"engine.scheduler.watermark={self.watermark}: allowed are 0 to 0.5 (share of the "
            "blocks), or null",
        )
        require(
            self.admission is Admission.continuous,
            "engine.scheduler.reservation=optimistic: a static batch runs whole to its end and "
            "may lose no request; set engine.scheduler.admission=continuous, or full",
        )


@dataclass
class Budget:
    """The KV pool's size: a policy and what it reads.

    ``blocks``: fixed, and llamacpp's token capacity. ``bytes``: fixed, where blocks is
    null. ``fraction``: of RAM (fraction), of the working set (vllm, mistralrs); null: 0.9.
    ``machine``: a simulated Mac's memory; null: this machine's. ``wired_collector``: what
    the machine's must be, else the arm is refused; labkit never changes it.
    """

    policy: BudgetPolicy = BudgetPolicy.fixed
    fraction: float | None = None
    blocks: int | None = None
    bytes: int = DEFAULT_POOL_BYTES
    machine: str | None = None
    wired_collector: WiredCollector = WiredCollector.any

    def __post_init__(self) -> None:
        """Check the ranges and that nothing is set that the policy does not read."""
        require(
            self.blocks is None or self.blocks >= 2,
            f"engine.budget.blocks={self.blocks}: allowed are 2 or more, or null",
        )
        require(
            self.bytes >= 1 << 16,
            f"engine.budget.bytes={self.bytes}: allowed are 65536 or more",
        )
        require(
            self.fraction is None or 0 < self.fraction <= 1,
            f"engine.budget.fraction={self.fraction}: allowed are above 0, at most 1, or null",
        )
        require(
            self.machine is None or self.machine in MACHINES,
            f"engine.budget.machine={self.machine}: allowed are {', '.join(MACHINES)}, or null "
            "for this machine",
        )
        shares = (BudgetPolicy.fraction, BudgetPolicy.vllm, BudgetPolicy.mistralrs)
        self._unread("fraction", self.fraction, None, shares)
        self._unread("blocks", self.blocks, None, (BudgetPolicy.fixed, BudgetPolicy.llamacpp))
        self._unread("bytes", self.bytes, DEFAULT_POOL_BYTES, (BudgetPolicy.fixed,))

    def _unread(
        self, name: str, value: object, default: object, readers: tuple[BudgetPolicy, ...]
    ) -> None:
        require(
            value == default or self.policy in readers,
            f"engine.budget.{name}={value}: engine.budget.policy={self.policy.value} does not "
            f"read it; it is for {', '.join(policy.value for policy in readers)}",
        )


@dataclass
class Drafts:
    """Speculation's drafts: how many, how they are verified, and where they come from.

    ``num_draft_tokens``: per request and step, at most. ``ngram_min``, ``ngram_max``: tokens
    in the n-grams that ngram looks up. ``draft_path``: the draft model's directory, of the
    same vocabulary; null: the model itself, or its first ``draft_layers`` layers.
    """

    num_draft_tokens: int = 4
    verification: Verification = Verification.window
    ngram_min: int = 1
    ngram_max: int = 4
    draft_path: str | None = None
    draft_layers: int | None = None

    def __post_init__(self) -> None:
        """Check the ranges."""
        require(
            1 <= self.num_draft_tokens <= 64,
            f"engine.drafts.num_draft_tokens={self.num_draft_tokens}: allowed are 1 to 64",
        )
        require(
            1 <= self.ngram_min <= self.ngram_max <= 16,
            f"engine.drafts.ngram_min={self.ngram_min}: allowed are 1 to "
            f"engine.drafts.ngram_max={self.ngram_max}, and that at most 16",
        )
        require(
            self.draft_layers is None or self.draft_layers >= 1,
            f"engine.drafts.draft_layers={self.draft_layers}: allowed are 1 or more, or null",
        )
        require(
            self.draft_path is None or self.draft_layers is None,
            f"engine.drafts.draft_layers={self.draft_layers}: it cuts the model itself, and "
            "engine.drafts.draft_path names another; set one of them",
        )

    def check_read_by(self, speculation: Speculation) -> None:
        """Refuse what is set and not read."""
        readers = {
            "num_draft_tokens": (Speculation.ngram, Speculation.draft),
            "verification": (Speculation.ngram, Speculation.draft),
            "ngram_min": (Speculation.ngram,),
            "ngram_max": (Speculation.ngram,),
            "draft_path": (Speculation.draft,),
            "draft_layers": (Speculation.draft,),
        }
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            require(
                value == item.default or speculation in readers[item.name],
                f"engine.drafts.{item.name}={getattr(value, 'value', value)}: "
                f"engine.speculation={speculation.value} does not read it; it is for "
                f"{', '.join(reader.value for reader in readers[item.name])}",
            )


@dataclass
class Engine:
    """An inference engine: its name and every design choice as one switch.

    ``name``: a preset of labkit's own engine (naive, padded, contiguous, paged), mlx_lm (the
    real BatchGenerator) or ``package.module:Class``; a user's own engine is given the rest.
    ``threads``: the CPU budget of the arm, in threads; null: all cores. ``memory_limit``:
    bytes that the arm's process may take beyond what it holds when the engine begins to
    load (a cgroup's, else of address space); null: none. ``mlx_cache_limit``: bytes of
    freed buffers that MLX keeps; null: MLX's default.
    """

    name: str = "paged"
    blas: Blas = Blas.openblas
    threads: int | None = None
    memory_limit: int | None = None
    mlx_cache_limit: int | None = None
    decode_shape: DecodeShape = DecodeShape.exact
    prefix_cache: PrefixCache = PrefixCache.none
    prefix_align: PrefixAlign = PrefixAlign.block
    speculation: Speculation = Speculation.none
    pipeline: Pipeline = Pipeline.sync
    batch_invariant: bool = False
    kv: KV = field(default_factory=KV)
    attention: Attention = field(default_factory=Attention)
    scheduler: Scheduler = field(default_factory=Scheduler)
    budget: Budget = field(default_factory=Budget)
    drafts: Drafts = field(default_factory=Drafts)

    def __post_init__(self) -> None:
        """Check the ranges and the pairs."""
        self._check_step()
        require_strategy("engine.name", self.name, ENGINES)
        require(
            self.threads is None or 1 <= self.threads <= 1024,
            f"engine.threads={self.threads}: allowed are 1 to 1024, or null for all cores",
        )
        require(
            self.memory_limit is None or self.memory_limit >= 1 << 20,
            f"engine.memory_limit={self.memory_limit}: allowed are 1048576 (bytes) or more, "
            "or null",
        )
        require(
            self.mlx_cache_limit is None or self.mlx_cache_limit >= 0,
            f"engine.mlx_cache_limit={self.mlx_cache_limit}: allowed are 0 (bytes) or more, "
            "or null for MLX's default",
        )
        if self.batch_invariant:
            self._check_invariance()
        if self.name in LAYOUT_OF:
            self._check_preset(LAYOUT_OF[self.name])
        if self.prefix_align is PrefixAlign.chunk:
            self._check_chunk_alignment()
        if self.name == "mlx_lm":
            _has_only(self, MLX_LM_OPTIONS)

    def _check_preset(self, layout: KVLayout) -> None:
        """Check that a preset of labkit's own is what its name says, and what its layout can."""
        require(
            self.kv.layout is layout,
            f"engine.kv.layout={self.kv.layout.value}: engine.name={self.name} is the "
            f"{layout.value} one; set engine=naive, padded, contiguous or paged",
        )
        backend, paged = self.attention.backend, layout is KVLayout.paged
        require(
            (backend == "sdpa") is not paged,
            f"engine.attention.backend={backend}: "
            + (
                "it reads whole arrays, and engine.kv.layout=paged has blocks; set gather or fused"
                if paged
                else f"it reads blocks, and engine.kv.layout={layout.value} has none; set sdpa"
            ),
        )
        static = self.scheduler.admission is Admission.static
        require(
            static or self.name != "naive",
            "engine.scheduler.admission=continuous: engine.name=naive is padded with static "
            "batches; set engine=padded",
        )
        require(
            not static or self.name != "padded",
            "engine.scheduler.admission=static: engine.name=padded is padded with continuous "
            "admission; set engine=naive",
        )
        require(
            layout is not KVLayout.padded or self.scheduler.composition is Composition.split,
            "engine.scheduler.composition=mixed: engine.kv.layout=padded would pad every decode "
            "to the longest prompt chunk of its step; set split",
        )
        if not paged:
            self._check_blockless(layout)

    def _check_blockless(self, layout: KVLayout) -> None:
        """Refuse what needs blocks that stay where they are."""
        asked = {
            "prefix_cache": (self.prefix_cache, "without blocks nothing can be shared; leave none"),
            "decode_shape": (self.decode_shape, "padding rows need a null block; leave exact"),
            "speculation": (self.speculation, "drafts are verified over blocks; leave none"),
            "scheduler.reservation": (
                self.scheduler.reservation,
                "memory is promised whole; leave full",
            ),
            "pipeline": (self.pipeline, "memory moves between two steps; leave sync"),
        }
        plain = ("none", "exact", "full", "sync")
        for option, (choice, reason) in asked.items():
            require(
                choice.value in plain,
                f"engine.{option}={choice.value}: engine.kv.layout={layout.value}: {reason}",
            )

    def _check_step(self) -> None:
        """Check what shapes a step and who looks ahead."""
        self.drafts.check_read_by(self.speculation)
        require(
            self.pipeline is Pipeline.sync or self.speculation is Speculation.none,
            f"engine.pipeline=overlap: engine.speculation={self.speculation.value} drafts from "
            "tokens that the step in flight has not sampled yet; set one of them to its default",
        )

    def _check_invariance(self) -> None:
        where, attention = "engine.batch_invariant=true", self.attention
        require(
            attention.split_kv == "off",
            f"{where}: engine.attention.split_kv={attention.split_kv} adds up a token's keys in "
            "another order in pure decode steps; set off",
        )
        require(
            attention.backend in ("fused", "reference") or self.blas is Blas.stock,
            f"{where}: engine.attention.backend={attention.backend} multiplies with "
            "OpenBLAS, whose results change with the rows; set engine.blas=stock, or fused",
        )

    def _check_chunk_alignment(self) -> None:
        require(
            self.prefix_cache is not PrefixCache.none,
            "engine.prefix_align=chunk: there is no prefix to align; set engine.prefix_cache to "
            "hash or radix, or leave prefix_align=block",
        )
        chunk, size = self.scheduler.chunk, self.kv.block_size
        require(
            chunk is not None and chunk % size == 0,
            f"engine.prefix_align=chunk: set engine.scheduler.chunk (now {chunk}) to a multiple of "
            f"engine.kv.block_size={size}",
        )
        require(
            self.scheduler.chunk_policy is ChunkPolicy.static,
            "engine.scheduler.chunk_policy=shrinking: engine.prefix_align=chunk needs chunks that "
            "end in the same places every time; set static",
        )


LAYOUT_OF = {
    "naive": KVLayout.padded,
    "padded": KVLayout.padded,
    "contiguous": KVLayout.contiguous,
    "paged": KVLayout.paged,
}


def own_classes(engine: Engine) -> dict[str, str]:
    """Map option to ``package.module:Class`` for every strategy of the user's own."""
    strategies = {
        "engine.name": engine.name,
        "engine.attention.backend": engine.attention.backend,
        "engine.attention.resolver": engine.attention.resolver,
    }
    return {key: value for key, value in strategies.items() if is_class_path(value)}


# What engine=mlx_lm reads, or its worker does; every other option is of labkit's own engine.
MLX_LM_OPTIONS = (
    "name",
    "blas",
    "threads",
    "memory_limit",
    "mlx_cache_limit",
    "scheduler.max_num_seqs",
    "scheduler.chunk",
    "budget.machine",
    "budget.wired_collector",
)


def _has_only(engine: Engine, options: tuple[str, ...]) -> None:
    """Refuse what an engine does not have, wherever it is not left at its default."""
    default = dict(_leaves(Engine(), ""))
    for key, value in _leaves(engine, ""):
        require(
            key in options or value == default[key],
            f"engine.{key}={_word(value)}: engine={engine.name} does not have it; "
            f"leave it {_word(default[key])}",
        )


def _leaves(options: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for item in dataclasses.fields(options):
        value = getattr(options, item.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", value


def _word(value: Any) -> str:
    """Write an option's value as it is written in an override."""
    plain = to_plain(value)
    if plain is None or isinstance(plain, bool):
        return {None: "null", True: "true", False: "false"}[plain]
    return str(plain)


# --------------------------------------------------------------------------- model


class Architecture(Enum):
    """The mlx_lm model class that a built model uses."""

    qwen3 = "qwen3"


@dataclass
class ModelShape:
    """The shape of a model that labkit builds from a seed."""

    architecture: Architecture = Architecture.qwen3
    hidden_size: int = 256
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 64
    intermediate_size: int = 768
    vocab_size: int = 4096

    def __post_init__(self) -> None:
        """Check the ranges."""
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            require(
                not isinstance(value, int) or value >= 1,
                f"model.shape.{item.name}={value}: allowed are 1 or more",
            )
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"model.shape.num_heads={self.num_heads} is not a multiple of "
            f"model.shape.num_kv_heads={self.num_kv_heads}",
        )
        require(
            self.vocab_size >= 512,
            f"model.shape.vocab_size={self.vocab_size}: allowed are 512 or more "
            "(256 bytes, the special tokens and some merges)",
        )


@dataclass
class Model:
    """Which model: built from ``shape`` and ``seed``, or a directory at ``path``."""

    name: str = "tiny"
    path: str | None = None
    seed: int = 0
    shape: ModelShape | None = None

    def __post_init__(self) -> None:
        """Check that there is at most one source of weights (``Experiment`` wants one)."""
        require(
            self.shape is None or self.path is None,
            f"model.path={self.path}: model={self.name} is built from a seed; "
            "use model=local model.path=DIR",
        )


# --------------------------------------------------------------------------- workload


class WorkloadKind(Enum):
    """What the engine is given: attention cases, or requests."""

    kernel = "kernel"
    ragged = "ragged"
    uniform = "uniform"
    case_study = "case_study"
    waste = "waste"
    chat = "chat"
    agent = "agent"


@dataclass
class Case:
    """One row of a kernel workload.

    ``decode`` requests of one query token over ``context`` tokens each, and
    ``prefill`` requests of ``chunk`` query tokens each, after ``past`` tokens that are
    cached already. Short dispatches need more timings: the case is timed
    ``workload.repeats`` x ``factor`` times.
    """

    name: str = ""
    decode: int = 0
    context: int = 0
    prefill: int = 0
    chunk: int = 0
    past: int = 0
    factor: int = 1

    def __post_init__(self) -> None:
        """Check that the case has work and says how much."""
        where = f"workload.cases: case {self.name!r}"
        require(bool(self.name), "workload.cases: every case needs a name")
        numbers = (self.decode, self.context, self.prefill, self.chunk, self.past)
        require(min(numbers) >= 0, f"{where}: negative")
        require(self.decode + self.prefill > 0, f"{where}: no requests (decode or prefill)")
        require((self.decode > 0) == (self.context > 0), f"{where}: decode goes with context")
        require((self.prefill > 0) == (self.chunk > 0), f"{where}: prefill goes with chunk")
        require(self.prefill > 0 or self.past == 0, f"{where}: past goes with prefill")
        require(1 <= self.factor <= 1000, f"{where}: factor={self.factor}: allowed are 1 to 1000")


@dataclass
class Workload:
    """What is asked of the engine.

    Kernel workloads: ``cases``, the head counts, ``window`` (keys that a query sees; null:
    all), ``max_pool_bytes``.
    Request workloads: ``num_requests``, ``concurrency`` (requests in flight, closed
    loop), ``stagger_ms`` (each of these clients begins so many milliseconds after the one
    before), ``ignore_eos`` (fixed output lengths), ``cache_state`` (of the prefix cache)
    and the sampling parameters.
    ``warmup`` and ``repeats`` are counts of kernel dispatches per case; request
    workloads warm up with ``warmup`` requests and are measured once.
    """

    name: str = "chat"
    kind: WorkloadKind = WorkloadKind.chat
    warmup: int = 2
    repeats: int = 1
    # requests
    num_requests: int | None = None
    concurrency: int = 16
    stagger_ms: float = 0.0
    ignore_eos: bool = True
    cache_state: CacheState = CacheState.cold
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    # kernel cases
    num_heads: int = 16
    num_kv_heads: int = 4
    head_dim: int = 128
    window: int | None = None
    max_pool_bytes: int = 1 << 30
    cases: list[Case] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Check the ranges, and that nothing is set that this kind does not read."""
        require(self.warmup >= 0, f"workload.warmup={self.warmup}: allowed are 0 or more")
        require(
            1 <= self.repeats <= 100_000,
            f"workload.repeats={self.repeats}: allowed are 1 to 100000",
        )
        if self.kind is WorkloadKind.kernel:
            self._check_kernel()
        else:
            self._check_requests()

    def _check_kernel(self) -> None:
        require(bool(self.cases), f"workload={self.name}: workload.cases is empty")
        names = [case.name for case in self.cases]
        require(len(set(names)) == len(names), "workload.cases: two cases have the same name")
        require(
            self.num_kv_heads >= 1 and self.num_heads % self.num_kv_heads == 0,
            f"workload.num_heads={self.num_heads} is not a multiple of "
            f"workload.num_kv_heads={self.num_kv_heads}",
        )
        require(
            16 <= self.head_dim <= 256 and self.head_dim % 16 == 0,
            f"workload.head_dim={self.head_dim}: allowed are multiples of 16 from 16 to 256",
        )
        require(
            self.window is None or self.window >= 1,
            f"workload.window={self.window}: allowed are 1 or more (keys), or null",
        )
        require(
            self.max_pool_bytes >= 1 << 20,
            f"workload.max_pool_bytes={self.max_pool_bytes}: allowed are 1048576 or more",
        )
        self._unread(
            "kernel",
            "num_requests",
            "concurrency",
            "stagger_ms",
            "ignore_eos",
            "cache_state",
            "temperature",
            "top_k",
            "top_p",
        )

    def _check_requests(self) -> None:
        require(
            self.num_requests is None or self.num_requests >= 1,
            f"workload.num_requests={self.num_requests}: allowed are 1 or more, or null for all",
        )
        require(
            1 <= self.concurrency <= 4096,
            f"workload.concurrency={self.concurrency}: allowed are 1 to 4096",
        )
        require(
            0 <= self.stagger_ms <= 60_000,
            f"workload.stagger_ms={self.stagger_ms}: allowed are 0 to 60000 (milliseconds)",
        )
        require(
            self.temperature >= 0, f"workload.temperature={self.temperature}: allowed are 0 or more"
        )
        require(self.top_k >= 0, f"workload.top_k={self.top_k}: allowed are 0 (off) or more")
        require(0 < self.top_p <= 1, f"workload.top_p={self.top_p}: allowed are above 0, at most 1")
        require(self.repeats == 1, f"workload.repeats={self.repeats}: requests are measured once")
        self._unread(
            "request", "num_heads", "num_kv_heads", "head_dim", "window", "max_pool_bytes", "cases"
        )

    def _unread(self, kind: str, *names: str) -> None:
        defaults = {item.name: item for item in dataclasses.fields(self)}
        for name in names:
            value = getattr(self, name)
            factory = defaults[name].default_factory
            default = factory() if factory is not dataclasses.MISSING else defaults[name].default
            require(
                value == default,
                f"workload.{name}={value}: a {kind} workload ({self.name}) does not read it",
            )


# --------------------------------------------------------------------------- ablation


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

# --------------------------------------------------------------------------- design


class Isolation(Enum):
    """Where a run happens.

    ``process``: in a fresh process of its own. ``in_process``: one fresh process holds
    every arm and alternates them repeat by repeat; kernel workloads only.
    """

    process = "process"
    in_process = "in_process"


@dataclass
class Look:
    """A predeclared look at the results after ``blocks`` blocks; it may spend ``alpha``."""

    blocks: int = 0
    alpha: float = 0.0


@dataclass
class Design:
    """How many blocks of runs, and what is declared before them.

    ``margin_pct``: differences below it (percent) are called trivial or equivalent.
    ``timeout_s``: a run that takes longer (seconds) is killed.
    ``looks``: where the study may stop because all is decided; the parts of ``alpha``
    that they spend sum to at most ``alpha``. None: it runs all its blocks.
    """

    name: str = "standard"
    blocks: int = 4
    runs_per_block: int = 2
    control: bool = True
    margin_pct: float = 2.0
    alpha: float = 0.05
    isolation: Isolation = Isolation.process
    peek: bool = False
    timeout_s: float = 600.0
    looks: list[Look] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Check the ranges, and that the looks spend no more than alpha."""
        require(1 <= self.blocks <= 1000, f"design.blocks={self.blocks}: allowed are 1 to 1000")
        require(
            self.runs_per_block in (1, 2),
            f"design.runs_per_block={self.runs_per_block}: allowed are 1 and 2",
        )
        require(
            0 < self.margin_pct <= 50,
            f"design.margin_pct={self.margin_pct}: allowed are above 0, at most 50 (percent)",
        )
        require(0 < self.alpha <= 0.5, f"design.alpha={self.alpha}: allowed are above 0, to 0.5")
        require(
            self.timeout_s > 0, f"design.timeout_s={self.timeout_s}: allowed are above 0 (seconds)"
        )
        if self.looks:
            self._check_looks()

    def _check_looks(self) -> None:
        at, spent = [look.blocks for look in self.looks], sum(look.alpha for look in self.looks)
        require(
            at[0] >= 1 and at == sorted(set(at)),
            f"design.looks: blocks {at} must be above 0 and grow from look to look",
        )
        require(
            self.blocks in at,
            f"design.blocks={self.blocks}: the last block must be a look; "
            f"design.looks are at {', '.join(map(str, at))}",
        )
        require(
            all(look.alpha > 0 for look in self.looks) and spent <= self.alpha * (1 + 1e-9),
            f"design.looks: every look spends some alpha, all together ({spent:g}) at most "
            f"design.alpha={self.alpha:g}",
        )
        for look in self.looks:
            floor = 2 / math.comb(2 * self.runs_per_block, self.runs_per_block) ** look.blocks
            require(
                floor <= look.alpha,
                f"design.looks: {look.blocks} blocks of {self.runs_per_block} cannot reach "
                f"p = {look.alpha:g} (smallest: {floor:.2g}); look later",
            )


# --------------------------------------------------------------------------- the whole


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
            self.model.shape is not None or self.model.path is not None,
            f"model={self.model.name}: set model.path=DIR to a directory that mlx_lm can load",
        )
        require(
            self.engine.name == "paged" or self.workload.kind is not WorkloadKind.kernel,
            f"engine.name={self.engine.name}: it serves requests, and workload="
            f"{self.workload.name} times labkit's paged attention; set workload=chat",
        )
        require(0 <= self.seed < 1 << 32, f"seed={self.seed}: allowed are 0 to 4294967295")
        require(
            self.design.isolation is Isolation.process or self.workload.kind is WorkloadKind.kernel,
            f"design.isolation=in_process: alternates kernel dispatches, and "
            f"workload={self.workload.name} serves requests; set design.isolation=process",
        )


def to_plain(value: Any) -> Any:
    """Turn a config into JSON types: dataclasses to dicts, enums to their values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def from_plain(cls: type[T], data: Any) -> T:
    """Build ``cls`` from what ``to_plain`` gave; every rule is checked again.

    Raises
    ------
    ConfigError
        An unknown key, a wrong choice or a broken rule.
    """
    return cast(T, _build(cls, data, ""))


def _build(kind: Any, data: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, UnionType):
        if data is None:
            return None
        (kind,) = (item for item in typing.get_args(kind) if item is not NoneType)
        return _build(kind, data, where)
    if origin is list:
        (item_kind,) = typing.get_args(kind)
        return [_build(item_kind, item, f"{where}[{i}]") for i, item in enumerate(data)]
    if origin is dict:
        item_kind = typing.get_args(kind)[1]
        return {key: _build(item_kind, item, f"{where}.{key}") for key, item in data.items()}
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(data)
        except ValueError:
            choices = ", ".join(str(item.value) for item in kind)
            raise ConfigError(f"{where}={data}: allowed are {choices}") from None
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        require(isinstance(data, dict), f"{where}: must be a map, not {data!r}")
        hints = typing.get_type_hints(kind)
        prefix = f"{where}." if where else ""
        unknown = [key for key in data if key not in hints]
        require(not unknown, f"{prefix}{''.join(unknown[:1])}: no such option")
        return kind(
            **{key: _build(hints[key], item, f"{prefix}{key}") for key, item in data.items()}
        )
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    require(
        kind is Any or isinstance(data, kind),
        f"{where}={data!r}: must be of type {getattr(kind, '__name__', kind)}",
    )
    return data
