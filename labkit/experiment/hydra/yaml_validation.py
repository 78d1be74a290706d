"""The user's YAML files, checked before Hydra reads them; messages name the file, key and line.

Hydra and OmegaConf expand every alias, convert whatever YAML reads to the type of its option
(``yes`` to the text ``True``), and replace ``${seed}`` in the text of a prompt.
"""

from __future__ import annotations

import dataclasses
import functools
import pickle
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra._internal.core_plugins import file_config_source, structured_config_source
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import GrammarParseError
from omegaconf.grammar_parser import parse

from labkit.config import ConfigError, Environment, Experiment, ListedRequest, Message, require
from labkit.config.option_index import field_kinds
from labkit.machine.file_digest import FileState, file_state

MAX_EXPANDED = 1_000_000  # values of a file with aliases
INTERPOLATION = re.compile(r"(?<!\\)(?:\\\\)*\$\{")
OVERRIDES = ("ablation.arms", "scales")  # maps of maps {option: value}
STRING, NULL = "tag:yaml.org,2002:str", "tag:yaml.org,2002:null"
REQUEST_TEXTS = (ListedRequest, Message)  # whose texts are no config, and never replaced


class FileConfigSource(file_config_source.FileConfigSource):
    """Hydra's source of files; the name must be that of Hydra's class."""

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path))
        state = file_state(path) if path.is_file() else None
        loaded: ConfigResult = pickle.loads(_load(self.provider, self.path, config_path, state))
        return loaded

    def __deepcopy__(self, memo: object) -> FileConfigSource:
        return self  # Hydra copies its sources for each config that it composes


class StructuredConfigSource(structured_config_source.StructuredConfigSource):
    """Hydra's source of schemas, which are not copied for each config either."""

    def __deepcopy__(self, memo: object) -> StructuredConfigSource:
        return self


def register() -> None:
    """Replace Hydra's sources of files and schemas; repeated calls are harmless."""
    Plugins.instance()  # registers Hydra's own sources
    SourcesRegistry.instance().types |= {
        "file": FileConfigSource,
        "structured": StructuredConfigSource,
    }


@functools.lru_cache(maxsize=1 << 10)
def _load(provider: str, folder: str, name: str, state: FileState | None) -> bytes:
    """Check and load a file once, pickled; ``state`` tells when it was written."""
    source = file_config_source.FileConfigSource(provider, folder)
    if state is not None:
        path = Path(folder, source._normalize_file_name(name))
        check_file(path, Path(name).parent.as_posix())
    return pickle.dumps(source.load_config(name))


