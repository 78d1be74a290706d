"""Sweeps of options as arms: a command's comma-separated values become arms of one cell.

Hydra's sweeper makes one cell per combination of values. Runs of different cells are not randomised
together, so no test compares them. Arms of one cell share random blocks. So swept options of
``engine`` and ``model`` become arms if the command's ablation has a single arm. Sweeps of
``workload``, ``seed``, ``ablation`` and other groups still make cells.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from labkit.config import Ablation, ConfigError, Experiment, require, to_plain
from labkit.config.arm_sweep import SWEPT_GROUPS, key_parts, short_names, swept_overrides
from labkit.config.option_index import in_units_of_option, override_key
from labkit.experiment.compose.cell_name import cell_name, study_folders
from labkit.experiment.hydra.hydra_composer import Composer, expand_sweep, parse_override

SWEPT_KEY = re.compile(rf"(?:{'|'.join(SWEPT_GROUPS)})(?:[./]\w+)*")
SWEEP_ABLATION = "sweep"  # conf/ablation/sweep.yaml
QUESTION_KEYS = ("ablation", "experiment", "scale")  # sweeps of these ask several questions


def sweep_as_arms(
    overrides: Sequence[str], composer: Composer, hydra: Sequence[str] = ()
) -> list[str]:
    """Return a command's overrides with its swept options as one sweep of arms.

    The overrides are returned unchanged if no swept option can become arms or if the ablation has
    arms of its own. They are also unchanged if the study's folder already has a cell for one of the
    combinations, because the command then continues the study with one cell per combination.
    ``hydra``: the command's overrides of Hydra itself, for example of its search path. Hydra must
    be initialised.
    """
    given = list(overrides)
    swept, others = _split(given)
    keys = {override.split("=", 1)[0] for override in given}
    questions = [o for o in others if override_key(o) in QUESTION_KEYS]
    if not swept or any(len(expand_sweep([question])) > 1 for question in questions):
        return given
    cells = expand_sweep(given)
    folders = study_folders(given)
    if any((folder / cell_name(cell)).is_dir() for folder in folders for cell in cells):
        return given
    if keys.isdisjoint(("ablation", "experiment")) or "ablation=none" in given:
        others = [o for o in others if o != "ablation=none"]
        others.append(f"ablation={SWEEP_ABLATION}")
    # Other options may be valid only with the swept ones.
    firsts = [f"{key}={texts[0]}" for key, texts in swept.items()]
    ablation = _ablation_of([others, [*others, *firsts]], composer, hydra)
    if ablation is None or len(ablation.arms) != 1 or ablation.sweep:
        return given
    values = ",".join(f"{key}:[{','.join(texts)}]" for key, texts in swept.items())
    return [*others, f"++ablation.sweep={{{values}}}"]


def _ablation_of(
    choices: Sequence[Sequence[str]], composer: Composer, hydra: Sequence[str]
) -> Ablation | None:
    """Return the ablation of the first valid overrides; None: composing the cells will say why."""
    for overrides in choices:
        with suppress(ConfigError):
            return composer.compose([*hydra, *expand_sweep(overrides)[0]]).ablation
    return None


def _split(overrides: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Split overrides into the values of swept options by key, and all other overrides."""
    swept: dict[str, list[str]] = {}
    others: dict[str, str] = {}  # by key, as the last override of a key replaces the others
    for text in overrides:
        override = parse_override(text)
        key = override.get_key_element()
        swept.pop(key, None)
        others.pop(key, None)
        if SWEPT_KEY.fullmatch(key) and override.is_discrete_sweep():
            swept[key] = list(override.sweep_string_iterator())
        else:
            others[key] = text
    return swept, list(others.values())


def with_swept_arms(experiment: Experiment, choices: Mapping[str, str]) -> Experiment:
    """Return an experiment whose ablation has an arm for every combination of its sweep.

    The baseline is the combination of the values that the experiment has without the sweep. If the
    sweep does not contain it, the first combination is the baseline. ``choices``: the files that
    the experiment chooses, by group. Raises ``ConfigError`` if the ablation has several arms.
    """
    ablation = experiment.ablation
    require(
        len(ablation.arms) == 1,
        f"ablation.sweep: ablation={ablation.name} has {len(ablation.arms)} arms; a sweep needs "
        "an ablation with one arm, such as ablation=sweep",
    )
    ((name, own),) = ablation.arms.items()
    combinations = swept_overrides(ablation.sweep)
    configured = (
        arm for arm, overrides in combinations.items() if _has(experiment, overrides, choices)
    )
    engaged = ablation.claims.engaged.get(name)
    claims = ablation.claims
    if engaged is not None:
        claims = replace(claims, engaged={arm: engaged for arm in combinations})
    swept = replace(
        ablation,
        arms={arm: {**own, **overrides} for arm, overrides in combinations.items()},
        baseline=next(configured, next(iter(combinations))),
        claims=claims,
        question=_question(ablation),
    )
    return replace(experiment, ablation=swept)


def _question(ablation: Ablation) -> str:
    if ablation.name != SWEEP_ABLATION:
        return ablation.question
    return f"Which {' and '.join(short_names(list(ablation.sweep)).values())} is best?"


def _has(experiment: Experiment, overrides: Mapping[str, Any], choices: Mapping[str, str]) -> bool:
    """Return whether an experiment's options already have the values that ``overrides`` set."""
    return all(
        choices[key] == value
        if key in choices
        else _configured(experiment, key) == _in_unit(key, value)
        for key, value in overrides.items()
    )


def _in_unit(key: str, value: Any) -> Any:
    """Return a value such as ``1GiB`` as the number that its option holds."""
    text = in_units_of_option(f"{key}={value}").partition("=")[2]
    return float(text) if isinstance(value, str) and text != value else value


def _configured(experiment: Experiment, key: str) -> Any:
    value: Any = experiment
    for part in key_parts(key):
        value = getattr(value, part, None)
    return to_plain(value)
