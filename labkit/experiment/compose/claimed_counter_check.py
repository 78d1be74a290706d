"""Refuse ``claims.engaged`` on unknown arms or counters, or on counters that would stay 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from labkit.config import PRESET_LAYOUTS, ConfigError, Engine, Experiment, require, user_classes
from labkit.config.option_index import did_you_mean, find_option
from labkit.engine.memory_budget import model_footprint
from labkit.engine.model import dtype_resolution
from labkit.records import counter_registry

WEIGHTS_PREFIX = "weights."  # of counters of weights by storage format


def check_names(
    engaged: Mapping[str, Sequence[str]],
    arms: Mapping[str, Engine],
    dropped: Sequence[str] = (),
) -> None:
    """Raise ``ConfigError`` for claims on an arm or a counter that does not exist.

    ``engaged``: the claimed counters by arm. ``dropped``: arms that the command line removed;
    claims on them are ignored.
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
            if not _may_claim(name, arms[arm]):
                known = counter_registry.counter_names(option_choices)
                raise ConfigError(
                    f"ablation.claims.engaged.{arm}: no counter {name!r}"
                    f"{did_you_mean(name, known)}; docs/counters.md lists them"
                )


def check_weights(engaged: Mapping[str, Sequence[str]], arms: Mapping[str, Experiment]) -> None:
    """Refuse claims on a storage format of weights that the arm's model will not have.

    If the headers of the model's files do not list the formats, only the run checks the claim.
    """
    for arm, experiment in arms.items():
        claimed = [name for name in engaged.get(arm, ()) if name.startswith(WEIGHTS_PREFIX)]
        if not claimed or experiment.engine.name not in (*PRESET_LAYOUTS, "mlx_lm"):
            continue
        where, model = f"ablation.claims.engaged.{arm}", experiment.model
        require(
            experiment.workload.loads_model,
            f"{where}: {claimed[0]} would stay 0, because "
            f"workload={experiment.workload.name} loads no model; choose a workload that serves "
            "requests, such as workload=chat",
        )
        loading = dtype_resolution.WeightLoading.of(experiment.engine)
        forms = model_footprint.weight_formats(model, loading)
        for name in claimed:
            form = name.removeprefix(WEIGHTS_PREFIX)
            require(
                not forms
                or not forms.isdisjoint(
                    dtype_resolution.NARROW_DTYPES if form == "narrow" else (form,)
                ),
                f"{where}: {name} would stay 0, because all weights of model={model.name} are "
                f"held in {' and '.join(sorted(forms))} here; choose another model "
                "(model=smollm2 is quantised; model=local model.path=PATH loads any)",
            )


def check_launches(engaged: Mapping[str, Sequence[str]], arms: Mapping[str, Experiment]) -> None:
    """Refuse claims on counters of engine steps if the workload times single kernel launches."""
    counted = (*counter_registry.LAUNCH_PREFIXES, counter_registry.USER_PREFIX)
    for arm, experiment in arms.items():
        workload = experiment.workload
        if not workload.times_kernels or user_classes(experiment.engine):
            continue
        for name in engaged.get(arm, ()):
            require(
                name.startswith(counted),
                f"ablation.claims.engaged.{arm}: {name} would stay 0, because "
                f"workload={workload.name} times attention launches and runs no engine steps; "
                "choose a workload that serves requests, such as workload=chat",
            )


def _may_claim(name: str, arm: Engine) -> bool:
    """Return whether an arm may have a counter; with an engine or backend of a user's own, any."""
    own = user_classes(arm)
    return (
        name.startswith(counter_registry.USER_PREFIX)
        or not own.keys().isdisjoint(("engine.name", "engine.attention.backend"))
        or (bool(own) and name.startswith(("resolver.", "queue.", "prefix_eviction.")))
        or counter_registry.find_counter(name, option_choices) is not None
    )


def option_choices(option: str) -> Sequence[str]:
    """Return the choices of an option: ``engine.kv.layout`` has ``paged``, ``padded``, ..."""
    entry = find_option(option)
    if entry is None or not entry.choices:
        raise ValueError(f"{option}: not an option with a list of choices")
    return entry.choices
