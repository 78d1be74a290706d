"""What ``claims.engaged`` may name: arms that there are, and counters that somebody counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from labkit.config import LAYOUT_OF, Engine, Experiment, option_index, own_classes, require
from labkit.config.option_index import did_you_mean
from labkit.engine import compute_dtype
from labkit.engine.budget import model_footprint
from labkit.records import counter_registry

WEIGHTS = "weights."  # what counters of weights begin with


def check(
    engaged: Mapping[str, Sequence[str]],
    arms: Mapping[str, Engine],
    dropped: Sequence[str] = (),
) -> None:
    """Refuse claims on no arm or on no counter.

    Parameters
    ----------
    engaged
        Counters by arm, as claimed.
    arms
        The arms' engines.
    dropped
        Arms that the command line took away; what is claimed of them is ignored.

    Raises
    ------
    ConfigError
        One line with the nearest name.
    """
    for arm, claimed in engaged.items():
        if arm in dropped:
            continue
        require(
            arm in arms,
            f"ablation.claims.engaged.{arm}: no such arm{did_you_mean(arm, arms)}; "
            f"the arms are {', '.join(arms)}",
        )
        for name in claimed:
            require(
                _may_claim(name, arms[arm]),
                f"ablation.claims.engaged.{arm}: no counter {name!r}"
                f"{did_you_mean(name, counter_registry.counter_names(choices))}; "
                "docs/counters.md lists them",
            )


def check_weights(engaged: Mapping[str, Sequence[str]], arms: Mapping[str, Experiment]) -> None:
    """Refuse claims on weights in a form that none of the arm's model will have.

    What the headers of the model's files do not tell, the run does.

    Raises
    ------
    ConfigError
        One line that names the arm, the counter and what there is.
    """
    for arm, experiment in arms.items():
        claimed = [name for name in engaged.get(arm, ()) if name.startswith(WEIGHTS)]
        if not claimed or experiment.engine.name not in (*LAYOUT_OF, "mlx_lm"):
            continue
        where, model = f"ablation.claims.engaged.{arm}", experiment.model
        require(
            experiment.workload.serves,
            f"{where}: {claimed[0]} of workload={experiment.workload.name}, which loads no model; "
            "choose one of requests",
        )
        held = model_footprint.weight_formats(
            model,
            compute_dtype.cast_target(experiment.engine),
            compute_dtype.matrix_storage(experiment.engine),
        )
        for name in claimed:
            form = name.removeprefix(WEIGHTS)
            require(
                not held
                or not held.isdisjoint(
                    compute_dtype.NARROW_DTYPES if form == "narrow" else (form,)
                ),
                f"{where}: {name} would stay 0, for all weights of model={model.name} are held in "
                f"{' and '.join(sorted(held))} here; choose another model (model=smollm2 is "
                "quantised, model=local model.path=PATH is any)",
            )


def check_launches(engaged: Mapping[str, Sequence[str]], arms: Mapping[str, Experiment]) -> None:
    """Refuse claims on what only an engine's steps count where launches alone are timed.

    Raises
    ------
    ConfigError
        One line that names the arm and the counter.
    """
    counted = (*counter_registry.LAUNCH_PREFIXES, counter_registry.USER_PREFIX)
    for arm, experiment in arms.items():
        workload = experiment.workload
        if not workload.times_kernels or own_classes(experiment.engine):
            continue
        for name in engaged.get(arm, ()):
            require(
                name.startswith(counted),
                f"ablation.claims.engaged.{arm}: {name} would stay 0, for workload={workload.name} "
                "times launches of attention and has no steps; choose one of requests",
            )


def _may_claim(name: str, arm: Engine) -> bool:
    own = own_classes(arm)
    if name.startswith(counter_registry.USER_PREFIX) or own.keys() & {
        "engine.name",
        "engine.attention.backend",
    }:
        return True
    if own and name.startswith("resolver."):
        return True
    return counter_registry.find_counter(name, choices) is not None


def choices(option: str) -> Sequence[str]:
    """Return the words that an option of the config may have."""
    found = option_index.find_option(option)
    if found is None or not found.choices:
        raise ValueError(f"{option}: not an option with a list of words")
    return found.choices
