"""Launches the attention kernels: operands in, output and evidence out.

The caller has checked the operands (ranges, monotone ``cu_seqlens_q``, block ids); what is
checked here is only what this file's own choices need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from labkit.metal.call import Executor, KernelCall
from labkit.metal.dispatch import RESOLVER_IDS, Dispatch, Shape
from labkit.metal.evidence import Evidence, read
from labkit.metal.kernels import header, source

BLOCK_SIZES = (8, 16, 32)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


@dataclass(frozen=True)
class Operands:
    """One attention layer's arrays, MLX's own or NumPy's.

    Parameters
    ----------
    q
        [total_q, num_q_heads, head_dim].
    k_pool, v_pool
        [num_blocks, block_size, num_kv_heads, head_dim], q's dtype.
    block_tables
        int32 [num_seqs, max_blocks].
    seq_lens
        int32 [num_seqs].
    cu_seqlens_q
        int32 [num_seqs + 1].
    lookup
        int32: what the resolver reads in the kernel that is dispatched. ``seq_map``: the
        token map [total_q] (decode) or the Q-block map [total_q // 32 + num_seqs] with -1
        for surplus (tiled); ``work_plan``: [units, 2]; None for the others.
    """

    q: Any
    k_pool: Any
    v_pool: Any
    block_tables: Any
    seq_lens: Any
    cu_seqlens_q: Any
    lookup: Any = None

    def shape(self) -> Shape:
        """Return what the dispatch depends on; reads ``seq_lens`` and ``cu_seqlens_q``."""
        lengths = np.diff(np.asarray(self.cu_seqlens_q))
        total_q, num_q_heads, head_dim = self.q.shape
        return Shape(
            total_q=total_q,
            num_seqs=len(self.seq_lens),
            max_query_len=int(lengths.max(initial=0)),
            max_seq_len=int(np.asarray(self.seq_lens).max(initial=0)),
            num_q_heads=num_q_heads,
            num_kv_heads=self.k_pool.shape[2],
            head_dim=head_dim,
            dtype=str(self.q.dtype).removeprefix("mlx.core."),
        )


@dataclass(frozen=True)
class Options:
    """How to attend.

    Parameters
    ----------
    scale
        Factor of the logits.
    resolver
        Its name.
    window, softcap, sinks
        See ``labkit.engine.attention.paged_attention``; None: off.
    window_skip
        Whether KV blocks outside the window are left out (else read and masked).
    """

    scale: float
    resolver: str = "binary_search"
    window: int | None = None
    softcap: float | None = None
    sinks: Any = None
    window_skip: bool = True


@dataclass(frozen=True)
class Launched:
    """The output [total_q, num_q_heads, head_dim] and the kernels' reports, not yet read."""

    out: mx.array
    reports: tuple[tuple[str, mx.array], ...]
    resolver: str
    nonce: int

    def evidence(self) -> Evidence:
        """Read the reports; waits for the kernels."""
        rows = [(name, np.asarray(report)) for name, report in self.reports]
        return read(rows, self.resolver, self.nonce)


def launch(
    operands: Operands,
    options: Options,
    dispatch: Dispatch,
    executor: Executor,
    *,
    nonce: int,
) -> Launched:
    """Run the dispatched kernel, and the reduce kernel where the keys are split.

    Parameters
    ----------
    operands, options
        What to attend to, and how. There must be at least one query token.
    dispatch
        From ``labkit.metal.dispatch.choose``.
    executor
        ``labkit.metal.call.on_metal`` or a ``labkit.metal.emulator.emulate.Emulator``.
    nonce
        uint32, different for every launch: the stamps show that this one ran.

    Raises
    ------
    ValueError
        The kernels do not take these operands, or the device is missing.
    """
    _check(operands, options)
    main = main_call(operands, options, dispatch, nonce)
    out, report = executor(main)
    reports = [(dispatch.kernel, report)]
    if dispatch.partitions > 1:
        out, report = executor(reduce_call(operands, options, dispatch, nonce, out))
        reports.append(("reduce", report))
    return Launched(out, tuple(reports), options.resolver, nonce)


def main_call(operands: Operands, options: Options, dispatch: Dispatch, nonce: int) -> KernelCall:
    """Return the call of the decode or tiled kernel."""
    q = _array(operands.q)
    total_q, num_heads, head_dim = q.shape
    split = dispatch.partitions > 1
    scalars: dict[str, mx.array] = {
        "scale": mx.array(options.scale, mx.float32),
        "softcap": mx.array(options.softcap or 0.0, mx.float32),
        "window": mx.array(options.window or 0, mx.int32),
        "nonce": mx.array(nonce, mx.uint32),
    }
    template: dict[str, Any] = {
        "T": q.dtype,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": operands.k_pool.shape[1],
        "RESOLVER": RESOLVER_IDS[options.resolver],
        "WINDOW": options.window is not None,
        "WINDOW_SKIP": options.window_skip,
        "SOFTCAP": options.softcap is not None,
        "SINKS": options.sinks is not None,
    }
    shape: tuple[int, ...] = (total_q, num_heads, head_dim)
    dtype = q.dtype
    if dispatch.kernel == "decode":
        scalars["partitions"] = mx.array(dispatch.partitions, mx.int32)
        if split:
            shape, dtype = (total_q, num_heads, dispatch.partitions, head_dim + 2), mx.float32
        template |= {"OUT": dtype, "HEADS": dispatch.heads, "SPLIT": split}
    lookup = operands.lookup if operands.lookup is not None else np.zeros(1, np.int32)
    arrays = {
        "q": q,
        "k_pool": _array(operands.k_pool),
        "v_pool": _array(operands.v_pool),
        "block_tables": _array(operands.block_tables),
        "seq_lens": _array(operands.seq_lens),
        "cu_seqlens_q": _array(operands.cu_seqlens_q),
        "lookup": _array(lookup),
        "sinks": _sinks(options),
    }
    return KernelCall(
        name=f"labkit_paged_attention_{dispatch.kernel}",
        header=header(),
        body=source(dispatch.kernel),
        inputs=tuple({**arrays, **scalars}.items()),
        outputs=(("out", shape, dtype), _report(dispatch.groups)),
        template=tuple(template.items()),
        groups=dispatch.groups,
        threads=dispatch.threads,
    )


def reduce_call(
    operands: Operands,
    options: Options,
    dispatch: Dispatch,
    nonce: int,
    partials: mx.array,
) -> KernelCall:
    """Return the call that merges the partitions."""
    q = _array(operands.q)
    total_q, num_heads, head_dim = q.shape
    groups = (num_heads, total_q, 1)
    return KernelCall(
        name="labkit_paged_attention_reduce",
        header=header(),
        body=source("reduce"),
        inputs=(
            ("partials", partials),
            ("sinks", _sinks(options)),
            ("partitions", mx.array(dispatch.partitions, mx.int32)),
            ("nonce", mx.array(nonce, mx.uint32)),
        ),
        outputs=(("out", tuple(q.shape), q.dtype), _report(groups)),
        template=(
            ("T", q.dtype),
            ("HEAD_DIM", head_dim),
            ("RESOLVER", RESOLVER_IDS[options.resolver]),
            ("SINKS", options.sinks is not None),
        ),
        groups=groups,
        threads=-(-head_dim // 32) * 32,
    )


def _report(groups: tuple[int, int, int]) -> tuple[str, tuple[int, ...], mx.Dtype]:
    x, y, z = groups
    return "report", (x * y * z, 4), mx.uint32


def _sinks(options: Options) -> mx.array:
    if options.sinks is None:
        return mx.zeros(1, mx.float32)
    return _array(options.sinks).astype(mx.float32)


def _array(array: Any) -> mx.array:
    return array if isinstance(array, mx.array) else mx.array(array)


def _check(operands: Operands, options: Options) -> None:
    """Refuse what the kernels are not compiled for; ValueError with one line."""
    q, k_pool, v_pool = (_array(operands.q), operands.k_pool, operands.v_pool)
    if q.dtype not in DTYPES:
        raise ValueError(f"q must be float32, float16 or bfloat16, not {q.dtype}")
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        if str(pool.dtype).removeprefix("mlx.core.") != str(q.dtype).removeprefix("mlx.core."):
            raise ValueError(f"{name} must have q's dtype, {q.dtype}, not {pool.dtype}")
    if k_pool.shape[1] not in BLOCK_SIZES:
        raise ValueError(f"block size {k_pool.shape[1]}: allowed are 8, 16 and 32")
    if q.shape[2] % 16 or not 16 <= q.shape[2] <= 256:
        raise ValueError(f"head size {q.shape[2]}: allowed are multiples of 16 from 16 to 256")
    if q.shape[0] == 0:
        raise ValueError("no query tokens: nothing to launch")
    if options.resolver in ("seq_map", "work_plan") and operands.lookup is None:
        raise ValueError(f"resolver={options.resolver}: its lookup is missing")
