"""Which kernel runs, on what grid, and why."""

from __future__ import annotations

from dataclasses import dataclass

BQ = 32  # query rows of the tiled kernel's threadgroup
SHARED_HEADS = 8  # most query heads that share one KV head's loads in a threadgroup
SPLIT_TOKENS = 512  # keys per partition of split_kv=auto
BUSY_THREADGROUPS = 112  # eight for each of 14 cores: with fewer, splitting pays
MOST_PARTITIONS = 16
RESOLVER_IDS = {
    "binary_search": 1,
    "seq_map": 2,
    "identity": 3,
    "padded_grid": 4,
    "work_plan": 5,
}


@dataclass(frozen=True)
class Shape:
    """What the choice depends on.

    Parameters
    ----------
    total_q, num_seqs
        Packed query tokens; sequences.
    max_query_len, max_seq_len
        The largest of each in the batch.
    num_q_heads, num_kv_heads, head_dim
        Of the attention layer.
    dtype
        ``float32``, ``float16`` or ``bfloat16``.
    """

    total_q: int
    num_seqs: int
    max_query_len: int
    max_seq_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str


@dataclass(frozen=True)
class Dispatch:
    """One choice.

    Parameters
    ----------
    kernel
        ``decode`` or ``tiled``.
    groups
        Threadgroups along each axis.
    threads
        Threads of a threadgroup.
    partitions
        KV partitions of the decode kernel; above 1 the reduce kernel follows.
    heads
        Query heads that share a threadgroup's loads of keys and values.
    reason
        Why this kernel, in one line.
    """

    kernel: str
    groups: tuple[int, int, int]
    threads: int
    partitions: int
    heads: int
    reason: str


def choose(
    shape: Shape,
    *,
    resolver: str = "binary_search",
    split_kv: str | int = "off",
    gqa_sharing: bool = False,
    kernel: str = "auto",
    tile_threshold: int = 2,
    planned: int | None = None,
) -> Dispatch:
    """Choose kernel, grid and partitions.

    Parameters
    ----------
    shape
        The batch and the layer.
    resolver
        Its name decides the grid's axes.
    split_kv
        ``off``, ``auto`` or a number of partitions; only the decode kernel splits.
    gqa_sharing
        Whether query heads share the loads of their KV head in the decode kernel.
    kernel
        ``auto``, or the one to take.
    tile_threshold
        Query tokens of the longest sequence from which ``auto`` takes the tiled kernel.
    planned
        Entries of the host's work plan for the kernel that is taken (``work_plan`` only).

    Raises
    ------
    ValueError
        The pair makes no sense; one line.
    """
    if resolver not in RESOLVER_IDS:
        raise ValueError(f"resolver={resolver}: allowed are {', '.join(RESOLVER_IDS)}")
    pure_decode = shape.max_query_len <= 1 and shape.total_q == shape.num_seqs
    if resolver == "identity" and not pure_decode:
        raise ValueError("resolver=identity: takes pure decode only (one query token per sequence)")
    name, reason = kernel_of(shape, kernel, tile_threshold)
    if name == "tiled":
        return Dispatch(
            "tiled", _groups(shape, resolver, shape.num_q_heads, BQ, planned), 128, 1, 1, reason
        )
    parts, why = partitions(
        split_kv,
        units=shape.num_q_heads * shape.total_q,
        busy=BUSY_THREADGROUPS,
        max_seq_len=shape.max_seq_len,
        pure_decode=pure_decode,
    )
    heads = _shared_heads(shape) if gqa_sharing else 1
    x, y, z = _groups(shape, resolver, shape.num_q_heads // heads, 1, planned)
    return Dispatch("decode", (x, y, z * parts), 256, parts, heads, reason + why)


def takes(dtype: str, head_dim: int) -> bool:
    """Tell whether the tiled kernel takes these: its matrices must fit the registers."""
    return head_dim <= (128 if dtype == "float32" else 256)


def kernel_of(shape: Shape, kernel: str = "auto", tile_threshold: int = 2) -> tuple[str, str]:
    """Return the kernel and why; parameters and errors as in ``choose``."""
    fits = takes(shape.dtype, shape.head_dim)
    kind = f"{shape.dtype} with head size {shape.head_dim}"
    work = f"{shape.total_q} query tokens of {shape.num_seqs} sequences"
    if kernel not in ("auto", "decode", "tiled"):
        raise ValueError(f"kernel={kernel}: allowed are auto, decode and tiled")
    if kernel == "tiled" and not fits:
        raise ValueError(f"kernel=tiled: does not take {kind}")
    if kernel != "auto":
        return kernel, f"{kernel} was asked for ({work})"
    if shape.total_q <= shape.num_seqs:
        return "decode", f"no prefill ({work})"
    if shape.max_query_len < tile_threshold:
        return "decode", f"{shape.max_query_len} query tokens at most: below tile_threshold"
    if not fits:
        return "decode", f"prefill ({work}), but the tiled kernel does not take {kind}"
    return "tiled", f"prefill ({work})"


def partitions(
    split_kv: str | int, *, units: int, busy: int, max_seq_len: int, pure_decode: bool
) -> tuple[int, str]:
    """Return how many partitions of the keys, and the end of the reason; for every device.

    Parameters
    ----------
    split_kv
        ``off``, ``auto`` or a number.
    units
        Threadgroups of the grid without splitting.
    busy
        With so many, no core is idle.
    max_seq_len
        The longest context (keys).
    pure_decode
        Whether every sequence has one query token; ``auto`` splits no other batch.

    Raises
    ------
    ValueError
        ``split_kv`` is none of these; one line.
    """
    if split_kv == "off":
        return 1, ""
    if split_kv != "auto":
        text = str(split_kv)
        if not text.isdecimal() or not 1 <= int(text) <= 1024:
            raise ValueError(f"split_kv={split_kv}: allowed are off, auto or 1 to 1024 partitions")
        return int(text), f"; split_kv={text}"
    wanted = min(-(-max_seq_len // SPLIT_TOKENS), MOST_PARTITIONS)
    if not pure_decode or units >= busy or wanted < 2:
        return 1, "; split_kv=auto: not split"
    return wanted, f"; split_kv=auto: {units} threadgroups leave cores idle"


def _shared_heads(shape: Shape) -> int:
    """Return how many heads share: the largest divisor of the group that fits."""
    group = shape.num_q_heads // shape.num_kv_heads
    return max(n for n in range(1, min(group, SHARED_HEADS) + 1) if group % n == 0)


def _groups(
    shape: Shape, resolver: str, columns: int, rows: int, planned: int | None
) -> tuple[int, int, int]:
    """Return the grid for units of ``rows`` query rows."""
    if resolver == "padded_grid":
        return columns, -(-shape.max_query_len // rows), shape.num_seqs
    if resolver == "work_plan":
        if planned is None:
            raise ValueError("resolver=work_plan: the host's plan is missing")
        return columns, planned, 1
    if rows == 1:
        return columns, shape.total_q, 1
    return columns, shape.total_q // rows + shape.num_seqs, 1
