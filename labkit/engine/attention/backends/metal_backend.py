"""The fused backend of devices ``metal``, ``emulated`` and ``cuda``: it launches the Metal kernels.

A launch is a node of MLX's lazy graph. The stamps and counters that a kernel writes are a second
output of the node. They are evaluated with the step and read by ``report``.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from labkit.engine.attention import input_validation, kernel_dispatch
from labkit.engine.attention.attention_metadata import AttentionLayer, AttentionMetadata
from labkit.engine.attention.backends.mlx_backend_base import MlxBackend, MlxPrepared
from labkit.engine.attention.kernel_dispatch import Dispatch, KernelSwitches
from labkit.engine.attention.launch_evidence import Launch, Reports, report_launches
from labkit.kernel_constants import RESOLVER_IDS
from labkit.metal.gpu_properties import GpuProperties, gpu_properties
from labkit.metal.kernel_call import Executor, KernelCall, executor_for
from labkit.metal.kernels import header, source

BLOCK_SIZES = (8, 16, 32)
MAX_HEAD_DIM = 256
THREADS = {"decode": 256, "tiled": 128}
_INPUTS = (
    *("q", "k_pool", "v_pool", "sinks", "nonce"),
    *("block_tables", "seq_lens", "cu_seqlens_q", "lookup"),
    *("scale", "softcap", "window", "partitions"),
)


class MetalBackend(MlxBackend):
    """Paged attention by the Metal kernels, on a Mac, an NVIDIA GPU or ``emulated``.

    ``executor`` runs the kernels (None: the executor of device ``name``) on a GPU with
    ``properties`` (None: those of the device). Raises ``ValueError`` if the device is not
    available. The message names what is missing.
    """

    def __init__(
        self,
        switches: KernelSwitches,
        name: str,
        executor: Executor | None = None,
        properties: GpuProperties | None = None,
    ) -> None:
        super().__init__(switches.resolver)
        self.name = self.device = name
        self._switches = switches
        self._executor = executor or executor_for(name)
        properties = properties or gpu_properties(name, self._executor)
        self._limits = kernel_dispatch.gpu_limits(properties.cores)

    @property
    def is_lazy(self) -> bool:
        """False for the emulator, which runs a kernel before it returns."""
        return self.name != "emulated"

    def _check_supported(self, layer: AttentionLayer) -> None:
        input_validation.check_fused_layer(layer, self.name, MAX_HEAD_DIM)
        if layer.block_size not in BLOCK_SIZES:
            sizes = ", ".join(map(str, BLOCK_SIZES))
            raise ValueError(
                f"block size {layer.block_size}: must be one of {sizes} on device {self.name}"
            )

    def new_prepared(self) -> _MetalPrepared:
        return _MetalPrepared()

    def forward(
        self, layer: int, q: Any, k: Any, v: Any, metadata: AttentionMetadata, out: Any = None
    ) -> Any:
        bound = self._layers[layer] or self.bound_layer(layer)
        params: _LaunchParams = metadata.prepared.by_kind.get(bound.kind) or self.prepare(
            metadata, bound
        )
        fits = q.shape == params.q_shape
        if k is not None and v is None:
            fits = fits and k.shape == params.k_shape
        elif k is not None:
            fits = fits and k.shape == v.shape == params.k_shape and k.dtype == v.dtype
        if not fits:
            input_validation.check_operands(bound, metadata.total_q, q, k, v, out)
        if k is not None:
            self.write(layer, k, v, metadata)
        nonce = secrets.randbits(32)
        nonce_array = mx.array(nonce, mx.uint32)
        sinks = params.no_sinks if bound.sinks is None else bound.sinks
        arrays = (
            q.astype(params.dtype),
            self.keys[layer],
            self.values[layer],
            sinks,
            nonce_array,
            *params.inputs,
        )
        inputs = tuple(zip(_INPUTS, arrays, strict=False))  # tiled: without partitions
        result, rows = self._executor(params.main.with_inputs(inputs))
        reduce_rows = None
        if params.reduce is not None:
            partials = (
                ("partials", result),
                ("sinks", sinks),
                params.partitions,
                ("nonce", nonce_array),
            )
            result, reduce_rows = self._executor(params.reduce.with_inputs(partials))
        metadata.launches.append(Launch(bound, params.dispatch, nonce, rows, reduce_rows))
        if bound.latent:
            result = result[:, :, : bound.value_dim]
        return result.astype(q.dtype)

    def pending(self, metadata: AttentionMetadata) -> list[Any]:
        rows = [array for one in metadata.launches for array in (one.rows, one.reduce_rows)]
        return [*super().pending(metadata), *(array for array in rows if array is not None)]

    def _choose_kernel(self, metadata: AttentionMetadata, layer: AttentionLayer) -> Dispatch:
        return kernel_dispatch.choose_kernel(metadata, layer, self._switches, self._limits)

    def prepare(self, metadata: AttentionMetadata, layer: AttentionLayer) -> _LaunchParams:
        """Return the parameters that the launches of one kind of layer share in this step."""
        if not metadata.total_q:
            raise ValueError(
                f"device {self.name}: the batch has no query tokens, so there is nothing to launch"
            )
        dispatch = self._choose_kernel(metadata, layer)
        prepared: _MetalPrepared = metadata.prepared
        if not prepared.batch:
            arrays = (metadata.block_tables, metadata.seq_lens, metadata.cu_seqlens_q)
            prepared.batch = tuple(mx.array(array) for array in arrays)
        inputs = (
            *prepared.batch,
            self._lookup(metadata, dispatch),
            mx.array(layer.scale, mx.float32),
            mx.array(layer.softcap or 0.0, mx.float32),
            mx.array(layer.window or 0, mx.int32),
            *((mx.array(dispatch.partitions, mx.int32),) if dispatch.kernel == "decode" else ()),
        )
        split = dispatch.partitions > 1
        params = _LaunchParams(
            dispatch=dispatch,
            q_shape=(metadata.total_q, layer.num_q_heads, layer.head_dim),
            k_shape=(metadata.total_q, layer.num_kv_heads, layer.head_dim),
            dtype=getattr(mx, layer.dtype),
            inputs=inputs,
            partitions=("partitions", mx.array(dispatch.partitions, mx.int32)),
            no_sinks=mx.zeros(1, mx.float32),
            main=main_kernel(metadata, layer, dispatch, self._switches.window_skip),
            reduce=reduce_kernel(metadata, layer) if split else None,
        )
        prepared.by_kind[layer.kind] = params
        return params

    def _lookup(self, metadata: AttentionMetadata, dispatch: Dispatch) -> Any:
        """Return the resolver's maps on the device, and log how long their conversion took."""
        start = time.perf_counter()
        lookup = metadata.resolver.metal_operand(metadata.lookup, dispatch.kernel == "tiled")
        if lookup is None:
            return mx.zeros(1, mx.int32)
        converted = mx.array(lookup)
        metadata.conversions_us.append((time.perf_counter() - start) * 1e6)
        return converted

    def report(self, metadata: AttentionMetadata) -> Reports:
        return report_launches(metadata.drain_launches(), metadata, self.name)


