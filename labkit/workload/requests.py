"""The kinds that serve requests: prompts from a source, through an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from labkit.config import BudgetPolicy, CacheState, Experiment, require
from labkit.engine import budget, dtype
from labkit.engine.budget import facts
from labkit.engine.budget.capacity import blocks_for, slots_for
from labkit.models import ModelDir, resolve
from labkit.workload import process_wide
from labkit.workload.measurement import Estimate
from labkit.workload.prompts import Prompt, prompt_key, stored
from labkit.workload.turns import START_SECONDS, Setting, Turns

if TYPE_CHECKING:
    from labkit.engine.shared_models import SharedModels
    from labkit.workload.drive import Clock
    from labkit.workload.serving import ServingSession

# Measured on a two-core x86-64 with AVX-512; for estimates only.
FLOPS = 60e9
STEP_SECONDS = 1.5e-3
PROCESS_BYTES = 250 << 20


class PromptSource(Protocol):
    """Where a workload's prompts come from."""

    def identity(self, experiment: Experiment) -> dict[str, Any]:
        """Everything besides the model that decides the prompts, as JSON types."""

    def make(self, experiment: Experiment, model: ModelDir) -> tuple[Prompt, ...]:
        """Tokenise the prompts, in the order of submission."""

    def lengths(self, experiment: Experiment) -> Sequence[tuple[int, int]]:
        """Guess every request's prompt and output tokens without a tokenizer."""


class RequestKind:
    """Serves what a source gives; ``per_request``: every request is a case of its own too."""

    def __init__(self, source: PromptSource, *, per_request: bool = False) -> None:
        self._source = source
        self._per_request = per_request

    def prepare(self, experiment: Experiment) -> None:
        """Build the model, tokenise the prompts into the cache, check that each can be served."""
        model = resolve(experiment.model)
        _check(self._prompts(experiment, model), experiment, model)

    def apart(self, experiments: Sequence[Experiment]) -> str | None:
        """Say why arms cannot take turns in one process; see ``process_wide.requests``."""
        return process_wide.requests([experiment.engine for experiment in experiments])

    def load(self, experiments: Sequence[Experiment], setting: Setting) -> Turns:
        """Create an engine for every arm, in random order, on models that they share."""
        from labkit.engine.shared_models import SharedModels
        from labkit.workload.serving_turns import Seat, ServingTurns
        from labkit.workload.turn_clock import TurnClock

        models, seats = SharedModels(), dict[int, Seat]()
        loading = list(range(len(experiments)))
        setting.order.shuffle(loading)
        try:
            for arm in loading:
                clock = TurnClock()
                with setting.turn(arm):
                    session = self._session(experiments[arm], setting.seed, models, clock)
                    seats[arm] = Seat(session, clock)
        except BaseException:
            for seat in seats.values():
                seat.session.close()
            raise
        return ServingTurns([seats[arm] for arm in sorted(seats)], setting.order, setting.turn)

    def _session(
        self, experiment: Experiment, seed: int, models: SharedModels, clock: Clock
    ) -> ServingSession:
        from labkit.engine import create
        from labkit.workload.pieces import Pieces
        from labkit.workload.serving import ServingSession

        model = resolve(experiment.model)
        prompts = self._prompts(experiment, model)
        return ServingSession(
            create(experiment.engine, model.path, models),
            prompts,
            experiment.workload,
            seed=seed,
            vocab_size=model.vocab_size,
            pieces=Pieces(model.path),
            per_request=self._per_request,
            model_digest=model.digest,
            clock=clock,
        )

    def estimate(self, experiment: Experiment) -> Estimate:
        """Count floating-point operations and steps; attention is left out."""
        lengths = self._source.lengths(experiment)
        prompt, output = (sum(column) for column in zip(*lengths, strict=True))
        model = _facts(experiment)
        flops = 2 * model.multiplied * (prompt + output)
        steps = output / min(experiment.workload.concurrency, len(lengths))
        times = 2 if experiment.workload.cache_state is CacheState.warm else 1
        seconds = START_SECONDS + times * (flops / FLOPS + steps * STEP_SECONDS)
        in_flight = sorted((p + o for p, o in lengths), reverse=True)
        longest = in_flight[: experiment.workload.concurrency]
        slots = slots_for(experiment.engine.kv, longest)
        kv = slots * budget.cached_bytes(experiment.engine, model)
        return Estimate(seconds=seconds, bytes=PROCESS_BYTES + model.weight_bytes + kv)

    def _prompts(self, experiment: Experiment, model: ModelDir) -> tuple[Prompt, ...]:
        identity = {"model": model.digest, **self._source.identity(experiment)}
        return stored(prompt_key(identity), lambda: self._source.make(experiment, model))


def _check(prompts: Sequence[Prompt], experiment: Experiment, model: ModelDir) -> None:
    highest = max(max(p.token_ids) for p in prompts)
    require(
        highest < model.vocab_size,
        f"model={model.name}: its tokenizer gives id {highest}, but its vocabulary has "
        f"{model.vocab_size} ids",
    )
    largest = max(prompts, key=lambda p: len(p.token_ids) + p.max_tokens)
    tokens = len(largest.token_ids) + largest.max_tokens - 1
    needed = blocks_for(experiment.engine.kv, [tokens])
    planned = budget.check(experiment)
    if planned is None or needed <= planned.blocks:
        return
    asked = experiment.engine.budget
    if asked.blocks is not None:
        option = f"engine.budget.blocks={asked.blocks}"
    else:
        fixed = asked.policy is BudgetPolicy.fixed
        option = f"bytes={asked.bytes}" if fixed else f"policy={asked.policy.value}"
        option = f"engine.budget.{option} ({planned.blocks} KV blocks)"
    require(
        False,
        f"{option}: request {largest.request_id} of workload={experiment.workload.name} needs "
        f"{needed} blocks for its {tokens} tokens",
    )


def _facts(experiment: Experiment) -> facts.ModelFacts:
    """Return the model's sizes; nothing is built."""
    kind = dtype.asked(experiment.engine)
    found = facts.of_model(experiment.model, kind)
    return found or facts.of_weights(resolve(experiment.model).path, kind)
