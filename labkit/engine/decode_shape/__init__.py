"""How many rows a step of decodes alone has, one file per answer."""

from __future__ import annotations

from labkit.config import DecodeShape as Name
from labkit.engine.decode_shape.base import DecodeShape
from labkit.engine.decode_shape.bucketed import Bucketed
from labkit.engine.decode_shape.exact import Exact
from labkit.engine.decode_shape.fixed import Fixed


def create(name: Name, capacity: int) -> DecodeShape:
    """Return the shape of ``engine.decode_shape``; ``capacity`` is the rows there can be."""
    if name is Name.exact:
        return Exact()
    return Bucketed(capacity) if name is Name.bucketed else Fixed(capacity)
