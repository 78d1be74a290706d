"""``LLMEngine`` with a stub model: chunks, memory, finish reasons and refusals."""

import weakref

import pytest
from stub_engine import (
    EOS,
    VOCAB,
    Adversary,
    StubModel,
    make_engine,
    next_token,
    request,
    run,
    solo,
)

from labkit.engine.engine_protocol import EngineError, KVBytes, Observable, TokenCounting


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_prompt_lengths_around_block_boundaries(length, max_tokens):
    engine, _ = make_engine(max_num_seqs=2, max_num_batched_tokens=4)
    prompts = {"a": list(range(1, length + 1)), "b": list(range(2, length + 2))}
    tokens, last = run(engine, [request(k, p, max_tokens) for k, p in prompts.items()])
    for key, prompt in prompts.items():
        assert tokens[key] == solo(prompt, max_tokens, True)
        assert last[key].finish_reason == "length"


def test_a_partial_chunk_never_samples():
    engine, _ = make_engine(max_num_seqs=1, max_num_batched_tokens=3)
    engine.submit(request("a", range(1, 11), 1))
    assert [len(engine.step()) for _ in range(4)] == [0, 0, 0, 1]
    assert not engine.has_work()


def test_decodes_share_steps_with_prefill_chunks_within_the_budget():
    engine, model = make_engine(40, max_num_seqs=3, max_num_batched_tokens=5)
    requests = [request("a", [1], 12), request("b", range(1, 20), 3), request("c", [2, 3], 4)]
    tokens, _ = run(engine, requests)
    assert {k: len(v) for k, v in tokens.items()} == {"a": 12, "b": 3, "c": 4}
    counters = engine.counters()
    assert counters["steps.mixed"] > 0 and model.largest == 5
    assert counters["tokens.prefill"] == 22
    # The last token of each request is never computed.
    assert counters["tokens.decode"] == 11 + 2 + 3
    assert counters["engine.paged"] == counters["steps.total"]


def test_the_chunk_cap_holds_per_request():
    engine, _ = make_engine(40, max_num_seqs=2, max_num_batched_tokens=8, chunk=3)
    engine.submit(request("a", range(1, 10), 1))
    engine.submit(request("b", range(1, 10), 1))
    assert [len(engine.step()) for _ in range(3)] == [0, 0, 2]


def test_full_reservation_admits_in_order_and_never_starves():
    engine, _ = make_engine(5, max_num_seqs=4, max_num_batched_tokens=16)  # 4 blocks of 4
    engine.submit(request("large", range(1, 9), 5))  # 12 slots: 3 blocks
    engine.submit(request("next", range(1, 6), 4))  # 8 slots: 2 blocks, must wait
    engine.submit(request("small", [1], 2))  # would fit, but came later
    assert {event.request_id for event in engine.step()} == {"large"}
    while engine.has_work():
        engine.step()
        engine.check()
    assert engine.counters()["requests.finished"] == 3


def test_a_request_that_can_never_fit_is_refused_and_the_others_go_on():
    engine, _ = make_engine(5, max_num_seqs=4, max_num_batched_tokens=16)
    requests = [
        request("good", [1, 2], 3),
        request("huge", range(1, 14), 5),
        request("empty", [], 3),
        request("alien", [VOCAB], 3),
        request("fits", range(1, 14), 4),
    ]
    tokens, last = run(engine, requests)
    assert {k: v.finish_reason for k, v in last.items()} == {
        "good": "length",
        "huge": "error",
        "empty": "error",
        "alien": "error",
        "fits": "length",
    }
    assert "5 KV blocks, but the pool has only 4; raise the budget" in last["huge"].error
    assert tokens["good"] == solo([1, 2], 3, True)
    assert engine.counters()["requests.refused"] == 3


def test_an_aborted_request_that_was_refused_has_no_error_event_but_others_have():
    engine, _ = make_engine()
    engine.submit(request("a", [], 3))
    engine.submit(request("b", [], 3))
    engine.abort("a")
    assert engine.has_work()
    assert [event.request_id for event in engine.step()] == ["b"]
    assert not engine.has_work()


def test_a_live_id_is_refused_and_a_finished_one_may_return():
    engine, _ = make_engine()
    engine.submit(request("a", [1], 2))
    with pytest.raises(EngineError, match="already in use"):
        engine.submit(request("a", [1], 2))
    run(engine, [])
    assert run(engine, [request("a", [1], 2)])[0]["a"] == solo([1], 2, True)