def check_file(path: Path, group: str) -> None:
    """Check a file of a config group.

    Raises ``ConfigError``, which names the line, if it cannot be read, holds no options, names the
    study's folder, or has an alias that contains itself or expands to too much, a key twice, or a
    text that YAML or OmegaConf would alter.
    """
    try:
        text = path.read_text("utf-8-sig")
        root = yaml.compose(text, Loader=get_yaml_loader())
        if root is not None:
            is_map = isinstance(root, yaml.MappingNode)
            require(is_map, f"{_shown(path)}: it must hold options and their values, name: value")
            package, own = _package(text, group), _Check(_shown(path))
            own.check(root, package)
            if not package and group != ".":
                own.refuse_folder(root)
    except RecursionError:
        raise ConfigError(f"{path}: its values are nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise  # Hydra reads the file next, and names any other mistake


def _shown(path: Path) -> str:
    return re.sub(r"^.*/conf/", "conf/", str(path))


def _package(text: str, group: str) -> str:
    package = ConfigSource._get_header_dict(text[:512])["package"]
    if package in (None, "_group_"):
        return "" if group == "." else group.replace("/", ".")
    return str(package).removeprefix("_global_").removeprefix(".")


def locate(key: str, folders: Sequence[str], overrides: Sequence[str]) -> str | None:
    """Return the file and line that set a key to an interpolation; None if it is not certain.

    ``folders``: those of the user's files, besides Hydra's own.
    """
    hydra = GlobalHydra.instance()
    sources = hydra.config_loader().get_sources() if hydra.is_initialized() else []
    own = [source.path for source in sources if source.scheme() == "file"]
    found: dict[str, str] = {}  # the place, by the choice of the file
    for folder in map(Path, (*folders, *own)):
        for path in folder.rglob("*.yaml"):
            group = path.relative_to(folder).parent.as_posix()
            node = _node_of(path, group, key)
            if isinstance(node, yaml.ScalarNode) and "${" in node.value:
                found[f"{group}={path.stem}"] = f"{_shown(path)}, line {node.start_mark.line + 1}"
    chosen = [place for choice, place in found.items() if choice in overrides]
    places = chosen or list(found.values())
    return places[0] if len(places) == 1 else None


def _node_of(path: Path, group: str, key: str) -> Any:
    """Return the node that a file has for a key of the config, or None."""
    try:
        text = path.read_text("utf-8-sig")
        package = _package(text, group)
        root = yaml.compose(text, Loader=get_yaml_loader()) if "${" in text else None
    except (yaml.YAMLError, OSError, ValueError, RecursionError):
        return None
    prefix = f"{package}." if package else ""
    return _at(root, key.removeprefix(prefix)) if key.startswith(prefix) else None


def _at(node: Any, key: str) -> Any:
    """Return the node at a key such as ``prompts.listed[0].prompt``, or None.

    The keys of an arm's map are keys of options: ``arms.a.engine.threads`` is two keys deep.
    """
    if not key:
        return node
    if isinstance(node, yaml.SequenceNode):
        index, _, rest = key.removeprefix("[").partition("]")
        return _at(node.value[int(index)], rest.removeprefix(".")) if index.isdecimal() else None
    for found, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if re.match(re.escape(str(found.value)) + r"($|[.\[])", key):
            return _at(value, key.removeprefix(str(found.value)).removeprefix("."))
    return None


def kind_of(key: str) -> Any:
    """Return the type of an option or group, or None if there is none."""
    kind: Any = Environment if key == "environment" else Experiment
    for name in key.split(".") if key and kind is Experiment else ():
        kind = field_kinds(kind).get(name)
    return kind


@dataclasses.dataclass(frozen=True)
class _Check:
    """The checks of one file, which messages call ``name``."""

    name: str

    def check(self, root: yaml.Node, package: str) -> None:
        sizes: dict[int, int] = {}
        expanded = self._size(root, sizes, set())
        require(
            expanded <= max(MAX_EXPANDED, len(sizes)),
            f"{self.name}: its aliases (*name) expand to more than {MAX_EXPANDED:,} values",
        )
        self._texts(root, kind_of(package), package)

    def refuse_folder(self, root: yaml.Node) -> None:
        """Refuse ``out``, which only the command names; that of a file would be ignored."""
        folder = _at(root, "out")
        if folder is not None:
            raise ConfigError(
                f"{self._at_line(folder)}: out: the command names the study's folder; set out=DIR "
                "there"
            )

    def _at_line(self, node: yaml.Node) -> str:
        return f"{self.name}, line {node.start_mark.line + 1}"

    def _size(self, node: yaml.Node, sizes: dict[int, int], above: set[int]) -> int:
        """Return the number of values below a node with its aliases expanded; check its keys."""
        require(
            id(node) not in above,
            f"{self._at_line(node)}: an alias (*name) stands within its own anchor (&name)",
        )
        if id(node) not in sizes:
            above.add(id(node))
            children: list[yaml.Node] = []
            if isinstance(node, yaml.MappingNode):
                self._keys(node)
                children = [value for _, value in node.value]
            elif isinstance(node, yaml.SequenceNode):
                children = node.value
            sizes[id(node)] = 1 + sum(self._size(child, sizes, above) for child in children)
            above.discard(id(node))
        return sizes[id(node)]

    def _keys(self, node: yaml.MappingNode) -> None:
        first: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                before = first.setdefault(key.value, key)
                require(
                    before is key,
                    f"{self._at_line(key)}: the key {key.value!r} stands in line "
                    f"{before.start_mark.line + 1} already",
                )

    def _texts(self, node: yaml.Node, kind: Any, key: str, owner: Any = None) -> None:
        """Check the texts below a node, whose option or group has the type ``kind``."""
        if isinstance(node, yaml.ScalarNode):
            self._interpolation(node, key)
            if kind is str:
                self._text(node, key, owner)
        elif isinstance(node, yaml.SequenceNode):
            item = next(iter(typing.get_args(kind)), None)
            for index, child in enumerate(node.value):
                self._texts(child, item, f"{key}[{index}]", owner)
        elif isinstance(node, yaml.MappingNode):
            for name, child in node.value:
                path = f"{key}.{name.value}" if key else str(name.value)
                self._texts(child, self._child_kind(kind, key, str(name.value)), path, kind)

    def _interpolation(self, node: yaml.ScalarNode, key: str) -> None:
        try:
            if "${" in node.value:
                parse(node.value)
        except GrammarParseError as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"{self._at_line(node)}: {key}: not an interpolation ({reason}); for the text, "
                "write \\${"
            ) from None

    @staticmethod
    def _child_kind(kind: Any, key: str, name: str) -> Any:
        if key.rpartition(".")[0] in OVERRIDES:
            return kind_of(name)
        if key == "ablation.sweep":
            swept = kind_of(name)
            return list[str] if swept is str else None
        return field_kinds(kind).get(name)

    def _text(self, node: yaml.ScalarNode, key: str, owner: Any) -> None:
        if node.tag not in (STRING, NULL):
            value = get_yaml_loader()("").construct_object(node)
            require(
                str(value) == node.value,
                f"{self._at_line(node)}: {key}: YAML reads {node.value} as {value!r}; for the "
                f"text, write it in quotes: '{node.value}'",
            )
        if owner in REQUEST_TEXTS:
            require(
                INTERPOLATION.search(node.value) is None,
                f"{self._at_line(node)}: {key}: ${{...}} would be replaced by a value of the "
                "config; for the text, write \\${ (a JSON Lines file needs no backslash)",
            )
