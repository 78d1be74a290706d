"""The command line of ``python -m labkit``: Hydra's flags and overrides, checked and made plain."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from labkit.config import ConfigError
from labkit.config.option_index import did_you_mean, find_option, in_units_of_option, override_key

PACKAGE = Path(__file__).resolve().parents[1]
CONF = next(p for p in (PACKAGE / "conf", PACKAGE.parent / "conf") if (p / "config.yaml").is_file())

# Flags of Hydra that only print something, with the values that may follow each flag.
PRINT_FLAGS: dict[str, tuple[str, ...]] = {
    "--help": (),
    "--hydra-help": (),
    "--cfg": ("job", "hydra", "all"),
    "--info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
    "--shell-completion": (),
}
PROGRAMS = (
    "archive",
    "check",
    "compare",
    "doctor",
    "history",
    "judge",
    "mac",
    "post",
    "regression",
    "replicate",
    "report",
    "serve",
    "trace",
)
FOLDER_KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")
# Flags of Hydra that labkit refuses, with what to type instead.
REFUSED_FLAGS = {
    "--config-name": "choose a file of a group, such as experiment=NAME",
    "--config-path": "add a folder of your own files with --config-dir DIR",
    "--experimental-rerun": "repeat the study's command with out=DIR, which continues it",
}
TEXT_IN_MAP = re.compile(r"([\w./]+):\s*([^\s,{}\[\]'\"$]+)(?=\s*[,}])")
SHORT_FLAGS = {"-h": "--help", "-c": "--cfg", "-i": "--info", "-sc": "--shell-completion"}
SHORT_FLAGS |= {"-m": "--multirun", "-p": "--package", "-r": "--resolve", "-cd": "--config-dir"}
SHORT_FLAGS |= {"-cn": "--config-name", "-cp": "--config-path"}


@dataclass(frozen=True)
class Command:
    """A parsed command line: Hydra's flags, the overrides, and whether ``-m`` was given."""

    flags: tuple[str, ...]
    overrides: tuple[str, ...]
    multirun: bool

    @property
    def only_prints(self) -> bool:
        return any(flag in PRINT_FLAGS for flag in self.flags)


def parse(argv: Sequence[str]) -> Command:
    """Parse the command line.

    Raises ``ConfigError`` if a flag is unknown, or an argument is not an override.
    """
    flags: list[str] = []
    overrides: list[str] = []
    folders: list[str] = []
    words = [part for word in argv for part in word.split("=", 1 if word.startswith("--") else 0)]
    while words:
        word = words.pop(0)
        flag = SHORT_FLAGS.get(word, word)
        if flag == "--config-dir":
            folders.append(_config_folder(words.pop(0) if words else "", folders))
        elif flag == "--package":
            flags += [flag, _package(words.pop(0) if words else "")]
        elif flag in PRINT_FLAGS:
            flags += [flag, *_take_topic(flag, words)]
        elif flag in ("--multirun", "--resolve"):
            flags.append(flag)
        elif flag in REFUSED_FLAGS:
            raise ConfigError(f"{word}: labkit does not take this flag; {REFUSED_FLAGS[flag]}")
        elif flag.startswith("-"):
            known = ("--config-dir", "--package", "--multirun", "--resolve", *PRINT_FLAGS)
            close = did_you_mean(word.split("=")[0], known)
            raise ConfigError(f"{word}: no such flag{close}; run python -m labkit --help")
        elif "=" in word or word.startswith("~"):
            if override_key(word) in FOLDER_KEYS:
                raise ConfigError(f"{word}: labkit sets Hydra's folders; set out=DIR instead")
            overrides.append(read_override(_with_home(word)))
        elif word in PROGRAMS:
            raise ConfigError(f"{word} is a separate program; run python -m labkit.{word} --help")
        else:
            raise ConfigError(f"{word}: not an override; write key=value, such as ablation=seq_map")
    _check_flags(flags, overrides)
    rest = tuple(flag for flag in flags if flag != "--multirun")
    return Command(rest, (*_search_path(folders), *overrides), "--multirun" in flags)


def read_override(word: str) -> str:
    """Return a typed override for Hydra, with labkit's groups, units and texts."""
    return _as_typed(in_units_of_option(_selection(word)))


def _package(name: str) -> str:
    """Return the part of the config that ``--package`` names; refuse a flag in its place."""
    if not name or name.startswith("-"):
        raise ConfigError("--package: names no part of the config; write --package engine")
    return name