def test_between_steps_the_engine_reports_kv_bytes_and_admitted_requests():
    engine, _ = make_engine(5, max_num_seqs=2, max_num_batched_tokens=4)  # blocks of 4 tokens
    assert isinstance(engine, Observable) and isinstance(engine, TokenCounting)
    engine.submit(request("a", range(1, 7), 3))  # 8 slots: 2 blocks of 100 bytes
    engine.submit(request("b", range(1, 10), 4))  # 12 slots: 3 blocks, must wait
    assert not engine.is_running("a") and engine.kv_bytes() == KVBytes(0, 0, 4 * 100)
    engine.step()
    assert (engine.is_running("a"), engine.is_running("b")) == (True, False)
    assert engine.kv_bytes() == KVBytes(reserved=200, used=4 * 25, total=4 * 100)
    assert engine.computed_tokens() == engine.counters()["tokens.computed"] == 4
    run(engine, [])
    assert not engine.is_running("a") and engine.kv_bytes() == KVBytes(0, 0, 4 * 100)


def test_stop_tokens_and_end_of_text():
    prompt = [3, 1, 4]
    free = solo(prompt, 12, True)
    engine, _ = make_engine(40, max_num_seqs=4)
    stop = free[2]
    first = free.index(stop)
    tokens, last = run(engine, [request("a", prompt, 12, stop_token_ids=(stop,))])
    assert tokens["a"] == free[: first + 1] and last["a"].finish_reason == "stop"
    # A prompt after which the stub says end of text at once.
    prompt = next([a, b] for a in range(VOCAB) for b in range(VOCAB) if next_token([a, b]) == EOS)
    tokens, last = run(engine, [request("b", prompt, 5, ignore_eos=False)])
    assert tokens["b"] == [EOS] and last["b"].finish_reason == "stop"
    tokens, last = run(engine, [request("c", prompt, 5)])
    assert len(tokens["c"]) == 5 and last["c"].finish_reason == "length"


def test_abort_frees_blocks_at_once_and_silences_the_request():
    engine, _ = make_engine(5, max_num_seqs=2, max_num_batched_tokens=4)
    engine.submit(request("a", range(1, 10), 6))
    engine.submit(request("b", range(1, 10), 6))
    engine.step()
    before_abort = engine.counters()
    assert before_abort["blocks.allocated"] - before_abort["blocks.freed"] == 4
    engine.abort("a")
    engine.abort("a")
    engine.abort("unknown")
    after = engine.counters()
    assert after["blocks.allocated"] == after["blocks.freed"]
    tokens, _ = run(engine, [])
    assert set(tokens) == {"b"} and tokens["b"] == solo(range(1, 10), 6, True)
    assert engine.counters()["requests.aborted"] == 1


def test_peak_kv_bytes_follow_the_blocks_held():
    engine, _ = make_engine(9, max_num_seqs=1)
    run(engine, [request("a", range(1, 9), 4), request("b", [1], 1)])  # 11 slots: 3 blocks
    assert engine.counters()["peak_kv_bytes"] == 300
    engine.reset_counters()
    assert engine.counters()["peak_kv_bytes"] == 0
    run(engine, [request("c", [1], 1)])
    assert engine.counters()["peak_kv_bytes"] == 100


def test_tokens_that_requests_share_are_used_once():
    engine, _ = make_engine(20, prefixes="hash", max_num_seqs=3, max_num_batched_tokens=20)
    shared = range(1, 17)  # 4 blocks
    run(engine, [request("first", shared, 1)])
    engine.reset_counters()
    for name in "abc":
        engine.submit(request(name, [*shared, 20], 4))
    engine.step()
    for _ in range(2):  # once as they came, once as they stand when the count begins anew
        counters = engine.counters()
        assert 0 < counters["kv_used_bytes"] <= counters["peak_kv_bytes"] == (4 + 3) * 100
        engine.reset_counters()


def test_two_engines_share_nothing():
    first, _ = make_engine()
    second, _ = make_engine()
    first.submit(request("a", [1, 2], 3))
    assert not second.has_work()
    second.submit(request("a", [1, 2], 3))
    first.abort("a")
    assert run(second, [])[0]["a"] == solo([1, 2], 3, True)
    assert first.counters()["engine.paged"] == 0 < second.counters()["engine.paged"]


class Breaking(StubModel):
    """A model whose third forward fails."""

    forwards = 0

    def __call__(self, batch):
        self.forwards += 1
        if self.forwards == 3:
            raise RuntimeError("no more")
        return super().__call__(batch)


