"""The contracts of kinds of workload and of sources of prompts."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from labkit import workload
from labkit.config import Experiment, count_text, is_class_path
from labkit.conformance.contract import Check, Compose, demand
from labkit.models import resolve
from labkit.workload.tokenized_prompt import Prompt
from labkit.workload.workload_protocols import Estimate, Measurement


def workload_checks(path: str, compose: Compose) -> Iterator[Check]:
    """Yield the checks of the workload ``path``: ``package.module:Class`` or a built-in name."""
    composed: list[Experiment] = []

    def load() -> None:
        own = {"workload.kind": path} if is_class_path(path) else {"workload": path}
        composed.append(compose(own))
        workload.check(composed[0])

    yield Check("it can be created, and check() accepts its settings", load, needed=True)
    (experiment,) = composed
    yield Check("estimate() returns seconds and bytes", partial(_check_estimate, experiment))
    yield Check("apart() returns a reason or None", partial(_check_apart, experiment))
    yield Check("prepare() runs", partial(workload.prepare, experiment), needed=True)
    measured: list[Measurement] = []

    def measure() -> None:
        measured.append(workload.measure(experiment))
        _require_measured(measured[0])

    yield Check("a run has finite measurements", measure, needed=True)

    def again() -> None:
        outputs = [_outputs(one) for one in (measured[0], workload.measure(experiment))]
        demand(outputs[0] == outputs[1], "a second run with the same seed has other outputs")

    yield Check("the same seed gives the same outputs", again)


def _check_estimate(experiment: Experiment) -> None:
    estimate = workload.estimate(experiment)
    demand(isinstance(estimate, Estimate), f"it returned {type(estimate).__name__}")
    numbers = (estimate.seconds, estimate.bytes)
    demand(
        all(math.isfinite(n) and n >= 0 for n in numbers),
        f"seconds and bytes are {numbers}; both must be finite and 0 or more",
    )


def _check_apart(experiment: Experiment) -> None:
    reason = workload.apart([experiment, experiment])
    demand(
        reason is None or (isinstance(reason, str) and "\n" not in reason),
        f"it returned {reason!r}; it must be None or one line",
    )


def _require_measured(measurement: Measurement) -> None:
    demand(bool(measurement.cases), "it has no cases")
    for case in measurement.cases:
        if case.skipped is not None:
            continue
        primary = [metric for metric in case.metrics if metric.primary]
        demand(bool(primary), f"case {case.case} has no primary metric")
        for metric in primary:
            demand(
                bool(metric.repeats) and all(map(math.isfinite, metric.repeats)),
                f"case {case.case}: {metric.name} is not finite: {list(metric.repeats)[:3]}",
            )


def _outputs(measurement: Measurement) -> list[Any]:
    return [(case.case, case.outputs) for case in measurement.cases]


def source_checks(path: str, compose: Compose) -> Iterator[Check]:
    """Yield the checks of the prompt source ``path``: ``package.module:Class`` or built-in name."""
    made: list[Any] = []

    def load() -> None:
        if is_class_path(path):
            module, _, name = path.partition(":")
            made.append(getattr(importlib.import_module(module), name)())
        else:
            from labkit.workload.sources import source_of

            made.append(source_of(compose({"workload.prompts.source": path})))

    yield Check("it can be created without arguments", load, needed=True)
    (source,), experiment = made, compose({})
    yield Check(
        "identity() is JSON, the same every time", partial(_check_identity, source, experiment)
    )
    yield Check(
        "make() returns prompts of the model's tokens", partial(_check_prompts, source, experiment)
    )
    yield Check(
        "make() returns the same prompts every time", partial(_check_again, source, experiment)
    )
    yield Check("lengths() are those of the prompts", partial(_check_lengths, source, experiment))


def _check_identity(source: Any, experiment: Experiment) -> None:
    one, other = (json.dumps(source.identity(experiment), sort_keys=True) for _ in range(2))
    demand(isinstance(json.loads(one), dict), f"it returned {one[:60]}; it must be a dict")
    demand(one == other, f"it returned {one[:60]}, then {other[:60]}")


def _check_prompts(source: Any, experiment: Experiment) -> None:
    model = resolve(experiment.model)
    prompts = source.make(experiment, model)
    demand(
        isinstance(prompts, tuple) and all(isinstance(p, Prompt) for p in prompts),
        f"it must return a tuple of Prompts, not {type(prompts).__name__}",
    )
    demand(bool(prompts), "it returned no prompt")
    names = [prompt.request_id for prompt in prompts]
    twice = next((name for name in names if names.count(name) > 1), None)
    demand(twice is None, f"two prompts have the request_id {twice}")
    for prompt in prompts:
        wrong = [token for token in prompt.token_ids if not 0 <= token < model.vocab_size]
        demand(
            not wrong,
            f"{prompt.request_id}: token {wrong[:1]} is not in the vocabulary of "
            f"{model.vocab_size} tokens",
        )


def _check_again(source: Any, experiment: Experiment) -> None:
    model = resolve(experiment.model)
    demand(
        source.make(experiment, model) == source.make(experiment, model),
        "a second call returned other prompts",
    )


def _check_lengths(source: Any, experiment: Experiment) -> None:
    prompts = source.make(experiment, resolve(experiment.model))
    lengths = [(int(prompt), int(output)) for prompt, output in source.lengths(experiment)]
    demand(
        len(lengths) == len(prompts),
        f"lengths() has {len(lengths)} entries, but there are {count_text(len(prompts), 'prompt')}",
    )
    for prompt, (_, output) in zip(prompts, lengths, strict=True):  # prompt tokens may be estimates
        demand(
            output == prompt.max_tokens,
            f"{prompt.request_id}: {output} output tokens, but max_tokens={prompt.max_tokens}",
        )
