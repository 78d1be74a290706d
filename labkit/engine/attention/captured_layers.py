"""The layers of a recorded step, over one KV memory: what is looked up once, and for each step."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.cpu.address_views import address_of
from labkit.cpu.attention_launch import COUNTER_COLUMNS
from labkit.cpu.graph_capture import (
    BODY,
    ELEMENT,
    HEADS,
    K_POOL,
    KIND,
    KV_HEADS,
    LAUNCH_FIELDS,
    LAYER,
    LEFT_FIELDS,
    LEFT_ITERATIONS,
    SLOT_NUMBERS,
    V_POOL,
)
from labkit.engine.attention.attention_metadata import AttentionLayer, AttentionMetadata
from labkit.engine.attention.kernel_dispatch import Dispatch
from labkit.engine.attention.launch_log import LaunchTotals, launch_stamp, report_launches
from labkit.engine.engine_protocol import Counters
from labkit.kernel_abi import STAMP_MASK

Ints = NDArray[np.int64]
_OF_KIND = [BODY, HEADS, ELEMENT, SLOT_NUMBERS]


@dataclass(frozen=True, slots=True)
class CapturedLayers:
    """The launches of attention of a recorded step, in order, all arrays one row each.

    Parameters
    ----------
    all
        Their layers.
    rows
        Where they are among all launches.
    pools
        Addresses of keys and values, [launches, 2].
    sinks
        Addresses, or 0.
    """

    all: tuple[AttentionLayer, ...]
    rows: Ints
    pools: Ints
    sinks: Ints
    kinds: tuple[AttentionLayer, ...] = field(init=False)  # one layer of each kind
    kind: Ints = field(init=False)  # of each launch

    def __post_init__(self) -> None:
        """Derive what does not change."""
        kinds = {layer.kind: layer for layer in self.all}
        order = list(kinds)
        object.__setattr__(self, "kinds", tuple(kinds.values()))
        object.__setattr__(self, "kind", np.array([order.index(x.kind) for x in self.all]))

    def packed(self, kinds: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Return one of ``arguments.LAYERS`` for each launch, made of that of each kind."""
        packed = np.repeat(kinds[0], len(self.all))
        for i, one in enumerate(kinds[1:], 1):
            packed[self.kind == i] = one
        return packed

    def launches(self, packed: NDArray[Any], kinds: Sequence[tuple[int, ...]]) -> Ints:
        """Return what ``tape.replay`` is told; ``kinds``: body, heads, element and slot numbers."""
        launches = np.zeros((len(self.all), LAUNCH_FIELDS), np.int64)
        launches[:, KV_HEADS] = [layer.num_kv_heads for layer in self.all]
        launches[:, K_POOL : V_POOL + 1] = self.pools
        launches[:, _OF_KIND] = np.array(kinds, np.int64)[self.kind]
        launches[:, LAYER] = address_of(packed) + packed.itemsize * np.arange(len(packed))
        launches[:, KIND] = self.kind
        return launches


class ReplayState:
    """What replays are told of attention in steps that differ in nothing but contexts.

    ``packed`` is what ``launches`` points into. Not for two steps at once: what they count lies
    here, as ``tape.replay`` takes it. A step's counts are added up until somebody asks for them;
    not where a layer has a window (``windowed``), of which a report depends on the contexts.
    """

    __slots__ = (
        *("_counts", "_dispatches", "_nonce", "_metadata", "_owed", "_packed", "_steps"),
        *("counters", "launches", "layers", "left", "windowed"),
    )

    def __init__(
        self,
        layers: CapturedLayers,
        packed: NDArray[Any],
        kinds: Sequence[tuple[int, ...]],
        dispatches: Sequence[Dispatch],
        workers: int,
    ) -> None:
        self.layers = layers
        self.windowed = any(layer.window is not None for layer in layers.kinds)
        self._packed = packed
        self._dispatches = dispatches  # of each kind
        self._nonce = secrets.randbits(32)
        self._counts = np.bincount(layers.kind).tolist()
        self.launches = layers.launches(packed, kinds)
        self.counters = np.zeros((len(layers.all), workers + 1, COUNTER_COLUMNS), np.int64)
        self.left = np.zeros((len(layers.kinds), LEFT_FIELDS), np.int64)
        self._steps = 0
        self._metadata: AttentionMetadata | None = None
        self._owed: Counters | None = None

    def begin(self, resolver: str) -> tuple[int, int]:
        """Return the first launch's number, from which the others count on, and its stamp."""
        nonce = self._nonce = (self._nonce + len(self.layers.all)) & STAMP_MASK
        return nonce, launch_stamp(nonce, "decode", resolver)

    def ran(self, metadata: AttentionMetadata, counters: Counters) -> None:
        """Note that a step ran, whose counts ``counters`` are owed."""
        if self._owed is not counters:
            if self._owed is not None:
                self._owed.flush()
            self._owed = counters
            counters.defer(self._settled)
        self._steps += 1
        self._metadata = metadata

    def evidence(self) -> list[LaunchTotals]:
        """Return what the launches left since it was asked for last, those of one kind together."""
        steps, self._steps = self._steps, 0
        rows = self.left.tolist()
        self.left[:, LEFT_ITERATIONS:] = 0
        return [
            LaunchTotals(
                layer=self.layers.all[launch],
                dispatch=dispatch,
                launches=count * steps,
                expected_stamp=expected,
                stamp_error=error,
                search_iterations=iterations,
                kv_blocks_visited=blocks,
                surplus_threadgroups=surplus,
            )
            for dispatch, count, (expected, launch, error, iterations, blocks, surplus) in zip(
                self._dispatches, self._counts, rows, strict=True
            )
        ]

    def _settled(self) -> dict[str, float]:
        """Return the counters of the steps that were not asked for."""
        self._owed, total = None, Counters()
        if self._metadata is not None and self._steps:
            for report in report_launches(self.evidence(), self._metadata, "cpu"):
                total.add_all(report.counters())
        return total.as_dict()
