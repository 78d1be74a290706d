"""Scoring workloads (``workload.kind=scoring``): every arm scores the same windows of text.

The tokens are given; no token is generated (teacher forcing). The metric is the speed of scoring.
The record also has the quality of each arm, compared with the baseline of the same block:
perplexity, KL divergence and agreement of the next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from labkit.config import PRESETS, Api, ConfigError, Experiment, OpenAIServer, require
from labkit.engine import openai
from labkit.models import resolve
from labkit.workload import in_process_rules
from labkit.workload.requests.preflight_warnings import of_server
from labkit.workload.requests.request_workload_kind import FLOPS, PROCESS_BYTES, footprint
from labkit.workload.scoring import text_windows
from labkit.workload.workload_protocols import (
    START_SECONDS,
    Estimate,
    InterleavedArms,
    TurnContext,
    load_arms,
)

GUESSED_WINDOWS = 50  # of the packaged texts
# Workload options that must be equal in all arms, which score the same windows in the same rounds.
SHARED = ("concurrency", "window_tokens", "num_windows", "texts")


class ScoringKind:
    """The ``WorkloadKind`` of scoring workloads."""

    def check(self, experiment: Experiment) -> None:
        if experiment.engine.name == "openai":
            _check_server(experiment.engine.server)
        text_windows.check_windows(experiment)

    def prepare(self, experiment: Experiment) -> None:
        model = resolve(experiment.model)
        text_windows.windows_of(experiment, model)
        if experiment.engine.name == "openai":
            openai.prepare(experiment.engine, model.path)

    def units(self, experiment: Experiment) -> int:
        return len(text_windows.windows_of(experiment, resolve(experiment.model)))

    def apart(self, experiments: Sequence[Experiment]) -> str | None:
        """See ``WorkloadKind``. Raises ``ConfigError`` if arms differ in one of ``SHARED``."""
        _check_shared(experiments)
        return in_process_rules.first_reason(in_process_rules.REQUESTS, experiments)

    def not_live(self, experiments: Sequence[Experiment]) -> str | None:
        _check_shared(experiments)
        return in_process_rules.first_reason(in_process_rules.LIVE_REQUESTS, experiments)

    def refuse_apart(self, reason: str) -> NoReturn:
        raise ConfigError(
            "workload.kind=scoring compares every arm with the baseline round by round, but the "
            f"arms would run in processes one after another: {reason}; set design.isolation=auto "
            "and design.confirm=0"
        )

    def load(self, experiments: Sequence[Experiment], context: TurnContext) -> InterleavedArms:
        """Create an engine for every arm, in random order. The engines share loaded models.

        Raises ``EngineError`` if the arms score different windows.
        """
        from labkit.engine import create
        from labkit.engine.engine_protocol import EngineError
        from labkit.engine.runner.shared_models import SharedModels
        from labkit.models import tokenizer
        from labkit.workload.scoring.interleaved_scoring_arms import (
            OTHER_WINDOWS,
            InterleavedScoring,
            ScoringArm,
        )

        first = experiments[0]
        windows = text_windows.windows_of(first, resolve(first.model))
        for other in experiments[1:]:
            if text_windows.windows_of(other, resolve(other.model)) != windows:
                raise EngineError(OTHER_WINDOWS)
        models = SharedModels()

        def load(index: int) -> ScoringArm:
            path = resolve(experiments[index].model).path
            engine = create(experiments[index].engine, path, models)
            return ScoringArm(engine, experiments[index].workload, tokenizer.load(path))

        arms = load_arms(len(experiments), context, load, lambda arm: arm.engine.close())
        return InterleavedScoring(arms, windows, context)

    def estimate(self, experiment: Experiment) -> Estimate:
        workload, model = experiment.workload, footprint(experiment)
        tokens = (workload.num_windows or GUESSED_WINDOWS) * workload.window_tokens
        starts, warnings = experiment.engine.server_start_s, tuple(of_server(experiment))
        seconds = START_SECONDS + starts + 2 * 2 * model.matmul_weights * tokens / FLOPS
        return Estimate(seconds, PROCESS_BYTES + model.weight_bytes, warnings, starts)


def _check_shared(experiments: Sequence[Experiment]) -> None:
    first, *others = (experiment.workload for experiment in experiments)
    for name in SHARED:
        differs = any(getattr(other, name) != getattr(first, name) for other in others)
        require(
            not differs,
            f"the arms differ in workload.{name}, but with workload.kind=scoring all arms score "
            "the same windows in the same rounds; set it for the whole study",
        )


def _check_server(server: OpenAIServer) -> None:
    openai.check_http_extra()
    returning = [name for name, preset in PRESETS.items() if preset.prompt_logprobs]
    require(
        server.server_preset.prompt_logprobs,
        f"engine.server.preset={server.preset}: this server returns no log probabilities of "
        f"prompts, which workload.kind=scoring needs; presets that do: {', '.join(returning)}",
    )
    require(
        server.api is Api.completions,
        f"engine.server.api={server.api.value}: workload.kind=scoring sends token ids, which only "
        "engine.server.api=completions takes; set it",
    )


KIND = ScoringKind()
