"""What the layers of a model call, and what backends over paged pools have in common.

Once per engine: ``allocate`` (or ``adopt``), then ``bind`` for each layer. Once per step:
``plan``, then ``forward`` for each layer, then ``report``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from labkit.engine.attention import attention_metadata as plans
from labkit.engine.attention import input_validation, launch_report, resolvers
from labkit.engine.attention.attention_metadata import AttentionLayer, AttentionMetadata
from labkit.engine.attention.attention_protocol import Arrays
from labkit.engine.attention.launch_report import LaunchReport, Reports

if TYPE_CHECKING:
    from labkit.engine.kv_layout.kv_shape import KVShape

Array = NDArray[Any]


class PagedBackend:
    """Paged attention over pools of its own; an heir says how a layer attends.

    As it is, for NumPy pools of any floating type: keys and values are scattered with NumPy,
    and an heir has ``attend``. Heirs for other arrays also have ``write`` and ``_zeros``.
    """

    name = "paged"
    arrays: Arrays = "numpy"
    device = "cpu"
    dtypes: tuple[str, ...] = ()

    def __init__(self, resolver: str = "binary_search") -> None:
        self._resolver = resolvers.create(resolver)
        self._layers: list[AttentionLayer | None] = []
        self._kinds: list[AttentionLayer] = []
        self._last: AttentionMetadata | None = None
        self.keys: list[Any] = []
        self.values: list[Any] = []

    def allocate(
        self,
        shapes: Sequence[KVShape],
        num_blocks: int,
        block_size: int,
        dtype: str = "float32",
    ) -> None:
        """Make a key pool and a value pool of zeros for each layer.

        They are [num_blocks, block_size, num_kv_heads, head_dim] of ``float32``, ``float16``
        or ``bfloat16``. ValueError with one line where the backend cannot hold that.
        """
        input_validation.check_dtype(dtype, self.device, self.dtypes)
        pools = [
            [
                self._zeros((num_blocks, block_size, shape.num_kv_heads, size), dtype)
                for size in (shape.key_dim, shape.value_dim)
            ]
            for shape in shapes
        ]
        self.adopt([k_pool for k_pool, _ in pools], [v_pool for _, v_pool in pools])

    def _zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        # Reserved at once, and touched block by block, as blocks are written.
        return np.zeros(shape, dtype)

    def adopt(self, keys: Sequence[Any], values: Sequence[Any]) -> None:
        """Take over pools that exist, and what they hold, one of each per layer."""
        input_validation.check_pools(keys, values)
        for pool in keys:
            input_validation.check_dtype(self._types(pool)[0], self.device, self.dtypes)
        self.keys, self.values = list(keys), list(values)
        self._layers = [None] * len(self.keys)
        self._kinds = []
        self._last = None

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
        """Say what does not change of a layer; see ``Attention.bind``."""
        pool = self.keys[layer]
        input_validation.check_layer(
            pool, heads, scale=scale, window=window, softcap=softcap, sinks=sinks
        )
        _, block_size, num_kv_heads, head_dim = pool.shape
        dtype, query_dtype = self._types(pool)
        bound = AttentionLayer(
            index=layer,
            kind=0,
            num_q_heads=heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            dtype=dtype,
            query_dtype=query_dtype,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=self._sinks(sinks),
        )
        self._refuse(bound)
        alike = dataclasses.replace(bound, index=0, sinks=sinks is not None)
        if alike not in self._kinds:
            self._kinds.append(alike)
        self._layers[layer] = dataclasses.replace(bound, kind=self._kinds.index(alike))

    def _types(self, pool: Any) -> tuple[str, str | None]:
        """Return the type of a pool, and that of the queries, keys and values; None: any."""
        return input_validation.dtype_name(pool), input_validation.dtype_name(pool)

    def _sinks(self, sinks: Any) -> Any:
        return None if sinks is None else np.asarray(sinks)

    def _refuse(self, layer: AttentionLayer) -> None:
        """Raise ValueError where the backend's kernels do not take a layer."""

    def plan(
        self,
        *,
        block_tables: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        cu_seqlens_q: NDArray[np.int32],
        total_q: int | None = None,
    ) -> AttentionMetadata:
        """Check a step's batch and return the metadata that its layers share.

        ``total_q``: packed query tokens; None: ``cu_seqlens_q[-1]``. Arrays that nobody can write
        to are known again: a step of the same sequences as the last costs a part of what the
        first does.

        Raises
        ------
        ValueError
            One line that says what is wrong.
        """
        last, metadata = self._last, None
        if last is not None and last.lasting is not None:
            cu, tables = last.lasting
            if cu is cu_seqlens_q and tables is block_tables and total_q in (None, last.total_q):
                metadata = last.following(seq_lens, keep=self._keeps(last))
        if metadata is None:
            metadata = self._build(block_tables, seq_lens, cu_seqlens_q, total_q)
        self._last = metadata
        return metadata

    def _keeps(self, last: AttentionMetadata) -> bool:
        """Tell whether what ``last`` has prepared holds for its sequences one token later."""
        return False

    def _build(
        self, block_tables: Any, seq_lens: Any, cu_seqlens_q: Any, total_q: Any
    ) -> AttentionMetadata:
        num_blocks, block_size = self.keys[0].shape[:2]
        return plans.build(
            self._resolver,
            block_tables=block_tables,
            seq_lens=seq_lens,
            cu_seqlens_q=cu_seqlens_q,
            num_blocks=num_blocks,
            block_size=block_size,
            total_q=total_q,
        )

    def bound_layer(self, layer: int) -> AttentionLayer:
        """Return what a layer was bound to."""
        found = self._layers[layer]
        if found is None:
            raise ValueError(f"layer {layer} was not bound")
        return found

    def forward(
        self, layer: int, q: Any, k: Any, v: Any, metadata: AttentionMetadata, out: Any = None
    ) -> Any:
        """Write and attend; see ``Attention.forward``."""
        bound = self.bound_layer(layer)
        input_validation.check_operands(bound, metadata.total_q, q, k, v, out)
        if k is not None:
            self.write(layer, k, v, metadata)
        result, made = self.attend(bound, q, metadata, out)
        metadata.launches.append(made)
        return result

    def write(self, layer: int, k: Any, v: Any, metadata: AttentionMetadata) -> None:
        """Scatter new keys and values into a layer's pools."""
        block, offset = np.divmod(metadata.slot_mapping, metadata.block_size)
        self.keys[layer][block, offset] = k
        self.values[layer][block, offset] = v

    def attend(
        self, layer: AttentionLayer, q: Any, metadata: AttentionMetadata, out: Any
    ) -> tuple[Any, LaunchReport]:
        """Return the output, in ``out`` unless that is None, and the launch's report."""
        raise NotImplementedError

    def report(self, metadata: AttentionMetadata) -> Reports:
        """Add up the launches since the last report; see ``Attention.report``."""
        return launch_report.summed(metadata.taken())

    def pending(self, metadata: AttentionMetadata) -> list[Any]:
        """Return nothing: NumPy is not lazy."""
        return []