@dataclass(frozen=True, slots=True)
class _LaunchParams:
    """The launch parameters of one kind of layer in a step.

    ``inputs`` are the arrays of ``_INPUTS`` from ``block_tables`` on.
    """

    dispatch: Dispatch
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    dtype: mx.Dtype
    inputs: tuple[mx.array, ...]
    partitions: tuple[str, mx.array]
    no_sinks: mx.array
    main: KernelCall
    reduce: KernelCall | None


@dataclass(slots=True)
class _MetalPrepared(MlxPrepared):
    """A step on the device: its batch, and the ``_LaunchParams`` by kind of layer."""

    batch: tuple[mx.array, ...] = ()  # block_tables, seq_lens, cu_seqlens_q


def main_kernel(
    metadata: AttentionMetadata, layer: AttentionLayer, dispatch: Dispatch, window_skip: bool
) -> KernelCall:
    """Return the call of the decode or tiled kernel for a batch and a layer, without inputs."""
    split = dispatch.partitions > 1
    dtype: mx.Dtype = getattr(mx, layer.dtype)
    template: dict[str, Any] = {
        "T": dtype,
        "HEAD_DIM": layer.head_dim,
        "BLOCK_SIZE": layer.block_size,
        "RESOLVER": RESOLVER_IDS[metadata.resolver.variant],
        "WINDOW": layer.window is not None,
        "WINDOW_SKIP": window_skip,
        "SOFTCAP": layer.softcap is not None,
        "SINKS": layer.sinks is not None,
    }
    shape: tuple[int, ...] = (metadata.total_q, layer.num_q_heads, layer.head_dim)
    if split:
        shape, dtype = (*shape[:2], dispatch.partitions, layer.head_dim + 2), mx.float32
    if dispatch.kernel == "decode":
        template |= {"OUT": dtype, "HEADS": dispatch.sharing_heads, "SPLIT": split}
    outputs = ("out", shape, dtype), _rows(dispatch.groups)
    threads = THREADS[dispatch.kernel]
    return _kernel(dispatch.kernel, outputs, tuple(template.items()), dispatch.groups, threads)


def reduce_kernel(metadata: AttentionMetadata, layer: AttentionLayer) -> KernelCall:
    """Return the call of the reduce kernel, which merges the partitions, without inputs."""
    dtype: mx.Dtype = getattr(mx, layer.dtype)
    groups = (layer.num_q_heads, metadata.total_q, 1)
    template = (
        ("T", dtype),
        ("HEAD_DIM", layer.head_dim),
        ("RESOLVER", RESOLVER_IDS[metadata.resolver.variant]),
        ("SINKS", layer.sinks is not None),
    )
    shape = (metadata.total_q, layer.num_q_heads, layer.head_dim)
    threads = -(-layer.head_dim // 32) * 32
    return _kernel("reduce", (("out", shape, dtype), _rows(groups)), template, groups, threads)


def _kernel(name: str, *rest: Any) -> KernelCall:
    return KernelCall(f"labkit_paged_attention_{name}", header(), source(name), (), *rest)


def _rows(groups: tuple[int, int, int]) -> tuple[str, tuple[int, ...], mx.Dtype]:
    """Return the output for stamps and counters: (name, shape, dtype), a row per threadgroup."""
    x, y, z = groups
    return "report", (x * y * z, 4), mx.uint32
