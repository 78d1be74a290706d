"""An inference engine: every design choice as one switch, and the pairs that make no sense."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from labkit.config.attention import KV, Attention
from labkit.config.budget import Budget
from labkit.config.choices import (
    ENGINES,
    Admission,
    Blas,
    ChunkPolicy,
    Composition,
    DecodeShape,
    Device,
    DType,
    KVLayout,
    Pipeline,
    Precision,
    PrefixAlign,
    PrefixCache,
    Speculation,
)
from labkit.config.drafts import Drafts
from labkit.config.mlx import Mlx
from labkit.config.plain import to_plain
from labkit.config.rules import is_class_path, require, require_strategy
from labkit.config.scheduler import Scheduler


@dataclass
class Engine:
    """An inference engine: its name and every design choice as one switch.

    ``name``: a preset of labkit's own engine (naive, padded, contiguous, paged), mlx_lm (the
    real BatchGenerator) or ``package.module:Class``; a user's own engine is given the rest.
    ``dtype``: what weights and activations are computed in.
    ``threads``: the CPU budget of the arm, in threads; null: all cores. ``memory_limit``:
    bytes that the arm's process may take beyond what it holds when the engine begins to
    load (a cgroup's, else of address space); null: none. ``mlx_cache_limit``: bytes of
    freed buffers that MLX keeps; null: MLX's default.
    """

    name: str = "paged"
    dtype: DType = DType.model
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
    mlx: Mlx = field(default_factory=Mlx)

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
            self._check_dtype()
            self._check_kv_dtype()
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

    def _check_dtype(self) -> None:
        """Refuse half precision where the model's forward is NumPy's."""
        attention = self.attention
        on_numpy = attention.device is Device.cpu and attention.backend in ("fused", "reference")
        require(
            not on_numpy or self.dtype in (DType.model, DType.float32),
            f"engine.dtype={self.dtype.value}: engine.attention.backend={attention.backend} on "
            "engine.attention.device=cpu computes in float32; set backend=gather or another "
            "device, or leave engine.dtype=model",
        )

    def _check_kv_dtype(self) -> None:
        """Refuse half precision wherever it is not converted as it is read."""
        where, attention = f"engine.kv.dtype={self.kv.dtype.value}", self.attention
        if self.kv.dtype is Precision.float32:
            return
        require(
            self.kv.layout is KVLayout.paged,
            f"{where}: engine.kv.layout={self.kv.layout.value} holds float32; set engine=paged",
        )
        require(
            attention.backend == "fused" and attention.device is Device.cpu,
            f"{where}: engine.attention.backend={attention.backend} on "
            f"engine.attention.device={attention.device.value} reads pools of the type that it "
            "computes in; set fused and cpu, or leave float32",
        )

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
    "dtype",
    "blas",
    "threads",
    "memory_limit",
    "mlx_cache_limit",
    "scheduler.max_num_seqs",
    "scheduler.chunk",
    "budget.machine",
    "budget.wired_collector",
    *(f"mlx.{item.name}" for item in dataclasses.fields(Mlx)),
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
