"""Requests' estimates, and prompts that a model cannot serve."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from labkit.config import (
    KV,
    Ablation,
    Api,
    ArrivalKind,
    Arrivals,
    Budget,
    BudgetPolicy,
    CacheState,
    ConfigError,
    Engine,
    Experiment,
    Model,
    ModelShape,
    OpenAIServer,
    Prompts,
    Scheduler,
    Workload,
)
from labkit.engine import memory_budget as budget
from labkit.workload.requests import request_workload_kind
from labkit.workload.requests.request_workload_kind import (
    FLOPS,
    PROCESS_BYTES,
    START_SECONDS,
    STEP_SECONDS,
    RequestKind,
    unshared,
)
from labkit.workload.tokenized_prompt import Prompt

LENGTHS = [(100, 10), (20, 60), (30, 30)]


def experiment(blocks=None, **changes):
    pool = Budget(policy=BudgetPolicy.fixed, blocks=blocks) if blocks else Budget()
    workload = {"concurrency": 2, "num_requests": 3, **changes}
    return Experiment(
        ablation=Ablation(arms={"base": {}}),
        model=Model(shape=ModelShape()),
        engine=Engine(kv=KV(block_size=16), budget=pool),
        workload=Workload(**workload),
    )


def estimate(**changes):
    times = [0.0, 20_000.0, 4_000.0, 90_000.0]  # the fourth request is not sent
    source = SimpleNamespace(lengths=lambda _: LENGTHS, timestamps_ms=lambda _: times)
    return RequestKind(source).estimate(experiment(**changes))


@pytest.fixture
def facts(monkeypatch):
    """A model of a million weights in 4 MB, with 1,000 bytes of keys and values a token."""
    model = SimpleNamespace(matmul_weights=10**6, weight_bytes=4 * 10**6)
    monkeypatch.setattr(request_workload_kind, "footprint", lambda experiment: model)
    monkeypatch.setattr(budget, "kv_bytes_per_token", lambda engine, model: 1000)
    monkeypatch.setattr(request_workload_kind, "_claimed_bytes", lambda experiment: 0)
    return model


def test_time_is_that_of_every_token_and_of_the_steps(facts):
    busy = 2 * 10**6 * 250 / FLOPS + 100 / 2 * STEP_SECONDS
    # All tokens again, with clocks: so few that a quarter would be less than 1,024.
    assert estimate().seconds == pytest.approx(START_SECONDS + 2 * busy)
    warm = estimate(cache_state=CacheState.warm)
    assert warm.seconds == pytest.approx(START_SECONDS + 3 * busy)
    alone = 2 * 10**6 * 250 / FLOPS + 100 * STEP_SECONDS
    assert estimate(concurrency=1).seconds == pytest.approx(START_SECONDS + 2 * alone)
    assert estimate(concurrency=9).seconds < estimate().seconds
    slow = Arrivals(ArrivalKind.poisson, 0.5)  # the last one of three arrives after 6 s
    assert estimate(arrivals=slow, concurrency=None).seconds == pytest.approx(START_SECONDS + 12)
    trace = {"arrivals": Arrivals(ArrivalKind.trace, time_scale=0.5), "concurrency": None}
    prompts = Prompts(source="trace", path="trace.jsonl")
    assert estimate(**trace, prompts=prompts).seconds == pytest.approx(START_SECONDS + 20)


def test_memory_is_that_of_the_longest_requests_together(facts, monkeypatch):
    slots = {1: 112, 2: 112 + 80, 3: 112 + 80 + 64}  # whole blocks of 110, 80 and 60 tokens
    for together, count in slots.items():
        needed = PROCESS_BYTES + facts.weight_bytes + 1000 * count
        assert estimate(concurrency=together).bytes == needed
    monkeypatch.setattr(request_workload_kind, "_claimed_bytes", lambda experiment: 1 << 40)
    assert estimate().bytes == 1 << 40


def test_memory_is_at_most_that_of_the_pool_and_of_the_requests_that_run(facts):
    other = PROCESS_BYTES + facts.weight_bytes
    assert estimate(blocks=9, concurrency=3).bytes == other + 9 * 16 * 1000
    paced = experiment(arrivals=Arrivals(ArrivalKind.poisson, 5.0), concurrency=None)
    engine = replace(paced.engine, scheduler=Scheduler(max_num_seqs=2))
    source = SimpleNamespace(lengths=lambda _: LENGTHS)
    two = RequestKind(source).estimate(replace(paced, engine=engine))
    assert two.bytes == other + 1000 * (112 + 80)
    many = SimpleNamespace(lengths=lambda _: [(100, 10)] * 1000)
    all_of_them = replace(paced, workload=replace(paced.workload, num_requests=None))
    for name in ("openai", "mine.plain:Plain"):  # few of an open loop's requests are in flight
        unknown = replace(all_of_them, engine=replace(paced.engine, name=name))
        sixteen = RequestKind(many).estimate(unknown)
        assert sixteen.bytes == other + 1000 * 16 * 112, name


def test_requests_beyond_the_batch_rows_wait_and_take_no_memory(facts):
    source, three = SimpleNamespace(lengths=lambda _: LENGTHS), experiment(concurrency=3)
    rows = replace(three.engine, scheduler=Scheduler(max_num_seqs=2))
    two = RequestKind(source).estimate(replace(three, engine=rows))
    pair = estimate(concurrency=2)
    assert (two.seconds, two.bytes) == (pair.seconds, pair.bytes)
    assert two.warnings[-1].endswith("max_num_seqs=2: 1 of 3 requests in flight will queue")
    for name in ("openai", "mine.plain:Plain"):  # they have limits of their own
        other = SimpleNamespace(engine=SimpleNamespace(name=name, scheduler=Scheduler()))
        assert request_workload_kind._max_running(other, 1000) == 1000


def prompt(number, length, max_tokens):
    return Prompt(f"r{number}", (number,) * length, max_tokens)


def model(vocab_size=100, max_context=64):
    return SimpleNamespace(name="m", vocab_size=vocab_size, max_context=max_context)


def check(*prompts, blocks=5, **sizes):
    request_workload_kind._check(prompts, experiment(blocks=blocks), model(**sizes))


def test_a_request_may_fill_the_blocks_that_window_pools_leave():
    """Three of four layers keep their last 64 tokens only."""
    long, sizes = [prompt(1, 8000, 32)], model(max_context=None)
    one_pool = experiment(blocks=400)
    one_pool.model.shape = ModelShape(sliding_window=64)
    with pytest.raises(ConfigError, match=r"blocks=400 is too small: .* 503 KV blocks"):
        request_workload_kind._check(long, one_pool, sizes)
    pools = replace(one_pool, engine=replace(one_pool.engine, kv=KV(window_pools=True)))
    request_workload_kind._check(long, pools, sizes)
    blocks = budget.plan_for_arm(pools).full_blocks
    request_workload_kind._check([prompt(1, 16 * (blocks - 1), 1)], pools, sizes)
    with pytest.raises(ConfigError, match="blocks=400 is too small"):
        request_workload_kind._check([prompt(1, 16 * (blocks - 1) + 1, 1)], pools, sizes)


def test_prompts_must_fit_the_vocabulary_the_context_and_the_pool():
    check(prompt(99, 5, 4), prompt(1, 40, 24))  # 63 tokens: the last is never read
    check(prompt(1, 400, 24), max_context=None, blocks=28)
    for arguments, sizes, message in (
        ([prompt(100, 1, 1)], {}, "returns token id 100, but the vocabulary has only 100 ids"),
        ([prompt(1, 40, 25), prompt(2, 1, 1)], {}, "a context of 64 tokens: request r1"),
        ([prompt(1, 40, 24)], {"blocks": 4}, "blocks=4 is too small: request r1 .* 5 KV blocks"),
    ):
        with pytest.raises(ConfigError, match=message):
            check(*arguments, **sizes)


def test_a_server_that_applies_the_chat_template_gets_no_text():
    server = OpenAIServer(api=Api.chat)
    asked = replace(experiment(), engine=Engine(name="openai", server=server))
    talk = replace(prompt(1, 5, 4), messages=({"role": "user", "content": "Hello"},))
    request_workload_kind._check([talk], asked, model())
    with pytest.raises(ConfigError, match=r"api=chat: request r2 of workload=\w+ is a text, not"):
        request_workload_kind._check([talk, prompt(2, 5, 4)], asked, model())


def test_unshared_prompts_begin_with_different_tokens():
    prompts = [Prompt(str(i), (7, 8, 9), 1) for i in range(3)]
    assert [p.token_ids for p in unshared(prompts, model(vocab_size=3))] == [
        (0, 8, 9), (1, 8, 9), (2, 8, 9)
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="each of the 3 requests needs a different first token"):
        unshared(prompts, model(vocab_size=2))


@pytest.mark.parametrize(
    ("concurrency", "sessions", "refused"),
    [(3, 3, True), (9, 3, True), (2, 3, False), (9, 2, False)],
)
def test_requests_that_are_all_sent_at_once_have_no_rate(concurrency, sessions, refused):
    source = SimpleNamespace(lengths=lambda _: LENGTHS, num_sessions=lambda _: sessions)
    asked = experiment(concurrency=concurrency, arrivals=Arrivals(ArrivalKind.at_once))
    RequestKind(source).check(asked)
    asked = replace(asked, ablation=Ablation(arms={"base": {}}, metric="sent_req_s"))
    if refused:
        message = f"sent_req_s: workload.concurrency={concurrency} sends all 3 requests at once"
        with pytest.raises(ConfigError, match=message):
            RequestKind(source).check(asked)
    else:
        RequestKind(source).check(asked)


def test_a_workload_may_have_20_million_prompt_tokens():
    for excess in (0, 1):
        source = SimpleNamespace(lengths=lambda e, n=20_000_000 + excess: [(n - 5, 9), (5, 9)])
        if excess:
            with pytest.raises(ConfigError, match="about 20,000,001 prompt tokens"):
                RequestKind(source).check(experiment(num_requests=2))
        else:
            RequestKind(source).check(experiment(num_requests=2))