def _check_flags(flags: Sequence[str], overrides: Sequence[str]) -> None:
    """Refuse flags that exclude each other, or lack what they need."""
    printing = [flag for flag in flags if flag in PRINT_FLAGS]
    if len(printing) > 1:
        raise ConfigError(f"{' '.join(printing)}: give one of these flags")
    for flag in ("--package", "--resolve"):
        if flag in flags and "--cfg" not in flags:
            raise ConfigError(f"{flag}: only --cfg takes it; write --cfg job {flag}")
    if "--shell-completion" in flags and not any(o.startswith("install=") for o in overrides):
        raise ConfigError("--shell-completion: name a shell, such as install=bash")


def _with_home(override: str) -> str:
    """Expand ``~`` in ``out=~/FOLDER``; the shell does so only at the start of a word."""
    home = re.match(r"((?:\+\+)?out=['\"]?)(~[^/'\"]*)", override)
    return home[1] + os.path.expanduser(home[2]) + override[home.end() :] if home else override


def _take_topic(flag: str, words: list[str]) -> list[str]:
    """Take the value of a flag, which only ``--cfg`` requires, off ``words``."""
    allowed = PRINT_FLAGS[flag]
    if words and words[0] in allowed:
        return [words.pop(0)]
    if flag == "--help" and words and re.fullmatch(r"[\w./]+", words[0]):
        return [words.pop(0)]
    if flag == "--cfg":
        raise ConfigError(
            f"--cfg {words[0] if words else ''}: must be one of: {', '.join(allowed)}"
        )
    return []


def _selection(override: str) -> str:
    """Return ``+engine/kv=NAME`` as ``engine/kv=NAME``; other overrides unchanged."""
    # labkit's defaults list has all nested groups, and Hydra refuses the sign for a group in it.
    group = override[1:].partition("=")[0]
    nested = override.startswith("+") and "/" in group and "@" not in group
    return override[1:] if nested and (CONF / group).is_dir() else override


def _as_typed(override: str) -> str:
    """Quote a text that Hydra's grammar refuses, or reads as a number, a boolean or a map.

    >>> _as_typed("engine.server.command=serve --port {port}")
    "engine.server.command='serve --port {port}'"
    >>> _as_typed("model.name=12_000"), _as_typed("model.name=null"), _as_typed("model.name=a,b")
    ("model.name='12_000'", 'model.name=null', 'model.name=a,b')
    """
    key, _, value = override.partition("=")
    if value[:1] in "{[":
        _check_texts(override, value)
    entry = find_option(key.lstrip("+"))
    plain = re.fullmatch(r"[A-Za-z_/][\w./:,-]*", value) and value.lower() not in ("true", "false")
    if entry is None or entry.kind is not str or plain or value[:1] in ("", "'", '"'):
        return override
    from labkit.experiment.hydra.hydra_composer import hydra_quote

    return override if _is_read_as_typed(key, value) else f"{key}={hydra_quote(value)}"


def _is_read_as_typed(key: str, value: str) -> bool:
    """Return whether Hydra's grammar reads a text as it was typed, as null, or as several texts."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(f"{key}={value}")
        several = parsed.is_sweep_override() or parsed.value() is None
        return several or isinstance(parsed.value(), str) or str(parsed.value()) == value
    except HydraException:
        return False


def _check_texts(override: str, value: str) -> None:
    """Refuse a text within a map (``{model.name:1_0}``) that would be read as something else."""
    for key, text in TEXT_IN_MAP.findall(re.sub(r"'(?:\\.|[^'])*'", "''", value)):
        entry = find_option(key)
        is_text = key in ("prompt", "content") or (entry is not None and entry.kind is str)
        if is_text and not _is_read_as_typed("text", text):
            raise ConfigError(
                f"{override}: {text} is not read as a text; write it in quotes: {key}:'{text}'"
            )


def _config_folder(folder: str, others: Sequence[str]) -> str:
    """Return a folder of the user's files, after checking their names."""
    if not folder:
        raise ConfigError("--config-dir: names no folder; write --config-dir DIR")
    if not Path(folder).is_dir():
        raise ConfigError(f"--config-dir {folder}: no such directory")
    for file in sorted(Path(folder).rglob("*.yaml")):
        name = file.relative_to(folder)
        if (CONF / name).exists():
            raise ConfigError(f"{file}: labkit has {name} itself; choose another file name")
        if twice := next((other for other in others if (Path(other) / name).exists()), None):
            raise ConfigError(f"{file}: {twice} has {name} too; choose another file name")
    return folder


def _search_path(folders: Sequence[str]) -> list[str]:
    from labkit.experiment.hydra.hydra_composer import hydra_quote

    paths = [f"file://{Path(folder).resolve()}" for folder in folders]
    return [f"hydra.searchpath={hydra_quote(paths)}"] if paths else []
