"""Runs a model's recurrent layers request by request, within a forward over packed tokens.

A recurrence or a convolution mixes the tokens of a request, so it cannot run over tokens as batch
entries. mlx_lm's code for it, a *mixer*, takes a batch [requests, tokens, dim] and an
``ArraysCache`` with the states of the batch. ``SegmentMixer`` replaces a mixer in its layer. It
takes the packed tokens [T, 1, dim], cuts them into groups of requests with equally many tokens
(``StateStep``), runs the mixer once for each group with the group's states, and puts the results
back in their order. So no mixer sees padding, and every architecture computes what it computes in
plain mlx_lm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from labkit.engine.model.cache_shapes import MixerSpec
from labkit.engine.model.isolated_model_modules import import_plain
from labkit.engine.model.layer_cache import StateCache
from labkit.engine.recurrent_states.state_arrays import StateGroup, StateStep


def replace_mixers(model: Any, mixers: Sequence[MixerSpec]) -> None:
    """Replace a model's mixers in place."""
    for spec in mixers:
        *parents, name = spec.path.split(".")
        owner = model
        for part in parents:
            owner = owner[int(part)] if isinstance(owner, list) else getattr(owner, part)
        setattr(owner, name, SegmentMixer(getattr(owner, name), spec.entries))


class SegmentMixer(nn.Module):  # type: ignore[misc]
    """A mixer that takes packed tokens and a ``StateCache``.

    Called with another cache, it passes its arguments to the mixer unchanged. ``entries`` are the
    indices of the arrays in the cache that the mixer reads and writes. The attribute
    ``takes_cache`` tells ``CompiledBlocks`` that the module is not a feed-forward block.
    """

    takes_cache = True

    def __init__(self, mixer: Any, entries: tuple[int, ...]) -> None:
        super().__init__()
        self.mixer = mixer
        self._entries = entries
        self._create_cache = import_plain("cache").ArraysCache

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the mixer on each group of the step, and return the results as packed tokens."""
        values = (*args, *kwargs.values())
        cache = next((value for value in values if isinstance(value, StateCache)), None)
        if cache is None:
            return self.mixer(*args, **kwargs)
        step = cache.current_states()
        results = [self._run_group(step, group, cache, args, kwargs) for group in step.groups]
        if isinstance(results[0], tuple):
            return tuple(_merge(step, parts) for parts in zip(*results, strict=True))
        return _merge(step, results)

    def _run_group(
        self, step: StateStep, group: StateGroup, cache: StateCache, args: Any, kwargs: Any
    ) -> Any:
        """Run the mixer on one group, part by part."""
        results = []
        for part, (start, stop) in enumerate(group.parts):
            states = self._create_cache(cache.num_arrays)
            for entry in self._entries:
                states[entry] = group.read(part, cache.layer, entry)
            tokens = partial(_tokens, group=group, start=start, stop=stop)
            cut = partial(_cut, total_q=step.total_q, tokens=tokens, states=states)
            results.append(
                self.mixer(*map(cut, args), **{name: cut(arg) for name, arg in kwargs.items()})
            )
            for entry in self._entries:
                group.write(part, cache.layer, entry, states[entry])
        if len(results) == 1:
            return results[0]
        if isinstance(results[0], tuple):
            return tuple(
                mx.concatenate(list(parts), axis=1) for parts in zip(*results, strict=True)
            )
        return mx.concatenate(results, axis=1)


def _cut(value: Any, total_q: int, tokens: Callable[[mx.array], mx.array], states: Any) -> Any:
    """Return what a mixer gets instead of an argument: a part of a group's ``tokens``.

    They are [requests, tokens, ...] for packed tokens [total_q, 1, ...], and the first position of
    each request for positions [total_q]. The state cache becomes ``states``. Other arguments stay.
    """
    if isinstance(value, StateCache):
        return states
    if not isinstance(value, mx.array) or value.shape[0] != total_q:
        return value
    if value.ndim == 1:
        return tokens(value)[:, 0]
    return tokens(value[:, 0]) if value.shape[1] == 1 else value


def _tokens(rows: mx.array, group: StateGroup, start: int, stop: int) -> mx.array:
    """Select the group's tokens ``[start, stop)`` from [total_q, ...]: [requests, tokens, ...]."""
    if group.rows is not None:
        return rows[group.rows[:, start:stop]]
    tokens = group.num_tokens + group.num_drafts
    grouped = rows.reshape(len(group.batch.slots), tokens, *rows.shape[1:])
    return grouped if stop - start == tokens else grouped[:, start:stop]


def _merge(step: StateStep, results: Sequence[Any]) -> Any:
    """Return the groups' results [requests, tokens, ...] as packed tokens [total_q, 1, ...]."""
    flat = [result.reshape(-1, 1, *result.shape[2:]) for result in results]
    merged = flat[0] if len(flat) == 1 else mx.concatenate(flat)
    return merged if step.order is None else merged[step.order]
