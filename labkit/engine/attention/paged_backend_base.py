"""The base class of attention backends over paged KV pools, on NumPy arrays.

An engine calls ``allocate`` (or ``adopt``) once, and ``bind`` once for each layer. In every step it
calls ``plan``, then ``forward`` for each layer, then ``report``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from labkit.engine.attention import (
    attention_metadata,
    input_validation,
    launch_evidence,
    sequence_resolvers,
)
from labkit.engine.attention.attention_metadata import (
    AttentionLayer,
    AttentionMetadata,
    Int32Array,
    TablesKey,
)
from labkit.engine.attention.attention_protocol import Arrays
from labkit.engine.attention.kv_and_state_shapes import KVShape
from labkit.engine.attention.launch_evidence import LaunchReport, Reports


class PagedBackend:
    """Paged attention over pools that the backend owns. A subclass computes a layer's attention.

    This class writes keys and values to NumPy pools of any floating dtype, so a subclass needs only
    ``attend``. A subclass for other arrays also overrides ``write`` and ``_zeros``.
    """

    name = "paged"
    arrays: Arrays = "numpy"
    device = "cpu"
    dtypes: tuple[str, ...] = ()  # allowed dtypes of the pools; (): any
    # Whether ``plan`` may advance the metadata of the last step instead of building new metadata.
    # An engine sets this. A kernel workload does not, because it measures planning.
    advances_metadata = False

    def __init__(self, resolver: str = "binary_search") -> None:
        self._resolver = sequence_resolvers.create(resolver)
        self._layers: list[AttentionLayer | None] = []
        self._kinds: list[AttentionLayer] = []
        self._last: tuple[TablesKey, AttentionMetadata] | None = None
        self.keys: list[Any] = []
        self.values: list[Any] = []
        self.shapes: tuple[KVShape, ...] = ()

    @property
    def is_lazy(self) -> bool:
        """Whether ``forward`` returns before its result is computed: MLX's own functions do."""
        return self.arrays == "mlx"

    def allocate(
        self, shapes: Sequence[KVShape], num_blocks: int, block_size: int, dtype: str = "float32"
    ) -> None:
        """Create a key pool and a value pool of zeros for each layer.

        A pool is [num_blocks, block_size, num_kv_heads, head_dim] of ``float32``, ``float16`` or
        ``bfloat16``. With ``int8`` or ``int4`` its last axis holds the bytes of a quantised vector.
        The two pools of a latent layer are the same array. Raises ``ValueError`` if the backend
        does not support the dtype or the shapes.
        """
        input_validation.check_dtype(dtype, self.device, self.dtypes)
        pools = [
            [
                self._zeros((num_blocks, block_size, shape.num_kv_heads, size), dtype)
                for size in shape.stored_dims
            ]
            for shape in shapes
        ]
        self.adopt([arrays[0] for arrays in pools], [arrays[-1] for arrays in pools])
        self.shapes = tuple(shapes)

    def _zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        # Only address space is reserved now. Memory is used when blocks are written.
        return np.zeros(shape, dtype)

    def adopt(self, keys: Sequence[Any], values: Sequence[Any]) -> None:
        """Use existing pools with their contents: a key pool and a value pool per layer."""
        input_validation.check_pools(keys, values)
        for pool in keys:
            input_validation.check_dtype(self._pool_dtypes(pool)[0], self.device, self.dtypes)
        self.keys, self.values = list(keys), list(values)
        self.shapes = tuple(
            KVShape(k_pool.shape[2], self._head_dim(k_pool), self._head_dim(v_pool))
            for k_pool, v_pool in zip(keys, values, strict=True)
        )
        self._layers = [None] * len(self.keys)
        self._kinds = []
        self._last = None

    def clear_values(self) -> None:
        """Remove a failed step's NaN where unseen values have an effect, which none have here."""

    def bind(
        self,
        layer: int,
        *,
        scale: float,
        heads: int,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Any = None,
    ) -> None:
        pool, shape = self.keys[layer], self.shapes[layer]
        dtype, query_dtype = self._pool_dtypes(pool)
        bound = AttentionLayer(
            index=layer,
            kind=0,
            num_q_heads=heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.key_dim,
            block_size=pool.shape[1],
            dtype=dtype,
            query_dtype=query_dtype,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=self._convert_sinks(sinks),
            value_dim=shape.value_dim,
            latent=shape.latent,
        )
        input_validation.check_layer(bound)
        self._check_supported(bound)
        kind = dataclasses.replace(bound, index=0, sinks=sinks is not None)
        if kind not in self._kinds:
            self._kinds.append(kind)
        self._layers[layer] = dataclasses.replace(bound, kind=self._kinds.index(kind))

    def _pool_dtypes(self, pool: Any) -> tuple[str, str | None]:
        """Return a pool's dtype, and the dtype of queries and new keys and values (None: any)."""
        return input_validation.dtype_name(pool), input_validation.dtype_name(pool)

    def _head_dim(self, pool: Any) -> int:
        return int(pool.shape[3])

    def _convert_sinks(self, sinks: Any) -> Any:
        return None if sinks is None else np.asarray(sinks)

    def _check_supported(self, layer: AttentionLayer) -> None:
        """Raise ``ValueError`` if the backend's kernels do not support a layer."""

    def plan(
        self,
        *,
        block_tables: Int32Array,
        seq_lens: Int32Array,
        cu_seqlens_q: Int32Array,
        total_q: int | None = None,
    ) -> AttentionMetadata:
        """Check a step's batch and return the metadata that its layers share.

        ``block_tables``, ``seq_lens``, ``cu_seqlens_q``: as in ``AttentionMetadata``. ``total_q``:
        the number of packed query tokens, to check ``cu_seqlens_q[-1]`` (None: no check). Raises
        ``ValueError`` if an array has a wrong dtype, shape or value. The message names it.
        """
        key: TablesKey | None = None
        metadata: AttentionMetadata | None = None
        if self.advances_metadata:
            key = attention_metadata.tables_key(cu_seqlens_q, block_tables)
            last_key, last = self._last or (None, None)
            if last is not None and last_key == key and total_q in (None, last.total_q):
                prepared = last.prepared if self._can_share(last) else self.new_prepared()
                metadata = last.advance(seq_lens, prepared)
        if metadata is None:
            num_blocks, block_size = self.keys[0].shape[:2]
            metadata = attention_metadata.build(
                self._resolver,
                block_tables=block_tables,
                seq_lens=seq_lens,
                cu_seqlens_q=cu_seqlens_q,
                num_blocks=num_blocks,
                block_size=block_size,
                total_q=total_q,
                prepared=self.new_prepared(),
            )
            if key is not None and not metadata.decodes_within(num_blocks):
                key = None
        self._last = None if key is None else (key, metadata)
        return metadata

    def new_prepared(self) -> Any:
        """Return an empty ``AttentionMetadata.prepared`` (None: the backend does not use it)."""
        return None

    def _can_share(self, last: AttentionMetadata) -> bool:
        return False

    def bound_layer(self, layer: int) -> AttentionLayer:
        """Return the bound layer, or raise ``ValueError`` if it was not bound."""
        bound = self._layers[layer]
        if bound is None:
            raise ValueError(f"layer {layer} was not bound: call bind() first")
        return bound

    def forward(
        self, layer: int, q: Any, k: Any, v: Any, metadata: AttentionMetadata, out: Any = None
    ) -> Any:
        bound = self.bound_layer(layer)
        input_validation.check_operands(bound, metadata.total_q, q, k, v, out)
        if k is not None:
            self.write(layer, k, v, metadata)
        result, report = self.attend(bound, q, metadata, out)
        metadata.launches.append(report)
        return result

    def write(self, layer: int, k: Any, v: Any, metadata: AttentionMetadata) -> None:
        """Scatter new keys and values into a layer's pools."""
        block, offset = np.divmod(metadata.slot_mapping, metadata.block_size)
        self.keys[layer][block, offset] = k
        if v is not None:
            self.values[layer][block, offset] = v

    def attend(
        self, layer: AttentionLayer, q: Any, metadata: AttentionMetadata, out: Any
    ) -> tuple[Any, LaunchReport]:
        """Return the output, in ``out`` unless that is None, and the launch's report."""
        raise NotImplementedError

    def report(self, metadata: AttentionMetadata) -> Reports:
        return launch_evidence.merge_reports(metadata.drain_launches())

    def pending(self, metadata: AttentionMetadata) -> list[Any]:
        return []
