"""The resolvers by name; see ``resolver.Resolver``.

A built-in is a word of ``config.RESOLVERS``, a module of this package with that name, and a
branch in ``metal/kernels/resolve.metal``; its number in the kernels is the word's place.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from labkit.config.attention import RESOLVERS
from labkit.engine.attention.resolvers.resolver import Resolver
from labkit.engine.attention.resolvers.seq_map import UserResolver

_BUILT_IN: dict[str, type[Resolver]] = {
    word: import_module(f"{__name__}.{word}").Resolver for word in RESOLVERS
}
# Whose lookup a kernel is given; a user's maps are a seq_map.
BY_KIND: dict[type[Any], type[Resolver]] = {made.kind: made for made in _BUILT_IN.values()}


def create(name: str) -> Resolver:
    """Return the resolver ``name``: a built-in's word, or ``package.module:Class``.

    Raises
    ------
    ValueError
        The word is unknown, or the class cannot be loaded; one line that says why.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]()
    if ":" in name:
        return UserResolver(name)
    raise ValueError(f"resolver={name}: allowed are {', '.join(_BUILT_IN)} or package.module:Class")
