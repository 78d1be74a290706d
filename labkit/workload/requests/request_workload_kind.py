"""Request workloads (``workload.kind=requests``): an engine serves prompts from a source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from labkit.config import (
    PRESET_LAYOUTS,
    Api,
    ArrivalKind,
    BudgetPolicy,
    CacheState,
    Experiment,
    is_class_path,
    require,
)
from labkit.engine import memory_budget, user_classes
from labkit.engine.memory_budget import model_footprint
from labkit.engine.memory_budget.model_footprint import ModelFootprint
from labkit.engine.memory_budget.required_kv_slots import blocks_for, slots_for
from labkit.engine.model import dtype_resolution
from labkit.machine import file_digest
from labkit.models import ModelDir, resolve
from labkit.workload import in_process_rules, sources
from labkit.workload.prompt_cache import cached_prompts, prompt_key
from labkit.workload.requests import post_run_profiling, preflight_warnings
from labkit.workload.requests.arrivals import check_timestamps
from labkit.workload.sources import PromptSource, SessionSource, TimestampedSource, source_of
from labkit.workload.tokenized_prompt import Prompt, take_first
from labkit.workload.workload_protocols import (
    START_SECONDS,
    Estimate,
    InterleavedArms,
    TurnContext,
    load_arms,
)

if TYPE_CHECKING:
    from labkit.engine.runner.shared_models import SharedModels
    from labkit.workload.requests.load_generator import Clock
    from labkit.workload.requests.serving_session import ServingSession

# Measured on a two-core x86-64 with AVX-512; for estimates only.
FLOPS = 60e9
STEP_SECONDS = 1.5e-3
PROCESS_BYTES = 250 << 20
CONVERSATION_SOURCES = ("chat", "agent", "listed", "file", "sharegpt", "vllm_custom")
MAX_PROMPT_TOKENS = 20_000_000  # token ids are cached as text


class RequestKind:
    """Serves the prompts of a source, by default the one named by ``workload.prompts.source``.

    A user's own kind may be a subclass that overrides ``source``.
    """

    def __init__(self, source: PromptSource | None = None) -> None:
        self._own_source = source

    def source(self, experiment: Experiment) -> PromptSource:
        return self._own_source or source_of(experiment)

    def check(self, experiment: Experiment) -> None:
        lengths = self._lengths(experiment)
        tokens = sum(prompt for prompt, _ in lengths)
        require(
            tokens <= MAX_PROMPT_TOKENS,
            f"workload={experiment.workload.name} has about {tokens:,} prompt tokens, but may have "
            f"at most {MAX_PROMPT_TOKENS:,}; set workload.num_requests",
        )
        require(
            "sent_req_s" not in experiment.ablation.metrics
            or not self._are_sent_at_once(experiment, len(lengths)),
            f"ablation.metric=sent_req_s: workload.concurrency={experiment.workload.concurrency} "
            f"sends all {len(lengths)} requests at once; set it below {len(lengths)}, or arrivals "
            "over time such as workload.arrivals.kind=poisson",
        )
        if experiment.workload.arrivals.kind is ArrivalKind.trace:
            check_timestamps(self.source(experiment), experiment)
        if experiment.engine.name == "openai":
            _check_server(experiment)

    def _are_sent_at_once(self, experiment: Experiment, count: int) -> bool:
        """Return whether none of ``count`` requests waits: for its arrival, a client or a turn."""
        workload, source = experiment.workload, self.source(experiment)
        sessions = source.num_sessions(experiment) if isinstance(source, SessionSource) else count
        clients = workload.concurrency or count
        return workload.arrivals.kind is ArrivalKind.at_once and clients >= count == sessions

    def prepare(self, experiment: Experiment) -> None:
        model = resolve(experiment.model)
        _check(self._prompts(experiment, model), experiment, model)
        if experiment.engine.name == "openai":
            from labkit.engine import openai

            openai.prepare(experiment.engine, model.path)

    def units(self, experiment: Experiment) -> int:
        return len(self._lengths(experiment))

    def apart(self, experiments: Sequence[Experiment]) -> str | None:
        return in_process_rules.first_reason(in_process_rules.REQUESTS, experiments)

    def not_live(self, experiments: Sequence[Experiment]) -> str | None:
        return in_process_rules.first_reason(in_process_rules.LIVE_REQUESTS, experiments)

    def load(self, experiments: Sequence[Experiment], context: TurnContext) -> InterleavedArms:
        """Create an engine for every arm, in random order. The engines share loaded models."""
        from labkit.engine.runner.shared_models import SharedModels
        from labkit.workload.requests.interleaved_serving_arms import InterleavedServing, ServingArm

        models, order = SharedModels(), context.turn_order

        def load(index: int) -> ServingArm:
            clock = order.clock()
            return ServingArm(self._session(experiments[index], context.seed, models, clock), clock)

        arms = load_arms(len(experiments), context, load, lambda arm: arm.session.close())
        return InterleavedServing(arms, order, context.turn)

    def _session(
        self, experiment: Experiment, seed: int, models: SharedModels, clock: Clock
    ) -> ServingSession:
        from labkit.engine import create
        from labkit.models.tokenizer import Detokenizer
        from labkit.workload.requests.serving_session import ServingSession

        model = resolve(experiment.model)
        prompts = self._prompts(experiment, model)
        return ServingSession(
            create(experiment.engine, model.path, models),
            prompts,
            experiment.workload,
            seed=seed,
            vocab_size=model.vocab_size,
            detokenizer=Detokenizer(model.path),
            model_digest=model.digest,
            block_size=experiment.engine.kv.block_size,
            clock=clock,
        )

    def estimate(self, experiment: Experiment) -> Estimate:
        lengths = self._lengths(experiment)
        in_flight = _max_in_flight(experiment, len(lengths))
        running = _max_running(experiment, in_flight)
        prompt, output = (sum(column) for column in zip(*lengths, strict=True))
        model = footprint(experiment)
        flops = 2 * model.matmul_weights * (prompt + output)
        steps = output / running
        times = 2 if experiment.workload.cache_state is CacheState.warm else 1
        busy = flops / FLOPS + steps * STEP_SECONDS
        served = max(busy, self._last_arrival_s(experiment, len(lengths)))
        clocks = post_run_profiling.share(experiment, output)
        starts = experiment.engine.server_start_s
        seconds = START_SECONDS + starts + (times - 1) * busy + (1 + clocks) * served
        longest = sorted((p + o for p, o in lengths), reverse=True)[:in_flight]
        kv = _kv_bytes(experiment, model, longest[:running])
        warnings = preflight_warnings.sentences(experiment, longest)
        ranks = experiment.engine.parallel.size  # each rank reads the whole model first
        needed = ranks * (PROCESS_BYTES + model.weight_bytes) + kv
        return Estimate(seconds, max(needed, _claimed_bytes(experiment)), warnings, starts)

    def _last_arrival_s(self, experiment: Experiment, count: int) -> float:
        """Return when the last of ``count`` requests is expected; 0 without a rate or a trace."""
        arrivals, source = experiment.workload.arrivals, self.source(experiment)
        if arrivals.kind is ArrivalKind.trace and isinstance(source, TimestampedSource):
            times = sources.timestamps_ms(source, experiment)
            return max((ms or 0.0) for ms in times) / 1e3 * arrivals.time_scale
        if isinstance(source, SessionSource):
            count = min(count, source.num_sessions(experiment))
        return 0.0 if arrivals.rate is None else count / arrivals.rate

    def _lengths(self, experiment: Experiment) -> list[tuple[int, int]]:
        return sources.lengths(self.source(experiment), experiment)

    def _prompts(self, experiment: Experiment, model: ModelDir) -> tuple[Prompt, ...]:
        source = self.source(experiment)
        own = _class_identity(experiment.workload.kind)
        of_source = sources.identity(source, experiment)
        key = prompt_key({"model": model.digest, "source": of_source, **own})
        every = cached_prompts(key, lambda: sources.prompts(source, experiment, model))
        prompts = tuple(take_first(experiment, every))
        return unshared(prompts, model) if experiment.workload.prompts.unshared else prompts


def _class_identity(kind: str) -> Mapping[str, Any]:
    """Return what identifies the code of a kind of the user's own: name, files or version."""
    if not is_class_path(kind):
        return {}
    module = kind.partition(":")[0]
    files = user_classes.source_files(module)
    return {
        "workload.kind": kind,
        "workload.kind files": {name: file_digest.sha256(file) for name, file in files.items()},
        "workload.kind versions": user_classes.installed_versions(module),
    }


