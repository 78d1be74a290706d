"""Older designs: a cell that an earlier version of labkit began continues as it began.

Options may have had other names (:func:`with_present_names`).

Arms that take turns today ran in separate processes in earlier versions. A block then had 2 runs
of each arm, unless ``design.runs_per_block`` set another number.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit.config import Design, Isolation, PlannedLook
from labkit.records import RecordError, read_cell

RUNS_PER_BLOCK = 2  # the default of earlier versions


def with_present_names(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an arm's config with the present name of ``engine.attention.gqa_sharing``.

    True was what ``unit=auto`` is now. False keeps its former name, and thus differs from any
    config of today: on the CPU, its units served one query head of each of several KV heads.
    """
    attention = dict(config.get("engine", {}).get("attention", {}))
    if attention.get("gqa_sharing") is not True:
        return config
    del attention["gqa_sharing"]
    return {**config, "engine": {**config["engine"], "attention": {"unit": "auto", **attention}}}


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