@pytest.mark.parametrize("pipeline", ["sync", "overlap"])
def test_a_failed_step_leaves_no_request_and_no_block_behind(pipeline):
    engine, _ = make_engine(
        20, pipeline=pipeline, model=Breaking(20, 4), max_num_seqs=2, max_num_batched_tokens=6
    )
    for name in "abc":  # c waits for a place
        engine.submit(request(name, range(1, 9), 5))
    with pytest.raises(RuntimeError, match="no more"):
        while engine.has_work():
            engine.step()
    engine.check()
    counters = engine.counters()
    assert not engine.has_work() and counters["requests.aborted"] == 3
    assert counters["blocks.allocated"] == counters["blocks.freed"] > 0
    assert counters["host_ms"] >= 0
    assert run(engine, [request("a", [1, 2], 4)])[0] == {"a": solo([1, 2], 4)}


@pytest.mark.parametrize("pipeline", ["sync", "overlap"])
@pytest.mark.parametrize("call", ["answer", "mix"])  # before and after the states are prepared
@pytest.mark.parametrize("failing", range(1, 9))
def test_a_failed_forward_leaves_an_engine_with_states_usable(failing, call, pipeline):
    engine, model = make_engine(
        40,
        pipeline=pipeline,
        prefixes="hash",
        snapshots=4,
        max_num_seqs=2,
        max_num_batched_tokens=8,
    )
    real, calls = getattr(model, call), []

    def failing_call(*arguments):
        calls.append(True)
        if len(calls) == failing:
            raise RuntimeError("of the forward")
        return real(*arguments)

    setattr(model, call, failing_call)
    with pytest.raises(RuntimeError, match="of the forward"):
        run(engine, [request("a", range(1, 14), 9), request("b", range(3, 20), 9)])
    engine.check()
    again = [request("c", range(1, 14), 9), request("d", [*range(1, 14), 5], 9)]
    assert run(engine, again)[0] == {r.request_id: solo(r.prompt_token_ids, 9) for r in again}


def test_a_refused_request_has_its_event_even_if_the_step_fails():
    engine, model = make_engine()
    model.answer = None  # cannot be called
    engine.submit(request("a", [], 3))
    engine.submit(request("b", [1, 2], 3))
    with pytest.raises(TypeError):
        engine.step()
    (event,) = engine.step()
    assert (event.request_id, event.finish_reason) == ("a", "error") and not engine.has_work()


ENDINGS = {"prefill": 1, "decode": 6}  # steps of a prompt of 9 tokens in chunks of 3


@pytest.mark.parametrize("pipeline", ["sync", "overlap"])
@pytest.mark.parametrize("during", ENDINGS)
@pytest.mark.parametrize("end", ["abort", "error", "preempt", "close"])
def test_a_request_that_ends_early_leaves_no_state_behind(end, during, pipeline):
    engine, model = make_engine(
        20,
        pipeline=pipeline,
        snapshots=2,
        prefixes="hash",
        max_num_seqs=2,
        max_num_batched_tokens=6,
        chunk=3,
    )
    prompts = {name: [*range(1, 9), extra] for name, extra in zip("abc", (3, 4, 5), strict=True)}
    for name, prompt in prompts.items():  # c waits for a place
        engine.submit(request(name, prompt, 8))
    for _ in range(ENDINGS[during]):
        engine.step()
    counters = engine.counters()
    assert counters["state_slots.allocated"] - counters["state_slots.freed"] >= 2
    if end == "error":
        model.answer = lambda context: 1 / 0
        with pytest.raises(ZeroDivisionError):
            while engine.has_work():
                engine.step()
        del model.answer
    elif end == "close":
        engine.close()
    else:
        for name in prompts:
            getattr(engine if end == "abort" else engine._scheduler, end)(name)
    if end == "preempt":
        assert run(engine, [])[1].keys() == set(prompts)
    assert not engine.has_work()
    engine.check()
    engine.clear_cache()
    counters = engine.counters()
    assert counters["state_slots.allocated"] == counters["state_slots.freed"]
    assert counters["blocks.allocated"] == counters["blocks.freed"]
    assert engine._cache.reserved_bytes == 0
    if end != "close":
        again = run(engine, [request(name, prompt, 8) for name, prompt in prompts.items()])[0]
        assert again == {name: solo(prompt, 8) for name, prompt in prompts.items()}


def test_a_closed_engine_keeps_neither_model_nor_draft_model(collect):
    models = [StubModel(9, 4), Adversary()]
    engine, _ = make_engine(model=models[0], proposer=models[1])
    references = [weakref.ref(part) for part in models]
    del models, _
    engine.close()
    collect()
    assert [reference() for reference in references] == [None, None]


@pytest.mark.parametrize("pipeline", ["sync", "overlap"])
def test_a_closed_engine_serves_nothing(pipeline):
    engine, _ = make_engine(pipeline=pipeline)
    engine.submit(request("a", [1, 2], 3))
    engine.close()
    assert not engine.has_work()
    engine.submit(request("b", [1, 2], 3))
    with pytest.raises(EngineError, match="closed"):
        engine.step()
