"""The contracts of resolvers and of attention backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from labkit.conformance.contract import Check, Compose, demand
from labkit.engine.attention import create, sequence_resolvers
from labkit.engine.attention.sequence_resolvers.sequence_resolver import Resolver
from labkit.kernel_constants import BQ

# Query lengths of the batches: decode alone, prefill alone, both, and the edges of Q-blocks.
BATCHES = {
    "four decodes": (1, 1, 1, 1),
    "one prefill": (40,),
    "decodes and a prefill": (1, 1, 40),
    "whole Q-blocks": (BQ, 2 * BQ, BQ + 1, 1),
    "64 decodes and a long prefill": (*[1] * 64, 300),
}
DECODE_ONLY = ("identity",)  # resolvers that refuse batches with a prefill
TOLERANCE = 1e-4  # share of the values' range; float32 summation in any order stays below it


def resolver_checks(path: str, compose: Compose) -> Iterator[Check]:
    """Yield the checks of the resolver ``path``: ``package.module:Class`` or a built-in name."""
    loaded: list[Resolver] = []

    def load() -> None:
        compose({})  # these checks read no option, but a wrong one is refused
        loaded.append(sequence_resolvers.create(path))

    yield Check("it can be created", load, needed=True)
    for name, lengths in BATCHES.items():
        if path in DECODE_ONLY and max(lengths) > 1:
            continue
        check = partial(_check_units, loaded, lengths)
        yield Check(f"it finds the sequence of every token and Q-block: {name}", check)
    for name, lengths in list(BATCHES.items())[:3]:
        if path in DECODE_ONLY and max(lengths) > 1:
            continue
        check = partial(_check_same_output, path, lengths)
        yield Check(f"attention's output is bit for bit that of binary_search: {name}", check)


def _check_units(loaded: list[Resolver], lengths: tuple[int, ...]) -> None:
    """Check that the resolver finds the right sequence for every query token and Q-block.

    ``loaded`` holds the resolver. ``lengths`` are the query lengths of the batch's sequences.
    """
    (resolver,) = loaded
    cu = _cumulative(lengths)
    lookup, _ = resolver.lookup(cu, np.array(lengths, np.int32))
    tokens = [int(s) for s in np.repeat(np.arange(len(lengths)), lengths)]
    found: dict[int, int] = {}
    for unit in range(resolver.token_units(lookup, cu)):
        sequence, token, _ = resolver.find_token(lookup, unit, cu)
        if sequence >= 0:
            found[int(token)] = int(sequence)
    for token, sequence in enumerate(tokens):
        demand(
            found.get(token) == sequence,
            f"query lengths {_shown(lengths)}: token {token} belongs to sequence {sequence}, "
            f"not {found.get(token)}",
        )
    if max(lengths) == 1:
        return  # the tiled kernel is for prefill
    rows = {
        (int(sequence), int(row))
        for unit in range(resolver.qblock_units(lookup, cu))
        for sequence, row, _ in [resolver.find_qblock(lookup, unit, cu)]
        if sequence >= 0 and row < lengths[int(sequence)]
    }
    right = {(s, row) for s, length in enumerate(lengths) for row in range(0, length, BQ)}
    wrong = sorted(right ^ rows)
    demand(
        not wrong,
        f"query lengths {_shown(lengths)}: Q-block {wrong[:1]} (sequence, first row) "
        f"{'is missing' if wrong and wrong[0] in right else 'does not exist'}",
    )


def _check_same_output(path: str, lengths: tuple[int, ...]) -> None:
    results = [
        _attend(create(backend="reference", resolver=name), _Batch(lengths))
        for name in ("binary_search", path)
    ]
    demand(
        results[0].tobytes() == results[1].tobytes(),
        f"query lengths {_shown(lengths)}: the outputs differ in "
        f"{int(np.any(results[0] != results[1], axis=(1, 2)).sum())} of {sum(lengths)} tokens",
    )


def backend_checks(path: str, compose: Compose) -> Iterator[Check]:
    """Yield the checks of the backend ``path``: ``package.module:Class`` or a built-in name."""
    made: list[Any] = []
    yield Check("it can be created", lambda: made.append(create(backend=path)), needed=True)
    for name, lengths in list(BATCHES.items())[:4]:
        check = partial(_require_close, path, _Batch(lengths))
        yield Check(f"its output is that of the float64 reference: {name}", check)
    poisoned = _Batch((1, 1, 40), poison=True)
    check = partial(_require_close, path, poisoned, "with NaN in unused slots, ")
    yield Check("NaN in slots that no query sees does not reach the output", check)
    yield Check(
        "a model served with it computes mlx_lm's logits (the self-test at load)",
        partial(_check_self_test, path, compose),
    )


def _require_close(path: str, batch: _Batch, where: str = "") -> None:
    right = _attend(create(backend="reference"), batch)
    got = _attend(create(backend=path), batch)
    demand(got.shape == right.shape, f"the output has shape {got.shape}, not {right.shape}")
    error = np.abs(got.astype(np.float64) - right) / np.abs(right).max()
    worst = int(np.nan_to_num(error, nan=np.inf).max(axis=(1, 2)).argmax())
    demand(
        bool(error.max() <= TOLERANCE),  # false for NaN
        f"{where}token {worst} is off by {error[worst].max():.2g} of the values' range; at most "
        f"{TOLERANCE:g} is allowed",
    )


def _check_self_test(path: str, compose: Compose) -> None:
    from labkit.engine import create as create_engine
    from labkit.models import resolve

    experiment = compose({"engine.attention.backend": path})
    create_engine(experiment.engine, resolve(experiment.model).path).close()


class _Batch:
    """A batch with random queries, KV pools and block tables.

    Sequence ``i`` has ``lengths[i]`` query tokens after 21 cached tokens. With ``poison``, the
    unused slots of the pools hold NaN.
    """

    def __init__(self, lengths: tuple[int, ...], poison: bool = False) -> None:
        random, block_size, heads, kv_heads, dim = np.random.default_rng(5), 16, 4, 2, 64
        self.cu_seqlens_q = _cumulative(lengths)
        self.seq_lens = np.array(lengths, np.int32) + 21
        blocks = -(-self.seq_lens // block_size)
        order = random.permutation(int(blocks.sum())) + 1  # block 0 is the null block
        self.block_tables = np.zeros((len(lengths), int(blocks.max())), np.int32)
        for s, start in enumerate(np.cumsum(blocks) - blocks):
            self.block_tables[s, : blocks[s]] = order[start : start + blocks[s]]
        self.q = random.standard_normal((sum(lengths), heads, dim)).astype(np.float32)
        shape = (len(order) + 1, block_size, kv_heads, dim)
        self.keys, self.values = (
            random.standard_normal(shape).astype(np.float32) for _ in range(2)
        )
        if poison:
            used = np.zeros(shape[:2], bool)
            for table, length in zip(self.block_tables, self.seq_lens, strict=True):
                slots = np.arange(length)
                used[table[slots // block_size], slots % block_size] = True
            self.keys[~used], self.values[~used] = np.nan, np.nan


def _attend(backend: Any, batch: _Batch) -> Any:
    """Return a backend's attention output for the batch, as a NumPy array."""
    convert: Callable[[Any], Any] = np.asarray
    if backend.arrays == "mlx":
        from labkit.engine.attention.backends.mlx_backend_base import to_mlx

        convert = to_mlx
    backend.adopt([convert(batch.keys.copy())], [convert(batch.values.copy())])
    metadata = backend.plan(
        block_tables=batch.block_tables,
        seq_lens=batch.seq_lens,
        cu_seqlens_q=batch.cu_seqlens_q,
        total_q=len(batch.q),
    )
    backend.bind(0, scale=batch.q.shape[2] ** -0.5, heads=batch.q.shape[1])
    return np.array(backend.forward(0, convert(batch.q.copy()), None, None, metadata))


def _cumulative(lengths: tuple[int, ...]) -> Any:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _shown(lengths: tuple[int, ...]) -> str:
    return ", ".join(map(str, lengths[:6])) + (", ..." if len(lengths) > 6 else "")
