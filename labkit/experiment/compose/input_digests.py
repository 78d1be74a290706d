"""Digests of the user's files that enter a cell: prompts, texts, clips, models, own classes.

They belong to an arm's identity, so that a study is not continued with other content under the same
names. The keys name an option, and the file's name if the option is a folder
(``model.path/model.safetensors``) or its place on the Python path if it is a module of a class
(``engine.name/mine/plain.py``); no path of the machine is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any

from labkit.config import ConfigError, is_class_path
from labkit.config.env_interpolation import with_values
from labkit.config.option_index import find_option
from labkit.engine.user_classes import source_files
from labkit.machine import file_digest
from labkit.records import Arm

FILES = ("workload.prompts.path", "workload.texts", "workload.questions")
FOLDERS = ("workload.clips",)
MODELS = ("model.path", "engine.drafts.draft_path", "workload.vlm")
MODEL_SUFFIXES = (".json", ".safetensors", ".gguf", ".jinja", ".model", ".txt", ".py", ".npz")
DIGEST_DIGITS = 16  # a difference is to be seen, not to be signed
PACKAGE = Path(__file__).parents[2]  # labkit's folder


def input_digests(config: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, str]:
    """Return the start of the SHA-256 of each file that an arm reads, by option.

    Files that labkit or a package ships are left out: their versions are in the records. So are an
    arm's own classes in the repository of its revision, which fixes them. ``config`` and
    ``environment`` are as in :class:`labkit.records.Arm`.
    """
    options = dict(_leaves(with_values(config)))
    named = {key: path for key, path in options.items() if isinstance(path, str)}
    files: dict[str, Path] = {}
    for key in FILES:
        if key in named:
            file = Path(named[key])
            files[key] = file if file.is_file() else file.expanduser()
    for key in FOLDERS:
        if key in named:
            files |= _below(key, Path(named[key]).expanduser())
    for key in MODELS:
        if key in named:
            files |= _model_files(key, named[key])
    for key, path in class_paths(config).items():
        sources = _own_sources(path, environment)
        files |= {f"{key}/{name}": file for name, file in sources.items()}
    return {key: _digest(path) for key, path in sorted(files.items()) if path.is_file()}


def named_as_begun(arm: Arm, now: Mapping[str, str]) -> dict[str, str]:
    """Return an arm's digests of now under the names that they had when its study began.

    Earlier versions named a class's module by its file alone (``OPTION/maps.py``), and thus one of
    several of a name. They also listed labkit's own modules where a class lay beside them, and no
    class of an arm with a revision. Beside labkit no missing module is noticed: it may be one of
    labkit's that has another name today.
    """
    named = dict(now)
    for option in {option_of(name) for name in now} - {*FILES, *FOLDERS, *MODELS}:
        begun = {name: digest for name, digest in arm.inputs.items() if option_of(name) == option}
        files = {name: digest for name, digest in now.items() if option_of(name) == option}
        if begun:
            earlier = any(map(_has_folder, files)) or f"{option}/__init__.py" in begun
            if any(map(_has_folder, begun)) or not earlier:
                continue
        elif "revision" not in arm.environment:
            continue
        present = {PurePath(name).name for name in files}
        gone = {name: sha for name, sha in begun.items() if PurePath(name).name not in present}
        kept = gone if _lists_labkit(gone) else {}
        named = {**kept, **{name: named[name] for name in named.keys() - files.keys()}}
        for short in {f"{option}/{file}" for file in present} if begun else ():
            own = [files[name] for name in files if PurePath(name).name == PurePath(short).name]
            named[short] = begun[short] if begun.get(short) in own else own[0]
    return named


def option_of(name: str) -> str:
    """Return the option of an input's name: ``model.path`` of ``model.path/config.json``."""
    return name.partition("/")[0]


def _has_folder(name: str) -> bool:
    return name.count("/") > 1


def _lists_labkit(names: Iterable[str]) -> bool:
    """Return whether names are those of labkit's modules: these were listed all together."""
    labkit = {path.name for path in PACKAGE.rglob("*.py")}
    return 2 * len(labkit & {PurePath(name).name for name in names}) > len(labkit)


def _own_sources(path: str, environment: Mapping[str, Any]) -> dict[str, Path]:
    """Return the files of the class ``path`` that no revision of the arm's environment fixes."""
    sources = source_files(path.partition(":")[0])
    if "repository" not in environment:  # a revision of labkit has only labkit's files
        return sources
    repository = Path(environment["repository"]).resolve()
    return {name: file for name, file in sources.items() if not file.is_relative_to(repository)}


def _leaves(options: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        key = f"{path}.{name}" if path else name
        if isinstance(value, Mapping):
            yield from _leaves(value, key)
        else:
            yield key, value


def _below(key: str, folder: Path, suffixes: tuple[str, ...] = ()) -> dict[str, Path]:
    files = folder.iterdir() if folder.is_dir() else ()
    return {
        f"{key}/{file.name}": file
        for file in files
        if not file.name.startswith(".") and (not suffixes or file.suffix in suffixes)
    }


def _model_files(key: str, name: str) -> dict[str, Path]:
    path = Path(name).expanduser()
    if path.is_file():
        return {key: path}
    if not path.is_dir():
        from labkit.models.model_directory import find_model

        try:
            path = find_model(name).path
        except ConfigError:  # composing the arm, or its run, names the mistake
            return {}
    return _below(key, path, MODEL_SUFFIXES)


def archived_files(arm: Arm) -> dict[str, Path]:
    """Return an arm's own classes and prompts, by the path that an archive gives them.

    ``sources/`` has the modules as a Python path sees them, ``inputs/`` the texts
    (:func:`text_name`).
    """
    config, environment = arm.config, arm.environment
    named = dict(_leaves(with_values(config)))
    files: dict[str, Path] = {}
    for key in FILES:
        if isinstance(named.get(key), str):
            text = Path(named[key]).expanduser()
            name = f"inputs/{text_name(arm, key, text.name)}"
            files |= {name: text} if text.is_file() else {}
    for name in class_paths(config).values():
        sources = _own_sources(name, environment)
        files |= {f"sources/{path}": file for path, file in sources.items()}
    return files


def is_archived(name: str) -> bool:
    """Return whether an archive with sources has the file of an input: a class's, or a text."""
    return option_of(name) not in (*FOLDERS, *MODELS)


def text_name(arm: Arm, key: str, file: str) -> str:
    """Return the name that an arm's text has in archives: ``OPTION/SHA256/FILE``.

    Two cells may have different texts of one name. Arms of earlier versions have no digests, and
    the name is ``OPTION/FILE``.
    """
    return "/".join(filter(None, (key, arm.inputs.get(key), file)))


def class_paths(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the path ``package.module:Class`` of every class of the user's own, by option."""
    return {
        key: value
        for key, value in _leaves(config)
        if isinstance(value, str)
        and is_class_path(value)
        and (entry := find_option(key)) is not None
        and entry.option.class_path
    }


def _digest(path: Path) -> str:
    path = path.resolve()
    return _file_digest(path, file_digest.file_state(path))


@lru_cache(maxsize=1 << 14)
def _file_digest(path: Path, state: file_digest.FileState) -> str:
    """Return the start of a file's SHA-256; ``state`` tells when it was written."""
    return file_digest.sha256(path)[:DIGEST_DIGITS]
