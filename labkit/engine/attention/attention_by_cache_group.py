"""One attention over several backends, each for the layers of one KV cache group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple

from labkit.engine.attention.attention_protocol import Arrays
from labkit.engine.attention.launch_report import Reports
from labkit.engine.attention.paged_backend_base import PagedBackend


class Place(NamedTuple):
    """Where a layer is: its group, and its index among the group's layers."""

    group: int
    layer: int


class CacheGroupAttention:
    """An ``Attention`` over a backend for each group. Its metadata are those of each backend.

    ``places`` has the place of each layer.
    """

    def __init__(self, backends: Sequence[PagedBackend], places: Iterable[tuple[int, int]]) -> None:
        self.backends = backends
        self._places = [Place(*place) for place in places]

    @property
    def arrays(self) -> Arrays | Literal["any"]:
        return self.backends[0].arrays

    @property
    def is_lazy(self) -> bool:
        return self.backends[0].is_lazy

    def bind(self, layer: int, **constants: Any) -> None:
        place = self._places[layer]
        self.backends[place.group].bind(place.layer, **constants)

    def forward(self, layer: int, q: Any, k: Any, v: Any, metadata: Any, out: Any = None) -> Any:
        group, own = self._places[layer]
        return self.backends[group].forward(own, q, k, v, metadata[group], out)

    def report(self, metadata: Any) -> Reports:
        return tuple(chain.from_iterable(self._each("report", metadata)))

    def pending(self, metadata: Any) -> list[Any]:
        return list(chain.from_iterable(self._each("pending", metadata)))

    def _each(self, method: str, metadata: Any) -> list[Any]:
        pairs = zip(self.backends, metadata, strict=True)
        return [getattr(backend, method)(own) for backend, own in pairs if own is not None]
