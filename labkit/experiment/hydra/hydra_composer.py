"""The Hydra composer: from overrides in Hydra's grammar to a checked config.

Reading files takes most of a composition's time. So Hydra composes the choices of files to a tree
once, and overrides of single values (``engine.threads=2``) are applied to a copy of the tree. Arms
and cells that differ only in such values share one tree.

A tree is resolved twice if it names environment variables: their values are checked, and the
expressions are kept for the study's files (:mod:`labkit.config.env_interpolation`).
"""

from __future__ import annotations

import itertools
import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.config import ConfigError, Experiment, from_plain, require
from labkit.config.env_interpolation import EXPRESSION, hide_values
from labkit.config.option import options
from labkit.config.option_index import value_of
from labkit.experiment.hydra.hydra_error_text import explain_config_error

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

REFERENCE = re.compile(r"\$\{(?!now:)")  # to another value, or to the environment
WRITTEN_GROUPS = ("engine", "model", "workload", "ablation", "scales")  # in files of a study
_keeps_expressions: ContextVar[bool] = ContextVar("oc.env returns its expression", default=False)


class Composer:
    """Composes the arms of one command's cells; Hydra must be initialised."""

    def __init__(self) -> None:
        from omegaconf import OmegaConf

        # Here, because a job's process composes without the app.
        OmegaConf.register_new_resolver("oc.env", _resolve_variable, replace=True)
        # Pickled: loading a tree is six times as fast as copying one.
        self._trees: dict[tuple[str, ...], bytes] = {}
        self._shared: dict[tuple[str, ...], SharedParts | None] = {}
        self._parsed: dict[str, Override] = {}

    def compose(self, overrides: Sequence[str], where: str = "") -> Experiment:
        """Return the checked config of a list of overrides.

        Raises ``ConfigError``, with a message that begins with ``where``, if it is invalid.
        """
        from omegaconf import OmegaConf

        try:
            files, values = self._split(overrides)
            shared = self._shared_parts(files, values)
            if shared is not None and (whole := shared.with_values(values)) is not None:
                return from_plain(Experiment, whole, shared.known)
            tree = self.tree(overrides)
            plain: Any = OmegaConf.to_container(
                tree, resolve=True, throw_on_missing=True, enum_to_str=True
            )
            if b"oc.env" in self._trees[files] or "oc.env" in str(overrides):
                token = _keeps_expressions.set(True)
                try:
                    for group in WRITTEN_GROUPS:
                        _keep_expressions(tree, plain, group)
                finally:
                    _keeps_expressions.reset(token)
            return from_plain(Experiment, plain)
        except ConfigError as error:
            raise ConfigError(f"{where}{hide_values(str(error), list(overrides))}") from None
        except Exception as error:
            raise ConfigError(f"{where}{explain_config_error(error, overrides)}") from None

    def _shared_parts(
        self, files: tuple[str, ...], values: Sequence[Override]
    ) -> SharedParts | None:
        """Return what configs of the same files share, from the second one on."""
        if files in self._trees and values and files not in self._shared:
            self._shared[files] = SharedParts.of(pickle.loads(self._trees[files]))
        return self._shared.get(files)

    def tree(self, overrides: Sequence[str]) -> DictConfig:
        """Return the config of a list of overrides as Hydra composes it, not checked."""
        from hydra import compose
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        files, values = self._split(overrides)
        if files not in self._trees:
            self._trees[files] = pickle.dumps(compose("config", overrides=list(files)))
        tree: DictConfig = pickle.loads(self._trees[files])
        try:
            for value in values:
                OmegaConf.update(tree, value.key_or_group, value.value(), merge=True)
        except OmegaConfBaseException:
            return compose("config", overrides=list(overrides))  # Hydra's own error names the key
        return tree

    def choices(self, overrides: Sequence[str]) -> dict[str, str]:
        """Return the names of the files that a list of overrides chooses, by group."""
        from hydra import compose

        config = compose("config", overrides=list(overrides), return_hydra_config=True)
        return dict(config.hydra.runtime.choices)

    def baseline_overrides(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Return the overrides of the baseline arm; empty if the config has none or is wrong.

        The baseline of a sweep has the first value of each option.
        """
        from omegaconf import OmegaConf

        try:
            tree = self.tree(overrides).ablation
            arms: Any = OmegaConf.to_container(tree.arms, resolve=False)
            own = arms.get(tree.baseline or next(iter(arms), None)) or {}
            sweep: Any = OmegaConf.to_container(tree.sweep, resolve=False)
            own |= {key: values[0] for key, values in sweep.items()}
        except Exception:  # composing the config has raised the error already
            return {}
        return {key: value for key, value in own.items() if key != "environment"}

    def _split(self, overrides: Sequence[str]) -> tuple[tuple[str, ...], list[Override]]:
        """Split overrides into those composed by Hydra, and single values applied afterwards."""
        parsed = [self._parse(override) for override in overrides]
        # A value that precedes an override which adds or deletes keys is left to Hydra, too.
        last = max((i for i, item in enumerate(parsed) if _changes_keys(item)), default=-1)
        values = [i for i, item in enumerate(parsed) if i > last and _is_value(item)]
        files = tuple(text for i, text in enumerate(overrides) if i not in values)
        return files, [parsed[i] for i in values]

    def _parse(self, override: str) -> Override:
        if override not in self._parsed:
            self._parsed[override] = parse_override(override)
        return self._parsed[override]


@dataclass
class SharedParts:
    """What configs of the same files share, so that a value costs what it changes.

    A study of a thousand cells composes thousands of configs of the same files, which differ in a
    few single values. Their JSON forms share all dictionaries on which no such value lies, and the
    groups built from these (:func:`labkit.config.from_plain`).
    """

    tree: DictConfig  # without single values; a value's type is checked in it
    plain: dict[str, Any]  # its JSON form
    known: dict[int, Any]  # the groups built from parts of ``plain``, by the identity of their form
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
        found, given = value_of(self.plain, value.key_or_group, ...), value.value()
        several = isinstance(found, dict | list) or isinstance(given, dict | list)
        if found is ... or several or "${" in line:
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


def _resolve_variable(name: str, *default: Any) -> Any:
    """Return what ``oc.env`` returns, or its expression. Hydra pickles this function for jobs."""
    from omegaconf.resolvers import oc

    value = oc.env(name, *default)
    return f"${{oc.env:{name}}}" if _keeps_expressions.get() and name in os.environ else value


def _keep_expressions(node: Any, plain: Any, key: Any) -> None:
    """Put the expressions of texts at and below a key of ``node`` into ``plain``, its values."""
    from omegaconf import Container
    from omegaconf.errors import OmegaConfBaseException

    child = node._get_node(key)
    if isinstance(child, Container) and not child._is_interpolation():
        for name in child if isinstance(plain[key], dict) else range(len(plain[key] or ())):
            _keep_expressions(child, plain[key], name)
        return
    if not isinstance(plain[key], str) or child is None or not child._is_interpolation():
        return
    with suppress(OmegaConfBaseException):  # not a text: a number, or a value that was decoded
        text = node[key]
        if isinstance(text, str) and EXPRESSION.search(text):
            plain[key] = text


def parse_override(text: str) -> Override:
    """Return an override as Hydra's grammar reads it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_overrides([text])[0]


def _changes_keys(override: Override) -> bool:
    return override.is_add() or override.is_force_add() or override.is_delete()


def _is_value(override: Override) -> bool:
    """Return whether an override sets a single value of the schema: no file, sweep or group."""
    key = override.key_or_group
    plain = not _changes_keys(override) and override.package is None and "/" not in key
    own = plain and not override.is_hydra_override() and not override.is_sweep_override()
    return own and ("." in key or key in options(Experiment))


def expand_sweep(
    overrides: Sequence[str], params: Mapping[str, Any] | None = None
) -> list[list[str]]:
    """Expand comma-separated values into one list of overrides per cell, in the sweeper's order.

    As in Hydra's sweeper, the last of several overrides of one key replaces the others.

    ``params``: ``hydra.sweeper.params`` of the composed config.

    >>> expand_sweep(["workload=chat,agent", "seed=1"])
    [['workload=chat', 'seed=1'], ['workload=agent', 'seed=1']]
    """
    values: dict[str, list[str]] = {}  # overrides by key
    swept = [f"{key}={value}" for key, value in (params or {}).items()]
    for override in map(parse_override, [*swept, *overrides]):
        key = override.get_key_element()
        if override.is_sweep_override():
            require(
                override.is_discrete_sweep(),
                f"{override.input_line}: not a list of values; write key=a,b,c",
            )
            values[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        else:
            values[key] = [f"{key}={override.get_value_element_as_str()}"]
    return [list(cell) for cell in itertools.product(*values.values())]


def unresolved(overrides: Any) -> list[str]:
    """Return a list of overrides of Hydra's config as they were typed.

    Reading an item would replace ``${oc.env:NAME}`` in it by the variable's value.
    """
    from omegaconf import OmegaConf

    typed: Any = OmegaConf.to_container(overrides, resolve=False)
    return list(typed)


def config_folders(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the folders of the user's files that a command names (``--config-dir``).

    A folder below the working folder is returned relative to it.

    >>> config_folders(["hydra.searchpath=['file:///a/b','file:///c d']", "seed=1"])
    ('/a/b', '/c d')
    """
    parsed = (parse_override(o) for o in overrides if o.startswith("hydra.searchpath="))
    urls = [url for one in parsed for url in one.value() or ()]  # type: ignore[union-attr]
    folders = [Path(url.removeprefix("file://")) for url in urls]
    here = Path.cwd()
    return tuple(
        str(folder.relative_to(here) if folder.is_relative_to(here) else folder)
        for folder in folders
    )


def first_cell(overrides: Sequence[str]) -> list[str]:
    """Return the overrides with the first value of each list, and without ranges to search.

    >>> first_cell(["workload=chat,agent", "engine.scheduler.chunk=interval(8,64)", "seed=1"])
    ['workload=chat', 'seed=1']
    """
    return [cell[0] for cell in map(_values, overrides) if cell]


def fixed_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that have a single value, which every trial of a search has.

    >>> fixed_overrides(["engine.threads=choice(1,2)", "seed=1"])
    ['seed=1']
    """
    return [override for override in overrides if _values(override) == [override]]


def _values(override: str) -> list[str]:
    """Return one override per listed value; an empty list for a range without listed values."""
    parsed = parse_override(override)
    if not parsed.is_sweep_override():
        return [override]
    values = parsed.sweep_string_iterator() if parsed.is_discrete_sweep() else ()
    return [f"{parsed.get_key_element()}={value}" for value in values]


def hydra_quote(value: Any) -> str:
    """Return a value in Hydra's override grammar, which reads it back unchanged."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{hydra_quote(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(hydra_quote(item) for item in value) + "]"
    text = str(value)
    if re.fullmatch(r"[A-Za-z_/][\w./-]*", text) and text.lower() not in ("null", "true", "false"):
        return text
    escaped = re.sub(r"(\\+)(?='|$)", r"\1\1", text).replace("'", "\\'")
    return f"'{escaped}'"
