"""``python -m labkit.regression BASE [HEAD] --on NAME...``: test whether a revision is slower.

BASE and HEAD are Git revisions of labkit's checkout, or of ``--repository DIR``. NAME is a workload
or an ablation, labkit's or one in ``--config-dir DIR``; the arms of an ablation are tested one by
one. Every test is an ordinary study of the arms ``base`` and ``head`` with an A/A control, in live
processes that take turns. Arguments ``key=value`` and ``~key`` are overrides of these studies,
which share the time of ``--minutes``. Exit codes, as ``git bisect run`` reads them: 0 if no primary
row is worse by the margin or more; 1 if a row is worse; 125 if a row or a whole NAME is undecided,
a revision does not run, or the program fails; 2 for a mistake in the command, at which a bisection
must stop (see docs/regression.md); 130 if interrupted, 141 if nobody reads the output.
"""

from __future__ import annotations

import argparse
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.analysis.findings import regression_gate
from labkit.analysis.findings.regression_gate import Outcome, RowResult
from labkit.cli.program_base import Program, user_path
from labkit.compare import margin
from labkit.config import Ablation, ConfigError, require
from labkit.config.option_index import override_key
from labkit.records import RecordError, read_cell
from labkit.records.metric_registry import OUTPUTS

BASE, HEAD = "base", "head"
ALPHA = 0.05  # of all studies of a command together
GROUPS = ("ablation/", "workload/")


@dataclass(frozen=True)
class Subject:
    """A study that compares the two revisions: its name and its overrides."""

    name: str
    overrides: tuple[str, ...]


def subjects(
    names: Sequence[str],
    base: Mapping[str, Any],
    head: Mapping[str, Any],
    folders: Sequence[str] = (),
) -> list[Subject]:
    """Return a subject for each workload, and for each arm of each ablation.

    ``names``: those of workloads and ablations, with or without their group. ``base``, ``head``:
    the environments of the arms. ``folders``: those of the user's files. Raises ``ConfigError`` if
    a name is neither, or both.
    """
    from labkit.cli import hydra_arguments, multirun_composition
    from labkit.experiment.hydra.hydra_composer import Composer, hydra_quote

    found: list[Subject] = []
    composer, flags = Composer(), hydra_arguments.parse(_folder_flags(folders)).overrides
    roots = (*map(Path, folders), hydra_arguments.CONF)
    with multirun_composition.initialized():
        for name in names:
            paths = [name] if name.startswith(GROUPS) else [f"{group}{name}" for group in GROUPS]
            paths = [p for p in paths if any((root / f"{p}.yaml").is_file() for root in roots)]
            require(
                bool(paths),
                f"--on {name}: there is no such ablation or workload; --config-dir DIR names a "
                "folder of your own",
            )
            require(
                len(paths) == 1,
                f"--on {name}: an ablation and a workload have this name; write "
                f"{' or '.join(paths)}",
            )
            selected = paths[0].replace("/", "=", 1)
            ablation = composer.compose([*flags, selected]).ablation
            arms = ablation.arms
            dotted = next((arm for arm in arms if "." in arm), None)
            require(
                dotted is None,
                f"--on {name}: no override can drop arm {dotted}, whose name has a dot; rename it",
            )
            for arm, overrides in arms.items():
                own = _environment(f"--on {name}: arm {arm}", overrides)
                pair = {
                    BASE: {**overrides, "environment": {**own, **base}},
                    HEAD: {**overrides, "environment": {**own, **head}},
                }
                words = (
                    selected,
                    *(f"~ablation.arms.{other}" for other in arms),
                    *(f"+ablation.arms.{a}={hydra_quote(o)}" for a, o in pair.items()),
                    f"ablation.baseline={BASE}",
                    *_without_claims(ablation),
                    "ablation.published=null",
                )
                found.append(Subject(f"{name} ({arm})" if len(arms) > 1 else name, words))
    return found


