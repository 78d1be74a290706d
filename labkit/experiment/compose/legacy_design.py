"""Older designs: a cell that an earlier version of labkit began continues as it began.

Options may have had other names and defaults (:func:`with_present_names`).

Arms that take turns today ran in separate processes in earlier versions. A block then had 2 runs
of each arm, unless ``design.runs_per_block`` set another number. Blocks and rounds that follow from
``design.time`` today were fixed numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from labkit.config import Design, Isolation, PlannedLook
from labkit.config.engine.openai_server import PRESETS
from labkit.config.option import ReadBy
from labkit.config.option_index import option_groups
from labkit.experiment.cell import UNIT_OPTIONS
from labkit.records import Arm, RecordError, read_arms, read_cell

RUNS_PER_BLOCK = 2  # the default of earlier versions
ALLOCATION = "allocation.json"  # of a cell whose blocks or rounds follow from design.time


def with_present_names(config: Mapping[str, Any], named: Collection[str] = ()) -> dict[str, Any]:
    """Return an arm's config as this version writes it, if the options mean the same.

    Former names and values are replaced: ``engine.attention.gqa_sharing=true`` by ``unit=auto``,
    ``model.shape.architecture=qwen3`` by nothing, a preset's own timeout by null. The value false
    of ``gqa_sharing`` keeps its former name, and thus differs from any config of today: on the CPU,
    its units served one query head of each of several KV heads. An option that the rest of the
    config does not read is left out unless an override ``named`` it: it is a former default.
    """
    found = _copied(config)
    engine = found.get("engine") or {}
    attention, server = (engine.get(group) or {} for group in ("attention", "server"))
    if attention.get("gqa_sharing") is True:
        del attention["gqa_sharing"]
        attention.setdefault("unit", "auto")
    if ((found.get("model") or {}).get("shape") or {}).get("architecture") == "qwen3":
        del found["model"]["shape"]["architecture"]
    preset = PRESETS.get(server.get("preset", ""))
    if preset is not None and server.get("start_timeout_s") == preset.start_timeout_s:
        server["start_timeout_s"] = None
    for path, by, read_by in _conditions():
        choice = _value(found, by)
        if choice is not ... and choice not in read_by and ".".join(path) not in named:
            group = _value(found, path[:-1])
            if isinstance(group, dict):
                group.pop(path[-1], None)
    return found


def other_meanings(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what an arm of an earlier version asks otherwise than it did, one text each."""
    attention = (config.get("engine") or {}).get("attention") or {}
    if attention.get("gqa_sharing") is False and attention.get("device") == "cpu":
        yield (
            "engine.attention.unit=head (the author: gqa_sharing=false, whose units served one "
            "query head of each of several KV heads)"
        )


def _copied(config: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copied(v) if isinstance(v, Mapping) else v for k, v in config.items()}


def _value(config: Mapping[str, Any], path: Sequence[str]) -> Any:
    """Return an option's value or a group; ``...`` if the config has neither."""
    value: Any = config
    for name in path:
        value = value.get(name, ...) if isinstance(value, Mapping) else ...
    return value


@cache
def _conditions() -> tuple[tuple[tuple[str, ...], tuple[str, ...], ReadBy], ...]:
    """Return each option that another one may leave unread, and that one, as paths."""
    options = (entry for group in option_groups() for entry in group.entries)
    found = []
    for key, by in ((entry.key, entry.option.read_by) for entry in options):
        if by is not None and "." in by.key and "[]" not in key:
            choices = tuple(getattr(choice, "value", choice) for choice in by.choices)
            paths = tuple(key.split(".")), tuple(by.key.split("."))
            found.append((*paths, ReadBy(by.key, choices)))
    return tuple(found)


def as_begun(design: Design, auto: Isolation, folder: Path, blocks_given: bool) -> Design:
    """Return the design that continues the cell in ``folder``, with a resolved isolation.

    If there is no such cell, or this version began it, ``design`` is continued unchanged.

    Parameters
    ----------
    design
        The design that the command composes.
    auto
        The isolation that ``design.isolation=auto`` stands for.
    folder
        The cell's folder.
    blocks_given
        Whether the command sets ``design.blocks``. If so, the cell ends after that many blocks of
        the size with which it began. If not, it ends after the number of blocks that was
        declared when it began.
    """
    begun: dict[str, Any] = {}
    with suppress(RecordError):  # there is no such cell, or the runner will refuse it
        begun = dict(read_cell(folder)["design"])
    if design.blocks == 0 and begun and not (folder / ALLOCATION).exists():
        looks = [PlannedLook(**look) for look in begun.get("looks", ())]
        blocks = looks[-1].blocks if looks else int(begun["blocks"])
        runs = int(begun.get("runs_per_block", design.runs_per_block))
        design = replace(design, blocks=blocks, runs_per_block=runs, looks=looks)
    if design.isolation is Isolation.auto:
        separate = begun.get("isolation") == Isolation.process.value
        design = replace(design, isolation=Isolation.process if separate else auto)
    if design.isolation is not Isolation.process or design.runs_per_block != 1:
        return design
    if begun.get("runs_per_block") != RUNS_PER_BLOCK:
        return design
    looks = [PlannedLook(**look) for look in begun.get("looks", ())]
    blocks = looks[-1].blocks if looks else int(begun["blocks"])
    if blocks_given:
        blocks, looks = design.blocks, [look for look in looks[:-1] if look.blocks < design.blocks]
    return replace(design, blocks=blocks, runs_per_block=RUNS_PER_BLOCK, looks=looks)


def rounds_as_begun(arms: Sequence[Arm], folder: Path) -> tuple[Arm, ...]:
    """Return the arms with the rounds or requests with which ``folder`` began, if it fixed them."""
    begun: dict[str, Arm] = {}
    with suppress(RecordError):
        begun = {arm.name: arm for arm in read_arms(folder)}
    return tuple(_with_rounds_of(begun.get(arm.name), arm) for arm in arms)


def _with_rounds_of(begun: Arm | None, arm: Arm) -> Arm:
    old, new = (a.config.get("workload", {}) if a else {} for a in (begun, arm))
    option = UNIT_OPTIONS.get(new.get("kind", ""), "")
    if new.get(option) == 0 and old.get(option, 0) != 0:
        workload = {**new, option: old[option]}
        return replace(arm, config={**arm.config, "workload": workload})
    if new.get("repeats", 1) is not None or old.get("repeats") is None:
        return arm
    factors = {case["name"]: case["factor"] for case in old["cases"]}
    cases = [{**case, "factor": factors.get(case["name"], 1)} for case in new["cases"]]
    workload = {**new, "repeats": old["repeats"], "cases": cases}
    return replace(arm, config={**arm.config, "workload": workload})