def _max_in_flight(experiment: Experiment, count: int) -> int:
    """Return how many of ``count`` requests may be in flight at a time.

    If a rate or a trace sets the arrivals, the number of requests in flight depends on the engine's
    speed. Then the number of batch rows is returned: the most that labkit's engines and mlx_lm run,
    and a guess for a server or an engine of the user's own, whose limits labkit does not know.
    """
    workload, rows = experiment.workload, experiment.engine.scheduler.max_num_seqs
    return min(rows if workload.arrivals.is_paced else workload.concurrency or count, count)


def _max_running(experiment: Experiment, in_flight: int) -> int:
    """Return how many of ``in_flight`` requests the engine may run at a time."""
    if experiment.engine.name not in (*PRESET_LAYOUTS, "mlx_lm"):
        return in_flight  # a server or an engine of the user's own has its own limit
    return min(in_flight, experiment.engine.scheduler.max_num_seqs)


def _kv_bytes(experiment: Experiment, model: ModelFootprint, lengths: Sequence[int]) -> int:
    """Return the KV memory of requests of ``lengths`` tokens, at most that of the planned pool."""
    per_token = memory_budget.kv_bytes_per_token(experiment.engine, model)
    needed = slots_for(experiment.engine.kv, lengths) * per_token
    planned = memory_budget.plan_for_arm(experiment)
    return needed if planned is None else min(needed, planned.pool_bytes)