def _environment(where: str, overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an arm's own environment, to which a revision is added; refuse one that has it."""
    own = overrides.get("environment", {})
    require(isinstance(own, Mapping), f"{where}: environment must be a map, not {own!r}")
    fixed = next((key for key in ("python", "revision", "repository") if key in own), None)
    require(
        fixed is None,
        f"{where} has an environment.{fixed} of its own, to which no revision can be added",
    )
    return dict(own)


def _without_claims(ablation: Ablation) -> list[str]:
    """Return the overrides that drop claims about outputs, and about arms called base or head."""
    limits = (f"ablation.claims.quality.{name}=null" for name in ablation.claims.quality.limits())
    dropped = ["ablation.claims.identity=none", *limits]
    dropped += [
        f"~ablation.claims.engaged.{arm}" for arm in (BASE, HEAD) if arm in ablation.claims.engaged
    ]
    if {BASE, HEAD} & set(ablation.claims.out_of_memory):
        dropped.append("ablation.claims.out_of_memory=[]")
    if OUTPUTS in ablation.metrics:
        others = ",".join(name for name in ablation.metrics if name != OUTPUTS)
        dropped.append(f"ablation.metric=[{others}]" if others else "ablation.metric=null")
    return dropped


def _folder_flags(folders: Sequence[str]) -> list[str]:
    return [word for folder in folders for word in ("--config-dir", folder)]


def _refuse(overrides: Sequence[str], found: Sequence[Subject], minutes: float | None) -> None:
    """Refuse overrides of what the command's other words set, and several values of one option.

    ``found``, ``minutes``: the studies, and their time if it is given. Raises ``ConfigError``.
    """
    from labkit.cli import hydra_arguments, multirun_composition

    named = {override_key(word) for subject in found for word in subject.overrides}
    refused = {
        "out": "set it with --out DIR",
        "design.margin_pct": "set it with --margin PCT",
        "ablation": "name it after --on",
        **({"workload": "name it after --on"} if "workload" in named else {}),
        **({} if minutes is None else {"design.time": "--minutes sets it; leave one of them out"}),
        **({"design.alpha": f"{len(found)} tests share {ALPHA:g}"} if len(found) > 1 else {}),
    }
    for word in overrides:
        reason = refused.get(override_key(word))
        require(reason is None, f"{word}: {reason}")
        require(
            override_key(word) != "ablation.metric" or OUTPUTS not in re.findall(r"\w+", word),
            f"{word}: a test is about speed; name other metrics than {OUTPUTS}",
        )
    typed = hydra_arguments.parse(overrides).overrides
    multirun_composition.refuse_sweeps(typed, "give a single value; a test has no sweep")


def _study(subject: Subject, out: Path, overrides: Sequence[str], plan: bool) -> list[RowResult]:
    """Run a subject's study, or print its plan; raise ``KeyboardInterrupt`` if that ended it."""
    from labkit.analysis.model.cell_model import Cell
    from labkit.cli import hydra_arguments, multirun_composition, run_study
    from labkit.experiment.compose.cell_name import cell_name
    from labkit.experiment.hydra.hydra_composer import hydra_quote

    folder = f"out={hydra_quote(str(out))}"
    command = hydra_arguments.parse([*subject.overrides, *overrides, folder])
    if run_study.run(command, pictures=False) == 130:
        raise KeyboardInterrupt
    if plan:
        return []
    # A folder that is used again may hold cells of another margin, time or workload.
    _, task = multirun_composition.hydra_and_task(command)
    cell = Cell.from_json(read_cell(out / cell_name(task)))
    return list(regression_gate.row_results(subject.name, cell, HEAD))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. That of a defect is not 1, "worse"."""
    from labkit.engine.user_classes import UserClassError
    from labkit.experiment import StudyError
    from labkit.experiment.launch.exported_revision import RevisionError
    from labkit.machine.cache_entries import CacheError

    failed = (RevisionError, StudyError, RecordError, CacheError, UserClassError, OSError)
    try:
        return _parser().run(
            argv,
            _run,
            refused=(ConfigError,),
            failed=failed,
            failed_status=Outcome.undecided.value,
        )
    except Exception:
        traceback.print_exc()
        return Outcome.undecided.value


def _parser() -> Program:
    parser = Program(
        prog="python -m labkit.regression",
        description="Test whether a Git revision is slower than another (docs/regression.md).",
    )
    parser.add_argument(
        "words",
        nargs="+",
        metavar="BASE [HEAD] [key=value ...]",
        help="the revisions (HEAD: what is checked out), and overrides of the studies",
    )
    parser.add_argument(
        "--on",
        nargs="+",
        action="extend",
        required=True,
        metavar="NAME",
        help="workloads and ablations",
    )
    parser.add_argument(
        "--config-dir",
        action="append",
        default=[],
        metavar="DIR",
        help="folder of your own workloads and ablations; may be given several times",
    )
    parser.add_argument(
        "--repository", metavar="DIR", help="Git checkout of the revisions (default: labkit's own)"
    )
    parser.add_argument(
        "--margin", type=margin, default=2.0, metavar="PCT", help="design.margin_pct (default 2)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="N",
        help="time for measuring, shared by all studies (default: design.time for each)",
    )
    parser.add_argument(
        "--summary", type=user_path, metavar="FILE", help="append a Markdown summary"
    )
    parser.add_argument("--out", type=user_path, metavar="DIR", help="folder of the studies")
    return parser


def _run(options: argparse.Namespace) -> int:
    from labkit.cli import multirun_composition, run_study
    from labkit.experiment.launch.python_environment import PythonEnvironment

    regression_gate.check_summary(options.summary)
    given = [*options.words, *options.on]
    overrides = [word for word in given if "=" in word or word.startswith("~")]
    revisions = [word for word in options.words if word not in overrides]
    names = [word for word in options.on if word not in overrides]
    require(0 < len(revisions) <= 2, f"{len(revisions)} revisions: write BASE, or BASE and HEAD")
    require(bool(names), "--on names no workload or ablation; write --on NAME")
    multirun_composition.register()
    base, head = (
        PythonEnvironment.resolve({"revision": name, "repository": options.repository}).identity()
        for name in (revisions[0], revisions[1] if len(revisions) > 1 else "HEAD")
    )
    found = subjects(names, base, head, options.config_dir)
    _refuse(overrides, found, options.minutes)
    plan = multirun_composition.only_plans(overrides)
    design = [*_folder_flags(options.config_dir), f"design.margin_pct={options.margin:g}"]
    if options.minutes is not None:
        design.append(f"design.time={60 * options.minutes / len(found):g}")
    if len(found) > 1:
        design += [f"design.alpha={ALPHA / len(found):g}", "design.looks=[]"]
    results: dict[str, list[RowResult]] = {}
    commits = [str(arm["revision"])[:12] for arm in (base, head)]
    with run_study.claimed_folder(options.out, plan) as out:
        for number, subject in enumerate(found):
            # A folder of these commits alone, else the report in a bisection's ``--out`` mixes all.
            folder = out / "-".join([str(number), *commits])
            rows = _study(subject, folder, [*design, *overrides], plan)
            results.setdefault(subject.name, []).extend(rows)
    if plan:
        return 0
    text = regression_gate.markdown(" against ".join(reversed(commits)), results, options.margin)
    regression_gate.publish_summary(text, options.summary)
    print(text)
    return regression_gate.total(results).value


if __name__ == "__main__":
    sys.exit(main())
