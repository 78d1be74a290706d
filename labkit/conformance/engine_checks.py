"""The contract of engines: requests in, token events out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

from labkit.config import ConfigError, count_text
from labkit.conformance.contract import Check, Compose, demand
from labkit.engine.engine_protocol import EngineError, InferenceEngine, TokenEvent
from labkit.engine.prefix_cache import eviction
from labkit.engine.request import Request, RequestState
from labkit.engine.sampling.sampling_params import SamplingParams
from labkit.engine.scheduler.scheduling_policies import QueuePolicy

# Token ids that every vocabulary has; the prompts have different lengths.
PROMPTS = tuple(tuple(5 + (7 * s + i) % 200 for i in range(3 + 6 * s)) for s in range(4))
MAX_TOKENS = 8
MAX_STEPS = 1000  # an engine that still has work after this many steps fails the check


def engine_checks(path: str, compose: Compose) -> Iterator[Check]:
    """Yield the checks of the engine ``path``: ``package.module:Class`` or a built-in name."""
    made: list[InferenceEngine] = []
    yield Check("it can be created", lambda: made.append(_create(path, compose)), needed=True)
    (engine,) = made
    yield Check(
        "every request ends, after max_tokens tokens", partial(_check_served, engine), needed=True
    )
    yield Check(
        "greedy tokens are those of labkit's reference", partial(_check_tokens, engine, compose)
    )
    yield Check(
        "an aborted request has no further event, and the others go on",
        partial(_check_abort, engine),
    )
    yield Check("a second live request of the same id is refused", partial(_check_ids, engine))
    yield Check(
        "counters count what ran, and start from 0 after a reset",
        partial(_check_counters, engine),
    )
    yield Check("clear_cache() leaves a working engine", partial(_check_cleared, engine))
    yield Check("it can be closed", engine.close)


# Three blocks of 16 tokens, while each of the longest requests needs two: some are preempted.
SHORT_MEMORY = {
    "engine.attention.backend": "gather",  # it compiles nothing
    "engine.scheduler.reservation": "optimistic",
    "engine.scheduler.watermark": "0",
    "engine.budget.blocks": "3",
    "engine.kv.block_size": "16",
}


def queue_checks(path: str, compose: Compose) -> Iterator[Check]:
    """Yield the checks of the order of waiting requests ``path``: ``package.module:Class``."""
    made: list[QueuePolicy] = []
    yield Check("it can be created", lambda: made.append(QueuePolicy(path)), needed=True)
    (queue,) = made
    states = [RequestState(Request(f"q{i}", prompt), i) for i, prompt in enumerate(PROMPTS)]

    def check_keys() -> None:
        for name, key in (("key", queue.key), ("preemption_key", queue.preemption_key)):
            keys = [[key(state) for state in states] for _ in range(2)]
            demand(
                keys[0] == keys[1],
                f"{name}() gives a request another number when it is asked again",
            )

    yield Check("its keys are finite numbers, the same for a request every time", check_keys)
    yield _short_memory_check(compose, **{"engine.scheduler.queue": path})


def eviction_checks(path: str, compose: Compose) -> Iterator[Check]:
    """Yield the checks of the order of eviction ``path``: ``package.module:Class``."""
    made: list[eviction.EvictionPolicy] = []
    yield Check("it can be created", lambda: made.append(eviction.create(path)), needed=True)
    (policy,) = made

    def check_keys() -> None:
        for length, uses, last in product((16, 4096), (1, 50), (1, 10_000)):
            prefix = eviction.IdlePrefix(length, uses, last)
            keys = [policy.eviction_key(prefix) for _ in range(2)]
            demand(keys[0] == keys[1], f"eviction_key() gives {prefix} another number again")

    yield Check("its keys are finite numbers, the same for a prefix every time", check_keys)
    for cache in ("hash", "radix"):
        own = {"engine.prefix_cache": cache, "engine.prefix_eviction": path}
        counter = f"prefix_eviction.{policy.name}"
        yield _short_memory_check(compose, f", with engine.prefix_cache={cache}", counter, **own)


def _short_memory_check(
    compose: Compose, where: str = "", counter: str | None = None, **own: str
) -> Check:
    def check() -> None:
        engine = _create("paged", compose, **own, **SHORT_MEMORY)
        try:
            _check_served(engine)
            _check_tokens(engine, compose)
            used = counter is None or engine.counters().get(counter, 0) > 0
            demand(used, f"nothing was evicted: the counter {counter} is 0")
        finally:
            engine.close()

    return Check(f"every request ends with the reference's tokens in a short memory{where}", check)


def _create(path: str, compose: Compose, **others: str) -> InferenceEngine:
    from labkit.engine import create
    from labkit.models import resolve

    option = "engine.name" if ":" in path else "engine"
    experiment = compose({option: path, **others})
    return create(experiment.engine, resolve(experiment.model).path)


def _reference(compose: Compose) -> InferenceEngine:
    """Return an engine whose tokens are right: mlx_lm, which compiles nothing and starts at once.

    If the user's overrides have options that mlx_lm lacks, it is labkit's paged engine. Its first
    start compiles kernels for up to a minute.
    """
    try:
        return _create("mlx_lm", compose)
    except ConfigError:
        return _create("paged", compose)


def _request(number: int, max_tokens: int = MAX_TOKENS) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(f"r{number}", PROMPTS[number % len(PROMPTS)], params)


def _steps(engine: InferenceEngine) -> Iterator[Sequence[TokenEvent]]:
    for _ in range(MAX_STEPS):
        if not engine.has_work():
            return
        yield engine.step()
    demand(False, f"has_work() is still true after {MAX_STEPS} steps; every request must end")


def _serve(engine: InferenceEngine, count: int) -> dict[str, list[TokenEvent]]:
    for number in range(count):
        engine.submit(_request(number))
    events: dict[str, list[TokenEvent]] = defaultdict(list)
    for step in _steps(engine):
        for event in step:
            events[event.request_id].append(event)
    return events


def _check_served(engine: InferenceEngine) -> None:
    events = _serve(engine, len(PROMPTS))
    for number in range(len(PROMPTS)):
        mine, name = events.pop(f"r{number}", []), f"request r{number}"
        demand(bool(mine), f"{name} had no event")
        error = mine[-1].error
        demand(error is None, f"{name} ended with an error: {error}")
        reasons = [event.finish_reason for event in mine]
        demand(
            reasons == [None] * (MAX_TOKENS - 1) + ["length"],
            f"{name} with max_tokens={MAX_TOKENS}: {count_text(len(mine), 'event')}, finish "
            f"reasons {reasons}; it must have one event per token, and 'length' only in the last",
        )
    unknown = sorted(events)[:1]
    demand(not events, f"an event belongs to a request that was not submitted: {unknown}")


def _check_tokens(engine: InferenceEngine, compose: Compose) -> None:
    reference = _reference(compose)
    try:
        right = _tokens(_serve(reference, len(PROMPTS)))
    finally:
        reference.close()
    got = _tokens(_serve(engine, len(PROMPTS)))
    for name, tokens in right.items():
        mine = got.get(name, [])
        first = next((i for i, token in enumerate(tokens) if mine[i : i + 1] != [token]), None)
        demand(
            first is None,
            f"request {name} differs at output token {first}: tokens {mine[: (first or 0) + 1]}, "
            f"not {tokens[: (first or 0) + 1]}",
        )


def _tokens(events: dict[str, list[TokenEvent]]) -> dict[str, list[int]]:
    return {name: [event.token for event in mine] for name, mine in events.items()}


def _check_abort(engine: InferenceEngine) -> None:
    engine.submit(_request(0))
    engine.submit(_request(1))
    engine.step()
    engine.abort("r0")
    engine.abort("r0")  # aborting a request that has ended must do nothing
    engine.abort("unknown")
    events = [event for step in _steps(engine) for event in step]
    late = [event for event in events if event.request_id == "r0"]
    demand(not late, "request r0 had an event after its abort")
    ended = [event.request_id for event in events if event.finish_reason is not None]
    demand("r1" in ended, "request r1 did not end after request r0 was aborted")


def _check_ids(engine: InferenceEngine) -> None:
    engine.submit(_request(0))
    try:
        engine.submit(_request(0))
    except EngineError:
        return
    finally:
        engine.abort("r0")
        for _ in _steps(engine):
            pass
    demand(False, "submit() accepted the id of a live request; it must raise EngineError")


def _check_counters(engine: Any) -> None:
    engine.reset_counters()
    is_own = type(engine).__module__.startswith("labkit.")
    claimed = f"engine.{engine.name if is_own else type(engine).__name__}"
    _serve(engine, 1)
    value = engine.counters().get(claimed, 0)
    demand(value > 0, f"the counter {claimed}, which every arm claims, is {value} after a request")
    engine.reset_counters()
    value = engine.counters().get(claimed, 0)
    demand(value == 0, f"the counter {claimed} is {value} after reset_counters(); it must be 0")


def _check_cleared(engine: InferenceEngine) -> None:
    before = _tokens(_serve(engine, 2))
    engine.clear_cache()
    demand(
        _tokens(_serve(engine, 2)) == before,
        "the same prompts give other tokens after clear_cache()",
    )
