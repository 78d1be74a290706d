"""MLX's own ``scaled_dot_product_attention`` for KV layouts with contiguous sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import mlx.core as mx
import numpy as np

from labkit.engine.attention.launch_evidence import LaunchReport, Reports, merge_reports

if TYPE_CHECKING:
    from labkit.engine.attention.attention_metadata import AttentionLayer


@dataclass(frozen=True, slots=True)
class SdpaLayer:
    """The constants of a layer; see ``AttentionLayer``. ``sinks`` is an MLX array or None."""

    index: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: mx.array | None


class SdpaStep(Protocol):
    """One step of a KV layout with contiguous keys and values."""

    launches: list[LaunchReport]

    def write(self, layer: int, k: Any, v: Any) -> None:
        """Store the step's new keys and values, [total_q, num_kv_heads, head_dim]."""

    def attend(self, layer: SdpaLayer, q: Any) -> tuple[mx.array, LaunchReport]:
        """Attend causally. Return the output, [total_q, num_q_heads, value_dim], and the report."""

    def pending(self) -> list[mx.array]:
        """Return the arrays that the step wrote."""


class SdpaAttention:
    """The ``Attention`` of the KV layouts without blocks (padded, contiguous).

    It passes every call on to the layout's ``SdpaStep``, which stores keys and values and calls
    MLX's attention. ``quantised`` says whether keys and values are quantised.
    """

    arrays: Literal["any"] = "any"
    is_lazy = True

    def __init__(self, *, quantised: bool = False) -> None:
        self._layers: dict[int, SdpaLayer] = {}
        self._quantised = quantised

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
        check_softcap(softcap, sinks)
        if self._quantised and (sinks is not None or softcap is not None):
            what = "sinks" if softcap is None else "softcap"
            raise ValueError(
                f"MLX's attention over quantised keys does not support {what}; set "
                "engine.kv.dtype=float32 or engine=paged"
            )
        mlx_sinks = None if sinks is None else mx.array(sinks)
        self._layers[layer] = SdpaLayer(layer, scale, window, softcap, mlx_sinks)

    def forward(self, layer: int, q: Any, k: Any, v: Any, step: SdpaStep, out: Any = None) -> Any:
        if k is not None:
            step.write(layer, k, v)
        result, report = step.attend(self._layers[layer], q)
        lazy = isinstance(q, mx.array)
        step.launches.append(report if lazy else replace(report, evaluations=1))
        if lazy:
            return result.astype(q.dtype)
        mx.eval(result)
        return np.asarray(result)

    def report(self, step: SdpaStep) -> Reports:
        launches, step.launches = step.launches, []
        return merge_reports(launches)

    def pending(self, step: SdpaStep) -> list[Any]:
        """Return keys and values: their writes must be evaluated even if nothing reads them."""
        return step.pending()


def check_softcap(softcap: float | None, sinks: Any) -> None:
    """Raise ``ValueError`` if a layer has both a softcap and sinks, which MLX does not support."""
    if softcap is not None and sinks is not None:
        raise ValueError(
            f"softcap={softcap} with sinks: MLX's attention does not support both; set "
            "engine.attention.backend=fused"
        )


def attend(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    layer: SdpaLayer | AttentionLayer,
    mask: mx.array | str | None,
) -> mx.array:
    """Attend with MLX's function or, with a softcap, by matrix products and a softmax.

    MLX's function has no softcap. Arrays are [rows, heads, tokens, dim]. ``mask`` is as in MLX's
    function: None, ``causal`` or an array of bool.
    """
    if layer.softcap is None:
        return mx.fast.scaled_dot_product_attention(
            q, k, v, scale=layer.scale, mask=mask, sinks=layer.sinks
        )
    rows, num_heads, q_len, _ = q.shape
    grouped = q.reshape(rows, k.shape[1], -1, q_len, q.shape[3]) * layer.scale
    scores = grouped @ k[:, :, None].swapaxes(-1, -2)
    scores = mx.tanh(scores / layer.softcap) * layer.softcap
    if isinstance(mask, str):
        columns = mx.arange(k.shape[2])
        mask = columns <= columns[-q_len:, None]
    elif mask is not None and mask.ndim == 4:
        mask = mask[:, :, None]
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
    weights = mx.softmax(scores, axis=-1, precise=True)
    return (weights @ v[:, :, None]).reshape(rows, num_heads, q_len, -1)


def layer_report(
    layer: int, launches: int, keys: int, padded_keys: int, nbytes: int, kv_dtype: str | None = None
) -> LaunchReport:
    """Return the report on a layer's calls of MLX's attention, which writes no stamp."""
    return LaunchReport(
        kernel="sdpa",
        grid=(launches,),
        reason="the keys are contiguous, as MLX's attention needs them",
        resolver="none",
        layer=layer,
        launches=launches,
        keys=keys,
        padded_keys=padded_keys,
        bytes=nbytes,
        kv_dtype=kv_dtype,
    )


def causal_mask(q_len: int, keys: int, window: int | None) -> mx.array | str | None:
    """Return the mask that mlx_lm would pass for one request.

    It is an array if the window is shorter than ``keys``. Otherwise it is None for a single query
    token, and ``causal`` for several.
    """
    if window is not None and keys > window:
        columns, last = np.arange(keys), np.arange(keys - q_len, keys)[:, None]
        return mx.array((columns <= last) & (columns > last - window))
    return "causal" if q_len > 1 else None


def heads_first(tokens: Any) -> mx.array:
    """Transpose [rows, tokens, heads, dim] to an MLX array [rows, heads, tokens, dim]."""
    transposed = tokens.transpose(0, 2, 1, 3)
    return transposed if isinstance(transposed, mx.array) else mx.array(transposed)


def store(array: mx.array, index: Any, values: Any) -> None:
    """Write ``values`` to an MLX array in place.

    NumPy values are written now, MLX values when the graph is evaluated. No pending graph reads
    ``array`` while NumPy writes, because a model on NumPy arrays evaluates layer by layer.
    """
    if isinstance(values, mx.array):
        array[index] = values
    else:
        np.asarray(array)[index] = values
