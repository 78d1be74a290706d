"""The engine's choices, one enum or tuple of words each; each lists only what exists."""

from __future__ import annotations

from enum import Enum

# Named by one of these words, or by ``package.module:Class`` for a user's own.
ENGINES = ("naive", "padded", "contiguous", "paged", "mlx_lm")
ATTENTION_BACKENDS = ("fused", "gather", "sdpa", "reference")
RESOLVERS = ("binary_search", "seq_map", "identity", "padded_grid", "work_plan")


class Blas(Enum):
    """Which BLAS MLX's CPU build multiplies with (Linux)."""

    openblas = "openblas"
    stock = "stock"


class DType(Enum):
    """What weights and activations are computed in.

    model: as the model is stored, where MLX computes on Metal; float32 on a CPU, which has no
    arithmetic in less.
    """

    model = "model"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


class Precision(Enum):
    """A type of floating-point numbers."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


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


class WiredCollector(Enum):
    """The state of macOS's wired collector that an arm demands of the machine."""

    any = "any"
    enabled = "enabled"
    disabled = "disabled"
