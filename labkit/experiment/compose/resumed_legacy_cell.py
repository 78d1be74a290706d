"""Older designs: a cell that an earlier version of labkit began continues as it began.

Options may have had other names and defaults (:mod:`labkit.config.former_options`).

Arms that take turns today ran in separate processes in earlier versions. A block then had 2 runs
of each arm, unless ``design.runs_per_block`` set another number. Blocks and rounds that follow from
``design.time`` today were fixed numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit.config import Design, Isolation, PlannedLook
from labkit.experiment.cell import ALLOCATION, UNIT_OPTIONS
from labkit.records import Arm, RecordError, read_arms, read_cell

RUNS_PER_BLOCK = 2  # the default of earlier versions


def as_begun(design: Design, auto: Isolation, folder: Path, blocks_given: bool) -> Design:
    """Return the design that continues the cell in ``folder``, with a resolved isolation.

    If there is no such cell, or this version began it, ``design`` is continued unchanged. But a
    cell that had ``design.across_hosts`` once keeps it. ``auto``: what ``design.isolation=auto``
    stands for. ``blocks_given``: whether the command sets ``design.blocks``. If so, the cell ends
    after that many blocks of the size with which it began; else after the number of blocks that was
    declared when it began.
    """
    begun: dict[str, Any] = {}
    with suppress(RecordError):  # there is no such cell, or the runner will refuse it
        begun = dict(read_cell(folder)["design"])
    looks = [PlannedLook(**look) for look in begun.get("looks") or ()]
    blocks = looks[-1].blocks if looks else int(begun.get("blocks") or 0)
    early = [look for look in looks[:-1] if look.blocks < design.blocks]
    if begun.get("across_hosts"):  # its runs may be from several hosts
        design = replace(design, across_hosts=True)
    if design.blocks == 0 and begun and not (folder / ALLOCATION).exists():
        runs = int(begun.get("runs_per_block", design.runs_per_block))
        design = replace(design, blocks=blocks, runs_per_block=runs, looks=looks)
    elif design.blocks and not design.looks and (folder / ALLOCATION).exists():
        # Looks that followed from the time stay, but for the last one: it moves with the blocks.
        design = replace(design, looks=early)
    if design.isolation is Isolation.auto:
        separate = begun.get("isolation") == Isolation.process.value
        design = replace(design, isolation=Isolation.process if separate else auto)
    if design.isolation is not Isolation.process or design.runs_per_block != 1:
        return design
    if begun.get("runs_per_block") != RUNS_PER_BLOCK:
        return design
    if blocks_given:
        blocks, looks = design.blocks, early
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
