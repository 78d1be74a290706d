"""The name of a cell's folder, made from the cell's overrides."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from labkit.config import require
from labkit.config.env_interpolation import EXPRESSION, EnvironmentText
from labkit.config.option_index import override_key
from labkit.experiment.hydra.hydra_composer import parse_override
from labkit.machine import file_digest
from labkit.records import PROCESSES_SUFFIX

KEYS_NOT_RECORDED = ("out", "plan", "redo", "design.blocks")
CHANGEABLE_KEYS = ("design.across_hosts", "design.timeout_s")  # in a study that is continued
MAX_LENGTH = 120  # bytes
ARMS, CLAIMS = "ablation.arms.", "ablation.claims."
SWEEP = "ablation.sweep"
SWEPT_VALUES = re.compile(r"([\w./]+):\[(.*?)\](?=,[\w./]+:\[|\}$)")


def cell_name(task_overrides: Iterable[str]) -> str:
    """Return the name of a cell's folder: its overrides, sorted, such as ``ablation=seq_map``.

    Characters other than ASCII letters, digits and ``=,._+~-`` become ``_``. A sweep of arms is
    named as it was typed: ``engine.threads=1,2``. A name of over 120 characters is cut and ends in
    a hash of the overrides.

    If the study's folder (``out=DIR``) has this cell under another name, that name is returned. The
    cell may have been begun with other values of the options that may change while a study is
    continued (``CHANGEABLE_KEYS``), or without them. Earlier versions of labkit kept letters of any
    script, or named arms of the command line by a word, and some of their experiments did not sweep
    the model.
    """
    overrides = _as_begun(list(task_overrides))
    recorded, fixed = (sorted(f(overrides)) for f in (recorded_overrides, fixed_overrides))
    names, folders = _names(recorded), study_folders(overrides)
    for name in dict.fromkeys([*names, *_names(fixed)]):
        if any((folder / name).is_dir() for folder in folders):
            return name
    begun = (name for folder in folders for name in _cells_with(fixed, folder))
    return next(begun, names[-1])


def _names(named: Sequence[str]) -> list[str]:
    """Return the names that versions of labkit give a cell with these overrides, today's last."""
    text = ",".join(named)
    return [_in_words(named), _cut(text, named), _cut(text, named, r"[^A-Za-z0-9=,._+~-]")]


def _in_words(named: Sequence[str]) -> str:
    """Return an earlier name, with words for arms: ``ablation=seq_map+numpy-1f2e3d4c``."""
    arms = sorted(override_key(o).removeprefix(ARMS) for o in named if _defines(o, ARMS))
    plain = [o for o in named if not _defines(o, ARMS) and not _defines(o, CLAIMS)]
    words = "".join(f"+{arm}" for arm in arms)
    ablation = next((i for i, o in enumerate(plain) if override_key(o) == "ablation"), None)
    if ablation is not None:
        plain[ablation] += words
    elif words:
        plain.insert(0, words)
    name = ",".join(plain) or "default"
    return _cut(f"{name}-{_digest(named)[:8]}", named)


def _cells_with(fixed: Sequence[str], folder: Path) -> Iterator[str]:
    """Yield the names of a study's cells that differ only in options that may change."""
    for path in sorted(folder.glob("*/cell.json")):
        name = path.parent.name
        # Others need not be read: an option that may change is in the name, unless it was cut off.
        shown = any(key in name for key in CHANGEABLE_KEYS) or len(name) >= MAX_LENGTH
        if shown and not name.endswith(PROCESSES_SUFFIX) and _begun_with(path) == fixed:
            yield name


def _begun_with(path: Path) -> list[str] | None:
    try:
        return _overrides_in(path, file_digest.file_state(path))
    except OSError:
        return None


@lru_cache(maxsize=1 << 14)
def _overrides_in(path: Path, state: file_digest.FileState) -> list[str] | None:
    """Return the overrides in a cell's file, which is read once for all cells of a command.

    ``state`` tells when it was written.
    """
    try:
        return sorted(fixed_overrides(json.loads(path.read_text("utf-8"))["overrides"]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None  # whoever reads the cell names the mistake


def _as_begun(overrides: list[str]) -> list[str]:
    """Return the overrides without an experiment's model if a cell of that name has run it."""
    models = [o.partition("=")[2] for o in overrides if override_key(o) == "model"]
    if len(models) != 1 or "experiment" not in map(override_key, overrides):
        return overrides
    others = [o for o in overrides if override_key(o) != "model"]
    cells = [folder / cell_name(others) for folder in study_folders(overrides)]
    return others if any(models == _arm_models(cell) for cell in cells) else overrides


def _arm_models(cell: Path) -> list[str]:
    try:
        arms = [json.loads(path.read_text("utf-8"))["config"] for path in cell.glob("arms/*.json")]
        return list({str(config["model"]["name"]) for config in arms if "model" in config})
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return []  # whoever reads the cell's arms names the mistake


def recorded_overrides(task_overrides: Iterable[str]) -> list[str]:
    """Return the overrides of a cell. A sweep of arms is returned as it was typed."""
    overrides = (one for override in task_overrides for one in _swept_apart(override))
    return [override for override in overrides if override_key(override) not in KEYS_NOT_RECORDED]


def fixed_overrides(task_overrides: Iterable[str]) -> list[str]:
    """Return the overrides of a cell that cannot change while its study is continued."""
    recorded = recorded_overrides(task_overrides)
    return [override for override in recorded if override_key(override) not in CHANGEABLE_KEYS]


def _swept_apart(override: str) -> list[str]:
    """Split a sweep of arms into one ``option=values`` per option; keep any other override."""
    if override_key(override) != SWEEP:
        return [override]
    return [f"{key}={values}" for key, values in SWEPT_VALUES.findall(override)] or [override]


def _defines(override: str, prefix: str) -> bool:
    return override_key(override).startswith(prefix) and not override.startswith("~")


def study_folders(overrides: Sequence[str]) -> list[Path]:
    """Return the folders that overrides name with ``out=``, as Hydra reads them.

    Raises ``ConfigError`` if one is not a single text, or refers to another option or resolver.
    """
    return [_study_folder(o) for o in overrides if override_key(o) == "out"]


def _study_folder(override: str) -> Path:
    named = parse_override(override)
    require(
        not named.is_sweep_override(),
        f"{override}: a study has one folder; write a name with a comma in quotes",
    )
    value = "" if named.value() is None else str(named.value())
    require(
        bool(value.strip()), f"{override}: names no folder; set out=outputs/NAME, or leave it out"
    )
    require(
        "${" not in EXPRESSION.sub("", value),
        f"{override}: only ${{oc.env:NAME}} is read in the name of a folder; write the name itself",
    )
    return Path(str(EnvironmentText.of(value)))


def _cut(name: str, overrides: Sequence[str], others: str = r"[^\w=,.+~-]") -> str:
    """Return a name whose ``others`` are ``_``, cut to at most ``MAX_LENGTH`` bytes."""
    name = re.sub(others, "_", name) or "default"
    if len(name.encode()) <= MAX_LENGTH:
        return name
    kept = name.encode()[: MAX_LENGTH - 13].decode(errors="ignore")
    return f"{kept}-{_digest(overrides)[:12]}"


def _digest(overrides: Sequence[str]) -> str:
    return hashlib.sha256(",".join(overrides).encode()).hexdigest()
