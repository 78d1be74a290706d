"""What the configs of many cells share, so that a value costs what it changes, not a whole config.

A study of a thousand cells composes thousands of configs of the same files, which differ in a few
single values. Their JSON forms share all dictionaries on which no such value lies, and the groups
built from these (:func:`labkit.config.from_plain`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

REFERENCE = re.compile(r"\$\{(?!now:)")  # to another value, or to the environment


@dataclass
class SharedParts:
    """The config of some files, without single values.

    Parameters
    ----------
    tree
        The config, in which a value's type is checked; unchanged between calls.
    plain
        Its JSON form.
    known
        The groups built from parts of ``plain``, by the identity of their JSON form.
    """

    tree: DictConfig
    plain: dict[str, Any]
    known: dict[int, Any]
    _leaves: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: DictConfig) -> SharedParts | None:
        """Return the shared parts of a config; None if values depend on others or are missing."""
        from omegaconf import OmegaConf

        text = str(OmegaConf.to_container(tree, resolve=False))
        if REFERENCE.search(text) or "'???'" in text:
            return None
        plain: Any = OmegaConf.to_container(tree, resolve=True, enum_to_str=True)
        return cls(tree, plain, dict.fromkeys(map(id, _dicts(plain))))

    def with_values(self, values: Sequence[Override]) -> dict[str, Any] | None:
        """Return the JSON form with single values; None if only OmegaConf can tell what it is."""
        whole, own = dict(self.plain), set[tuple[str, ...]]()
        for value in values:
            path = tuple(value.key_or_group.split("."))
            if not self._is_leaf(value, path):
                return None
            part = whole
            for depth, name in enumerate(path[:-1], 1):
                if path[:depth] not in own:
                    own.add(path[:depth])
                    part[name] = dict(part[name])
                part = part[name]
            part[path[-1]] = self._leaves[str(value.input_line)]
        return whole

    def _is_leaf(self, value: Override, path: Sequence[str]) -> bool:
        """Return whether a value replaces a single one of the config; note what it becomes."""
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        line = str(value.input_line)
        if line in self._leaves:
            return True
        found: Any = self.plain
        for name in path:
            if not isinstance(found, dict) or name not in found:
                return False
            found = found[name]
        given = value.value()
        if isinstance(found, dict | list) or isinstance(given, dict | list) or "${" in line:
            return False
        try:
            node: Any = OmegaConf.select(self.tree, ".".join(path[:-1])) if path[1:] else self.tree
            before = node._get_node(path[-1])._value()
            OmegaConf.update(self.tree, value.key_or_group, given, merge=True)
            after = node._get_node(path[-1])._value()
            OmegaConf.update(self.tree, value.key_or_group, before, merge=True)
        except OmegaConfBaseException:
            return False
        self._leaves[line] = after.name if isinstance(after, Enum) else after
        return True


def _dicts(plain: Any) -> Iterator[dict[str, Any]]:
    for item in plain.values() if isinstance(plain, dict) else plain:
        if isinstance(item, dict | list):
            yield from _dicts(item)
    if isinstance(plain, dict):
        yield plain