def _claimed_bytes(experiment: Experiment) -> int:
    """Return the bytes that a policy grants of this machine's memory; 0 of a simulated machine."""
    options = experiment.engine.budget
    if options.policy is BudgetPolicy.fixed or options.machine is not None:
        return 0
    planned = memory_budget.plan_for_arm(experiment)
    return 0 if planned is None else planned.ceiling


def unshared(prompts: Sequence[Prompt], model: ModelDir) -> tuple[Prompt, ...]:
    """Return the prompts, each with a different first token, so that no prefix is shared."""
    require(
        len(prompts) <= model.vocab_size,
        f"workload.prompts.unshared=true: each of the {len(prompts):,} requests needs a different "
        f"first token, but model={model.name} has only {model.vocab_size:,} token ids; set "
        "workload.num_requests",
    )
    return tuple(
        replace(prompt, token_ids=(index, *prompt.token_ids[1:]), messages=None)
        for index, prompt in enumerate(prompts)
    )


def _check(prompts: Sequence[Prompt], experiment: Experiment, model: ModelDir) -> None:
    text = next((prompt.request_id for prompt in prompts if prompt.messages is None), None)
    require(
        text is None or experiment.engine.server.api is Api.completions,
        f"engine.server.api=chat: request {text} of workload={experiment.workload.name} is a text, "
        "not a conversation; set messages in place of its prompt, or engine.server.api=completions",
    )
    highest = max(max(p.token_ids) for p in prompts)
    require(
        highest < model.vocab_size,
        f"model={model.name}: the tokenizer returns token id {highest}, but the vocabulary has "
        f"only {model.vocab_size} ids",
    )
    largest = max(prompts, key=lambda p: len(p.token_ids) + p.max_tokens)
    tokens = len(largest.token_ids) + largest.max_tokens - 1
    require(
        model.max_context is None or tokens < model.max_context,
        f"model={model.name} has a context of {model.max_context} tokens: request "
        f"{largest.request_id} of workload={experiment.workload.name} has "
        f"{len(largest.token_ids)} prompt tokens and max_tokens={largest.max_tokens}; set shorter "
        "requests or another model",
    )
    needed = blocks_for(experiment.engine.kv, [tokens])
    planned = memory_budget.plan_for_arm(experiment)
    if planned is None or planned.full_blocks is None:
        return
    options = experiment.engine.budget
    if options.blocks is not None:
        option = f"blocks={options.blocks}"
    else:
        fixed = options.policy is BudgetPolicy.fixed
        option = f"bytes={options.bytes}" if fixed else f"policy={options.policy.value}"
        option += f" ({planned.blocks} KV blocks)"
    require(
        needed <= planned.full_blocks,
        f"engine.budget.{option} is too small: request {largest.request_id} of "
        f"workload={experiment.workload.name} needs {needed} KV blocks for its {tokens} tokens; "
        "enlarge the KV pool",
    )


def _check_server(experiment: Experiment) -> None:
    """Check that the HTTP client is installed, and that api=chat has conversations to send."""
    from labkit.engine import openai

    server, prompts = experiment.engine.server, experiment.workload.prompts
    openai.check_http_extra()
    require(
        server.api is Api.completions or prompts.source in CONVERSATION_SOURCES,
        f"engine.server.api=chat: workload.prompts.source={prompts.source} has token ids, not "
        "conversations; set engine.server.api=completions",
    )
    require(
        server.api is Api.completions or not prompts.unshared,
        "engine.server.api=chat: workload.prompts.unshared=true changes token ids, which "
        "conversations do not have; set engine.server.api=completions",
    )


def footprint(experiment: Experiment) -> ModelFootprint:
    """Return the model's sizes without building the model."""
    loading = dtype_resolution.WeightLoading.of(experiment.engine)
    built = model_footprint.from_model(experiment.model, loading)
    return built or model_footprint.from_weights(resolve(experiment.model).path, loading)


KIND = RequestKind()
