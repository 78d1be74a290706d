"""Imported runs as a study: a cell of records, which every reader of studies takes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from labkit.config import Design
from labkit.importers.comparable_runs import (
    check_alike,
    differing_amounts,
    differing_settings,
    varying_settings,
    without_summaries,
    without_unmeasured,
)
from labkit.importers.exchangeable_blocks import RunPlan, plan_runs
from labkit.importers.imported_run import ImportedRun, ResultFileError
from labkit.records import (
    SCHEMA_VERSION,
    Arm,
    Record,
    publish_arm,
    publish_design,
    publish_records,
    write_json,
)

MAX_RUNS = 1000  # of an arm; the test's relabellings need 0.2 MB for each
MAX_NAME = 120  # bytes of an arm's name; a file's name has at most 255, and adds to it
UNPROVEN = (
    "the files do not show whether the arms gave the same outputs, or whether each ran the path "
    "that its name promises"
)


@dataclass(frozen=True)
class ImportedStudy:
    """The arms (the baseline first), and their runs in order.

    ``caveats`` could change the answer. ``unjudged`` names what is in the files and not in the
    runs.
    """

    arms: tuple[str, ...]
    plan: RunPlan
    caveats: tuple[str, ...] = ()
    unjudged: tuple[str, ...] = ()

    @property
    def runs(self) -> list[ImportedRun]:
        """All runs, block by block."""
        return [run for block in self.plan.blocks for run in block]

    @classmethod
    def of(cls, runs: Sequence[ImportedRun]) -> ImportedStudy:
        """Return the study of runs, the first's arm as baseline, or raise ``ResultFileError``."""
        arms = tuple(dict.fromkeys(str(run.arm) for run in runs))
        if len(arms) < 2:
            raise ResultFileError(f"{runs[0].file}: there is one arm; name others with --against")
        check_alike(runs)
        runs, repeated = without_summaries(runs)
        runs, unmeasured = without_unmeasured(runs)
        plan = plan_runs(arms, runs)
        per_arm = len(plan.blocks) * plan.runs_per_block
        if per_arm > MAX_RUNS:
            raise ResultFileError(
                f"{runs[0].file}: each arm has {per_arm:,} runs, and at most {MAX_RUNS:,} are "
                "tested; leave some out, or, if they are requests to one server, give them one "
                "value in the column run: they are repeats of one run"
            )
        settings = differing_settings(varying_settings(arms, runs))
        of_tool = dict.fromkeys(line for run in runs for line in run.caveats)
        unjudged = dict.fromkeys(name for run in runs for name in run.unjudged)
        return cls(
            arms,
            replace(plan, notes=(*repeated, *plan.notes, *settings)),
            (plan.order.value, *plan.failed, *differing_amounts(arms, runs), *of_tool),
            (*unmeasured, *unjudged),
        )


def arm_name(text: str) -> str:
    """Return a text as the name of an arm, which becomes part of files' names.

    A long one is cut, and a digest of the whole text keeps it distinct. It does not begin with a
    dot, because such files are taken for temporary ones.

    >>> arm_name("./old --fast")
    'old_--fast'
    """
    name = re.sub(r"[^\w.=,-]+", "_", text).lstrip("._").rstrip("_") or "arm"
    if len(name.encode()) <= MAX_NAME:
        return name
    digest = f"-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return name.encode()[: MAX_NAME - len(digest)].decode(errors="ignore") + digest


def write_study(study: ImportedStudy, folder: Path, question: str, margin_pct: float) -> Path:
    """Write the study's cell of records into ``folder`` and return the cell's folder."""
    plan, cell = study.plan, folder / "files"
    roles = {arm: "arm" if arm != study.arms[0] else "baseline" for arm in study.arms}
    records = [
        _record(run, roles[str(run.arm)], index, position)
        for index, block in enumerate(plan.blocks)
        for position, run in enumerate(block)
    ]  # before anything is written, because they refuse runs that contradict themselves
    (cell / "arms").mkdir(parents=True)
    (cell / "runs").mkdir()
    settings = {run.arm: run.settings for run in study.runs}
    varying = varying_settings(study.arms, study.runs)
    for arm, role in roles.items():
        overrides = {key: by_arm[arm] for key, by_arm in varying.items()}
        publish_arm(cell, Arm(arm, role, overrides, dict(settings[arm])))
    design: dict[str, Any] = {
        "seed": None,
        "blocks": len(plan.blocks),
        "runs_per_block": plan.runs_per_block,
        "control": False,
        "isolation": "process",
        "looks": [],
        "alpha": Design.alpha,
        "margin_pct": margin_pct,
        "imported": {
            "tool": study.runs[0].tool,
            "in_sequence": plan.order.weak,
            "could_change": list(study.caveats),
            "for_the_record": [*plan.notes, UNPROVEN],
        },
    }
    publish_design(cell, design)
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "cell": study.runs[0].tool,
        "question": question,
        "arms": [{"name": arm, "role": role} for arm, role in roles.items()],
        "design": design,
        "gates": {},
        "rows": [],
        "failures": [],
        "environment": {},
        "published": None,
        "overrides": [],
    }
    write_json(cell / "cell.json", manifest)
    publish_records(cell, *records)
    return cell


def _record(run: ImportedRun, role: str, block: int, position: int) -> Record:
    seconds = run.file.stat().st_mtime if run.started is None else run.started
    started = datetime.fromtimestamp(seconds, UTC)
    return Record(
        arm=str(run.arm),
        role=role,
        block=block,
        position=position,
        seed=0,
        outcome="crashed" if run.failure else "ok",
        detail=run.failure,
        started=f"{started:%Y-%m-%dT%H:%M:%SZ}",
        environment=dict(run.environment),
        cases=tuple(run.cases),
        notes={"imported": {"tool": run.tool, "file": str(run.file.name)}},
    )
