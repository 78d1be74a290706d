"""Scoring workloads (``workload.kind=scoring``): every arm scores the same windows of text.

The tokens are given; no token is generated (teacher forcing). The metric is the speed of scoring.
The record also has the quality of each arm, compared with the baseline of the same block:
perplexity, KL divergence and agreement of the next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from labkit.config import PRESETS, Api, ConfigError, Experiment, OpenAIServer, require
from labkit.engine.memory_budget import model_footprint
from labkit.engine.model import compute_dtype
from labkit.models import resolve
from labkit.workload import in_process_rules
from labkit.workload.measurement import Estimate
from labkit.workload.scoring import text_windows
from labkit.workload.workload_protocols import START_SECONDS, InterleavedArms, TurnContext

if TYPE_CHECKING:
    from labkit.workload.scoring.interleaved_scoring_arms import ScoringArm

# Measured on a two-core x86-64 with AVX-512; for estimates only.
FLOPS = 60e9
PROCESS_BYTES = 250 << 20
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
        text_windows.windows_of(experiment, resolve(experiment.model))

    def units(self, experiment: Experiment) -> int:
        """Return the number of windows."""
        return len(text_windows.windows_of(experiment, resolve(experiment.model)))

    def apart(self, experiments: Sequence[Experiment]) -> str | None:
        """Return the reason that the arms cannot share a process, or None if they can.

        Raises ``ConfigError`` if the arms differ in an option of ``SHARED``.
        """
        _check_shared(experiments)
        return in_process_rules.requests([experiment.engine for experiment in experiments])

    def not_live(self, experiments: Sequence[Experiment]) -> str | None:
        """Return the reason that the arms cannot take turns in processes of their own, or None.

        Raises ``ConfigError`` if the arms differ in an option of ``SHARED``.
        """
        _check_shared(experiments)
        return in_process_rules.live_requests([experiment.engine for experiment in experiments])

    def refuse_apart(self, reason: str) -> NoReturn:
        """Refuse to run arms one after another, because the baseline's process would have ended.

        Raises
        ------
        ConfigError
            Always.
        """
        raise ConfigError(
            "workload.kind=scoring compares every arm with the baseline round by round, but the "
            f"arms would run in processes one after another: {reason}; set design.isolation=auto "
            "and design.confirm=0"
        )

    def load(self, experiments: Sequence[Experiment], context: TurnContext) -> InterleavedArms:
        """Create an engine for every arm, in random order. The engines share loaded models.

        Raises ``EngineError`` if the arms score different windows.
        """
        from labkit.engine.engine_protocol import EngineError
        from labkit.workload.scoring.interleaved_scoring_arms import InterleavedScoring
        from labkit.workload.scoring.reference_exchange import OTHER_WINDOWS

        first = experiments[0]
        windows = text_windows.windows_of(first, resolve(first.model))
        for other in experiments[1:]:
            if text_windows.windows_of(other, resolve(other.model)) != windows:
                raise EngineError(OTHER_WINDOWS)
        return InterleavedScoring(_load_arms(experiments, context), windows, context)

    def estimate(self, experiment: Experiment) -> Estimate:
        workload, loading = experiment.workload, _loading(experiment)
        facts = model_footprint.from_model(experiment.model, *loading)
        facts = facts or model_footprint.from_weights(resolve(experiment.model).path, *loading)
        tokens = (workload.num_windows or GUESSED_WINDOWS) * workload.window_tokens
        seconds = START_SECONDS + 2 * 2 * facts.matmul_weights * tokens / FLOPS
        return Estimate(seconds, PROCESS_BYTES + facts.weight_bytes)


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


def _loading(experiment: Experiment) -> tuple[str | None, compute_dtype.MatrixStorage]:
    engine = experiment.engine
    return compute_dtype.cast_target(engine), compute_dtype.matrix_storage(engine)


def _load_arms(experiments: Sequence[Experiment], context: TurnContext) -> list[ScoringArm]:
    from labkit.engine import create
    from labkit.engine.runner.shared_models import SharedModels
    from labkit.models import tokenizer
    from labkit.workload.scoring.interleaved_scoring_arms import ScoringArm

    models, arms = SharedModels(), dict[int, ScoringArm]()
    loading = list(range(len(experiments)))
    context.order.shuffle(loading)
    try:
        for index in loading:
            experiment = experiments[index]
            with context.turn(index):
                path = resolve(experiment.model).path
                engine = create(experiment.engine, path, models)
                arms[index] = ScoringArm(engine, experiment.workload, tokenizer.load(path))
    except BaseException:
        for arm in arms.values():
            arm.engine.close()
        raise
    return [arms[index] for index in sorted(arms)]


KIND = ScoringKind()
