"""The engine's options, one per design choice, and the combinations that are refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from labkit.config.engine.attention import Attention, Device
from labkit.config.engine.kv_cache import KV, KVDType, KVLayout
from labkit.config.engine.memory_budget import Budget, BudgetPolicy
from labkit.config.engine.mlx_variables import Mlx
from labkit.config.engine.openai_server import OpenAIServer
from labkit.config.engine.scheduler import Admission, ChunkPolicy, Composition, Scheduler
from labkit.config.engine.speculation import SPECULATION, Drafts, Speculation
from labkit.config.option import Group, ReadBy, is_class_path, option, override_text, require

# Presets of labkit's own engine, mlx_lm, and any OpenAI-compatible server.
ENGINES = ("naive", "padded", "contiguous", "paged", "mlx_lm", "openai")
EVICTIONS = ("lru", "lfu")
EXTERNAL_ENGINES = ("mlx_lm", "openai")  # engines that are not labkit's own
GPU_BLOCK_SIZE = 32  # the largest of the Metal and CUDA kernels, and of their emulator


class Blas(Enum):
    """BLAS library of MLX's CPU build (Linux). stock: the reference BLAS that MLX's wheel links."""

    openblas = "openblas"
    stock = "stock"


class DType(Enum):
    """Precision of the computation.

    model: the model's own on a GPU; float32 on a CPU, which has no half-precision arithmetic.
    """

    model = "model"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


class Weights(Enum):
    """Storage of the weight matrices of linear layers and embeddings.

    model: as the checkpoint stores them (quantised or in half precision) if labkit's own CPU
    kernels do the matrix products; otherwise quantised matrices stay quantised, and the others have
    the precision of the computation. float32: all are converted when the model is loaded.
    """

    model = "model"
    float32 = "float32"


class Activations(Enum):
    """Precision of the activations that labkit's own CPU kernels multiply by quantised weights.

    float32: the weights are dequantised in registers. int8: the activations are quantised, row by
    row and group by group, and multiplied by weights of 4 or 8 bits as integers, which is faster
    and less precise. Weights of other formats are multiplied in float32.
    """

    float32 = "float32"
    int8 = "int8"


class DecodeShape(Enum):
    """Batch size of a decode-only step.

    exact: the number of its tokens. bucketed: padded to the next power of two. fixed: padded to
    the largest possible decode batch. captured: padded to the nearest of engine.decode_sizes, as
    vLLM and mini-sglang pad to the sizes for which they captured a graph; a larger step is not
    padded.
    """

    exact = "exact"
    bucketed = "bucketed"
    fixed = "fixed"
    captured = "captured"


class PrefixCache(Enum):
    """Data structure of the prefix cache, which finds KV blocks that a new request can reuse."""

    none = "none"
    hash = "hash"
    radix = "radix"


class PrefixAlign(Enum):
    """Where the reused part of a cached prefix may end.

    block: at the end of any KV block. chunk: only at the end of a prefill chunk. A prompt is then
    split into the same chunks with and without a cache, if no option but engine.scheduler.chunk
    limits the chunks.
    """

    block = "block"
    chunk = "chunk"


class Pipeline(Enum):
    """When the host processes a step's results.

    sync: right after the step. overlap: while the next step runs.
    """

    sync = "sync"
    overlap = "overlap"


class Forward(Enum):
    """Forward passes of a step.

    batched: one for all requests. per_request: one for each request, so that no two requests share
    a read of the weights.
    """

    batched = "batched"
    per_request = "per_request"


@dataclass
class TensorParallel(Group, place="engine.parallel"):
    """Tensor parallelism, which splits every layer across processes (ranks) of one host."""

    size: int = option(
        1,
        "Tensor-parallel size: ranks (processes) that share heads, feed-forward columns and CPU "
        "threads equally (docs/parallel.md).",
        ge=1,
        le=64,
        unit="ranks",
    )

    @property
    def single_process(self) -> bool:
        return self.size == 1


@dataclass
class Engine(Group, place="engine"):
    """The inference engine: a preset, and one option for each design choice."""

    name: str = option(
        "paged",
        "Engine: a preset of labkit's own (naive, padded, contiguous, paged), mlx_lm's "
        "BatchGenerator, an OpenAI-compatible server (openai: engine.server), or a class of your "
        "own, which receives all options.",
        choices=ENGINES,
        class_path=True,
        mlx_lm=True,
        openai=True,
    )
    dtype: DType = option(DType.model, mlx_lm=True)
    weights: Weights = option(Weights.model, mlx_lm=True)
    activations: Activations = option(Activations.float32)
    blas: Blas = option(Blas.openblas, mlx_lm=True, openai=True)
    threads: int | None = option(
        None,
        "CPU threads of the arm.",
        ge=1,
        le=1024,
        unit="threads",
        null_means="all cores",
        mlx_lm=True,
        openai=True,
    )
    memory_limit: int | None = option(
        None,
        "Memory that the arm's process may allocate, counted from the start of engine loading. It "
        "is enforced by a cgroup, or else by a limit on the address space (Linux only).",
        ge=1 << 20,
        unit="bytes",
        null_means="no limit",
        mlx_lm=True,
    )
    mlx_cache_limit: int | None = option(
        None,
        "Upper limit of MLX's cache of freed buffers.",
        ge=0,
        unit="bytes",
        null_means="MLX's default",
        mlx_lm=True,
    )
    decode_shape: DecodeShape = option(DecodeShape.exact)
    decode_sizes: list[int] = option(
        factory=list,
        meaning="Decode batch sizes in ascending order. A single one caps the padded width.",
        read_by=ReadBy("engine.decode_shape", (DecodeShape.captured,)),
    )
    prefix_cache: PrefixCache = option(PrefixCache.none)
    prefix_eviction: str = option(
        "lru",
        "Which cached prefixes are evicted first: the least recently used, the least frequently "
        "used, or as a class of your own says (docs/extending.md).",
        choices=EVICTIONS,
        class_path=True,
        read_by=ReadBy("engine.prefix_cache", (PrefixCache.hash, PrefixCache.radix)),
    )
    prefix_align: PrefixAlign = option(PrefixAlign.block)
    speculation: Speculation = option(Speculation.none)
    pipeline: Pipeline = option(Pipeline.sync)
    forward: Forward = option(Forward.batched)
    graph_replay: bool = option(
        True,
        "Replay decode steps from a captured graph in one call, where labkit's own CPU kernels run "
        "the whole model; otherwise Python calls each layer.",
    )
    batch_invariant: bool = option(
        False,
        "Require logits independent of batch composition: checked when the model is loaded; "
        "options that break it are refused.",
    )
    kv: KV = field(default_factory=KV)
    attention: Attention = field(default_factory=Attention)
    scheduler: Scheduler = field(default_factory=Scheduler)
    budget: Budget = field(default_factory=Budget)
    drafts: Drafts = field(default_factory=Drafts)
    parallel: TensorParallel = field(default_factory=TensorParallel)
    mlx: Mlx = field(default_factory=Mlx)
    server: OpenAIServer = field(default_factory=OpenAIServer)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.drafts.refuse_unread(SPECULATION, self.speculation)
        self.server.refuse_unread("engine.name", self.name)
        sizes = self.decode_sizes
        require(
            self.decode_shape is not DecodeShape.captured
            or (bool(sizes) and sizes[0] > 0 and sizes == sorted(set(sizes))),
            f"engine.decode_sizes={sizes}: engine.decode_shape=captured needs sizes of 1 or more "
            "in ascending order, such as [1,2,4,8]",
        )
        self.kv.refuse_unread("engine.prefix_cache", self.prefix_cache.value)
        require(
            self.pipeline is Pipeline.sync or self.speculation is Speculation.none,
            f"engine.pipeline=overlap: engine.speculation={self.speculation.value} drafts from "
            "tokens that the step in flight has not sampled yet; set engine.pipeline=sync or "
            "engine.speculation=none",
        )
        require(
            self.weights is Weights.model or self.dtype in (DType.model, DType.float32),
            f"engine.weights=float32: engine.dtype={self.dtype.value} computes in half precision; "
            "leave engine.weights=model",
        )
        if self.activations is Activations.int8:
            self._check_activations()
        if self.batch_invariant:
            self._check_invariance()
        if self.name in PRESET_LAYOUTS:
            self._check_preset(PRESET_LAYOUTS[self.name])
            self._check_dtype()
            self._check_kv_dtype()
        if self.prefix_align is PrefixAlign.chunk:
            self._check_chunk_alignment()
        require(
            self.kv.state_snapshots is None or self.prefix_cache is not PrefixCache.none,
            f"engine.kv.state_snapshots={self.kv.state_snapshots}: engine.prefix_cache=none reuses "
            "no prefix; set engine.prefix_cache to hash or radix, or leave it null",
        )
        if self.kv.window_pools:
            self._check_window_pools()
        if self.forward is Forward.per_request:
            self._check_forward()
        if not self.parallel.single_process:
            self._check_parallel()
        if self.name in EXTERNAL_ENGINES:
            self._check_external()
        else:
            self.scheduler.check_step_tokens()
        if self.name == "openai":
            self.server.check_startable()
            if not self.server.takes_blas:
                self.require_default("blas", "labkit cannot choose the BLAS of this server")

    @property
    def server_start_s(self) -> float:
        """The seconds that the server takes to start (an estimate); 0 if labkit starts none."""
        is_started = self.name == "openai" and self.server.url is None
        return self.server.server_preset.start_s if is_started else 0.0

    @property
    def num_lookahead_tokens(self) -> int:
        """The largest number of draft tokens of a request and step."""
        speculates = self.speculation is not Speculation.none
        return self.drafts.num_draft_tokens if speculates else 0

    @property
    def max_decode_rows(self) -> int:
        """The largest number of rows of a step of pure decodes, including draft tokens."""
        rows = self.scheduler.max_num_seqs * (1 + self.num_lookahead_tokens)
        return min(rows, self.scheduler.max_num_batched_tokens)

    def _check_preset(self, layout: KVLayout) -> None:
        require(
            self.kv.layout is layout,
            f"engine.kv.layout={self.kv.layout.value}: engine.name={self.name} has "
            f"engine.kv.layout={layout.value}; set engine=naive, padded, contiguous or paged "
            "for another layout",
        )
        backend, paged = self.attention.backend, layout is KVLayout.paged
        require(
            (backend == "sdpa") is not paged,
            f"engine.attention.backend={backend}: "
            + (
                "it needs contiguous arrays, and engine.kv.layout=paged has blocks; set gather or "
                "fused"
                if paged
                else f"it needs blocks, and engine.kv.layout={layout.value} has none; set sdpa"
            ),
        )
        size, device = self.kv.block_size, self.attention.device
        require(
            size <= GPU_BLOCK_SIZE or device is Device.cpu,
            f"engine.kv.block_size={size}: the kernels of engine.attention.device={device.value} "
            f"read blocks of up to {GPU_BLOCK_SIZE} tokens; set {GPU_BLOCK_SIZE} or less",
        )
        admission, other = self.scheduler.admission, {"naive": "padded", "padded": "naive"}
        runs = Admission.static if self.name == "naive" else Admission.continuous
        require(
            admission is runs or self.name not in other,
            f"engine.scheduler.admission={admission.value}: engine.name={self.name} runs "
            f"{runs.value} batches; set engine={other.get(self.name)}",
        )
        require(
            layout is not KVLayout.padded or self.scheduler.composition is Composition.split,
            "engine.scheduler.composition=mixed: engine.kv.layout=padded would pad every decoding "
            "request to the longest prompt chunk of its step; set split",
        )
        if not paged:
            self._check_blockless(layout)

    def _check_window_pools(self) -> None:
        where = "engine.kv.window_pools=true"
        require(
            self.prefix_cache is PrefixCache.none,
            f"engine.prefix_cache={self.prefix_cache.value}: {where} frees blocks behind a window, "
            "and a prefix is reused with all its blocks; leave engine.prefix_cache=none",
        )
        require(
            self.speculation is not Speculation.draft,
            f"engine.speculation=draft: {where} has no pool for the layers of a draft model; set "
            "engine.speculation=ngram or none",
        )

    def _check_forward(self) -> None:
        where = "engine.forward=per_request"
        require(
            self.name not in PRESET_LAYOUTS or self.kv.layout is not KVLayout.padded,
            f"{where}: engine.kv.layout=padded has all requests in one array; set "
            "engine=contiguous or engine=paged",
        )
        self._need_defaults(
            where,
            speculation="drafts are verified in one forward",
            decode_shape="a single request is not padded",
        )
        require(
            self.parallel.single_process,
            f"{where}: engine.parallel.size={self.parallel.size}: ranks run one forward for all "
            "requests; set 1",
        )

    def _check_dtype(self) -> None:
        attention = self.attention
        on_numpy = attention.device is Device.cpu and attention.backend in ("fused", "reference")
        require(
            not on_numpy or self.dtype in (DType.model, DType.float32),
            f"engine.dtype={self.dtype.value}: engine.attention.backend={attention.backend} on "
            "engine.attention.device=cpu computes in float32; set backend=gather or another "
            "device, or leave engine.dtype=model",
        )

    def _check_activations(self) -> None:
        where, device = "engine.activations=int8", self.attention.device
        require(
            self.weights is Weights.model,
            f"{where}: engine.weights={self.weights.value} dequantises the weights, and only "
            "quantised weights are multiplied in int8; set engine.weights=model",
        )
        require(
            self.dtype in (DType.model, DType.float32),
            f"{where}: engine.dtype={self.dtype.value} computes on MLX, which multiplies in "
            "floating point; leave engine.dtype=model",
        )
        require(
            self.name not in PRESET_LAYOUTS or device is Device.cpu,
            f"{where}: engine.attention.device={device.value} runs the model on MLX, which "
            "multiplies in floating point; set engine.attention.device=cpu",
        )

    def _check_kv_dtype(self) -> None:
        where, attention = f"engine.kv.dtype={self.kv.dtype.value}", self.attention
        if self.kv.dtype is KVDType.float32:
            return
        if self.kv.dtype.quantised and self.kv.layout is KVLayout.contiguous:
            return
        require(
            self.kv.layout is KVLayout.paged,
            f"{where}: engine.kv.layout={self.kv.layout.value} holds float32; set engine=paged",
        )
        require(
            attention.backend == "fused" and attention.device is Device.cpu,
            f"{where}: engine.attention.backend={attention.backend} on "
            f"engine.attention.device={attention.device.value} reads float32 only; set "
            "engine.attention.backend=fused and engine.attention.device=cpu, or leave float32",
        )

    def _check_blockless(self, layout: KVLayout) -> None:
        for group, name, reason in (
            (self, "prefix_cache", "has no KV blocks to share"),
            (self, "decode_shape", "has no null block for padding rows"),
            (self, "speculation", "has no KV blocks to verify drafts in"),
            (self.scheduler, "reservation", "reserves a request's memory in full"),
            (self, "pipeline", "reallocates the KV cache between steps"),
        ):
            group.require_default(name, f"engine.kv.layout={layout.value} {reason}")

    def _check_invariance(self) -> None:
        where, attention = "engine.batch_invariant=true", self.attention
        require(
            attention.split_kv == "off",
            f"{where}: engine.attention.split_kv={attention.split_kv} sums over the keys in "
            "another order in decode-only steps; set off",
        )
        require(
            attention.backend in ("fused", "reference") or self.blas is Blas.stock,
            f"{where}: engine.attention.backend={attention.backend} multiplies with OpenBLAS, "
            "whose results depend on the batch size; set engine.blas=stock or "
            "engine.attention.backend=fused",
        )

    def _check_chunk_alignment(self) -> None:
        require(
            self.prefix_cache is not PrefixCache.none,
            "engine.prefix_align=chunk: engine.prefix_cache=none caches no prefix; set "
            "engine.prefix_cache to hash or radix, or leave engine.prefix_align=block",
        )
        chunk, size = self.scheduler.chunk, self.kv.block_size
        require(
            chunk is not None and chunk % size == 0,
            f"engine.prefix_align=chunk: set engine.scheduler.chunk (now {override_text(chunk)}) "
            f"to a multiple of engine.kv.block_size={size}",
        )
        require(
            self.scheduler.chunk_policy is ChunkPolicy.static,
            "engine.scheduler.chunk_policy=shrinking: engine.prefix_align=chunk needs chunks of a "
            "fixed size; set static",
        )

    def _check_parallel(self) -> None:
        where, attention = f"engine.parallel.size={self.parallel.size}", self.attention
        require(
            self.name not in PRESET_LAYOUTS or self.kv.layout is KVLayout.paged,
            f"{where}: engine.name={self.name} runs in a single process; set engine=paged",
        )
        require(
            attention.device is Device.cpu and attention.backend in ("fused", "gather"),
            f"{where}: engine.attention.backend={attention.backend} on engine.attention.device="
            f"{attention.device.value} has no tensor parallelism; set engine.attention.backend to "
            "fused or gather and engine.attention.device=cpu",
        )
        require(
            self.threads is None or self.threads >= self.parallel.size,
            f"{where}: engine.threads={self.threads} is less than one thread per rank; set "
            f"engine.threads={self.parallel.size} or more",
        )
        require(
            self.budget.policy is BudgetPolicy.fixed,
            f"{where}: engine.budget.policy={self.budget.policy.value} sizes the pool by the "
            "memory that each process finds free, and all ranks need the same number of KV "
            "blocks; set fixed",
        )
        require(
            self.memory_limit is None,
            f"{where}: engine.memory_limit={self.memory_limit} limits one process; leave it null",
        )
        self._need_defaults(
            where,
            speculation="not supported with several ranks",
            pipeline="ranks synchronise between steps",
            decode_shape="ranks do not pad steps",
        )

    def _need_defaults(self, where: str, **reasons: str) -> None:
        """Refuse choices other than the defaults of some options, each for its reason."""
        for name, reason in reasons.items():
            value, default = (override_text(getattr(one, name)) for one in (self, Engine))
            require(value == default, f"{where}: engine.{name}={value}: {reason}; set {default}")

    def _check_external(self) -> None:
        """Check that every option which only labkit's own engine has is at its default."""
        for group in self.groups():
            for name, spec, _ in group.options():
                if not getattr(spec, self.name) and group is not self.server:
                    group.require_default(name, f"engine={self.name} does not have this option")


PRESET_LAYOUTS = {
    "naive": KVLayout.padded,
    "padded": KVLayout.padded,
    "contiguous": KVLayout.contiguous,
    "paged": KVLayout.paged,
}


def user_classes(engine: Engine) -> dict[str, str]:
    """Return the path ``package.module:Class`` of every user class, by option key."""
    return {
        group.key(name): value
        for group in engine.groups()
        for name, spec, value in group.options()
        if spec.class_path and is_class_path(value)
    }
