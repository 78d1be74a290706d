"""Overlapped steps: host work during a step in flight, and unchanged tokens."""

import threading
import time

import pytest
from stub_engine import StubModel, make_engine, request, run, solo

from labkit import config
from labkit.engine import SamplingParams, create
from labkit.engine.engine_protocol import EngineError
from labkit.engine.step_loop import fill_placeholders


class BlockedModel(StubModel):
    """A model whose forwards wait until they are let through."""

    def __init__(self, num_blocks=30, block_size=4):
        super().__init__(num_blocks, block_size)
        self.gate, self.ended, self.threads = threading.Semaphore(0), 0, set()

    def __call__(self, batch):
        self.threads.add(threading.get_ident())
        assert self.gate.acquire(timeout=10), "nobody let the forward through"
        self.ended += 1
        return super().__call__(batch)


def overlapped(model=None, num_blocks=30, **options):
    return make_engine(num_blocks, pipeline="overlap", model=model, **options)[0]


def test_a_step_returns_while_its_forward_runs():
    model = BlockedModel()
    engine = overlapped(model)
    engine.submit(request("a", [1, 2, 3], 3))
    assert engine.step() == []  # launched; a synchronous engine would wait here for ever
    model.gate.release()
    (event,) = engine.step()  # the first token, while the second is on its way
    assert event.token == solo([1, 2, 3], 1)[0] and event.finish_reason is None
    model.gate.release(2)
    events = engine.step() + engine.step()
    assert [e.token for e in events] == solo([1, 2, 3], 3)[1:]
    assert events[-1].finish_reason == "length" and not engine.has_work()
    counters = engine.counters()
    assert counters["pipeline.overlapped"] == 2 and counters["pipeline.overlap"] == 3
    assert threading.get_ident() not in model.threads and len(model.threads) == 1
    assert counters["pipeline.wait_ms"] > 0 and counters["host_ms"] > 0


def test_prompts_chunks_and_joiners_overlap_too():
    engine = overlapped(max_num_seqs=3, max_num_batched_tokens=5)
    requests = [request("a", [1], 12), request("b", range(1, 20), 3), request("c", [2, 3], 4)]
    tokens, last = run(engine, requests)
    for submitted in requests:
        want = solo(submitted.prompt_token_ids, submitted.params.max_tokens)
        assert tokens[submitted.request_id] == want
    counters = engine.counters()
    # Lengths are known beforehand, so that no row was computed in vain.
    assert counters["tokens.computed"] == 22 + 11 + 2 + 3
    assert counters["pipeline.overlapped"] == counters["steps.total"] - 1
    assert {event.finish_reason for event in last.values()} == {"length"}


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_one_token_prompts_and_the_shortest_answers(max_tokens):
    engine = overlapped(max_num_seqs=2)
    tokens, _ = run(engine, [request(name, [i], max_tokens) for i, name in enumerate("abc")])
    assert tokens == {name: solo([i], max_tokens) for i, name in enumerate("abc")}
    assert engine.counters()["tokens.computed"] == 3 * max_tokens


def test_a_stop_is_seen_one_step_late_and_its_row_is_dropped():
    free = solo([3, 1, 4], 12)
    end = free.index(free[3]) + 1
    engine = overlapped()
    tokens, last = run(engine, [request("a", [3, 1, 4], 12, stop_token_ids=(free[3],))])
    assert tokens["a"] == free[:end] and last["a"].finish_reason == "stop"
    counters = engine.counters()
    assert counters["tokens.computed"] == 3 + (end - 1) + 1  # one row in vain
    assert counters["tokens.output"] == end
    assert counters["blocks.allocated"] == counters["blocks.freed"]


def test_blocks_of_an_ended_request_may_go_to_another_while_its_row_is_in_flight():
    """A pool for one request only: the next one gets the very blocks of the one before."""
    free = solo([3, 1, 4], 9)
    stop = {"stop_token_ids": (free[4],)}
    engine = overlapped(num_blocks=4, max_num_seqs=1)
    requests = [request(f"r{i}", [3, 1, 4] if i % 2 else [i, 5], 9, **stop) for i in range(8)]
    tokens, _ = run(engine, requests)
    for submitted in requests:
        whole = solo(submitted.prompt_token_ids, 9)
        cut = whole.index(free[4]) + 1 if free[4] in whole else 9
        assert tokens[submitted.request_id] == whole[:cut]


def test_abort_in_flight_silences_the_request_and_frees_its_blocks():
    model = BlockedModel()
    engine = overlapped(model)
    engine.submit(request("a", [1, 2, 3], 9))
    engine.submit(request("b", [4, 5], 9))
    engine.step()
    engine.abort("a")
    engine.abort("a")
    engine.check()
    engine.submit(request("a", [7, 7], 2))  # the id is free again, while the old row is in flight
    model.gate.release(30)
    tokens, _ = run(engine, [])
    assert tokens == {"a": solo([7, 7], 2), "b": solo([4, 5], 9)}
    counters = engine.counters()
    assert counters["blocks.allocated"] == counters["blocks.freed"]
    assert counters["requests.aborted"] == 1


class DeferringModel(BlockedModel):
    """A blocked model that adds a counter of its forwards when the counters are read."""

    def __call__(self, batch):
        self.running.set()
        logits = super().__call__(batch)
        self.counters.defer(self.amounts)
        self.running.clear()
        return logits

    def amounts(self):
        assert not self.running.is_set(), "a running forward is changing the amounts"
        return {"launches": 1}


def deferring():
    """An overlapped engine whose second forward of three is running."""
    model = DeferringModel()
    engine = overlapped(model)
    model.running, model.counters = threading.Event(), engine._counters
    engine.submit(request("a", [1, 2, 3], 3))
    engine.step()
    model.gate.release()
    engine.step()
    assert model.running.wait(10)
    return engine, model


def test_what_a_running_forward_counts_is_read_when_it_has_ended():
    engine, model = deferring()
    assert "launches" not in engine.counters()
    model.gate.release()
    engine.step()
    assert model.running.wait(10)
    assert engine.counters()["launches"] == 2  # counted before the third was launched
    model.gate.release()
    engine.step()
    assert not engine.has_work() and engine.counters()["launches"] == 3


def test_counters_are_reset_when_the_running_forward_has_ended():
    engine, model = deferring()
    threading.Timer(0.05, model.gate.release).start()
    engine.reset_counters()
    assert "launches" not in engine.counters()
    model.gate.release()
    engine.step()
    engine.step()
    assert not engine.has_work() and engine.counters()["launches"] == 1


@pytest.mark.parametrize("then", ["counters", "reset_counters", "clear_cache", "step"])
def test_the_last_token_does_not_wait_for_a_step_that_nobody_needs(then):
    """Only what follows waits: the counters include the step, and its blocks stay its own."""
    model = BlockedModel()
    engine = overlapped(model)
    free = solo([3, 1, 4], 2)
    engine.submit(request("a", [3, 1, 4], 9, stop_token_ids=(free[0],)))
    engine.step()
    model.gate.release()
    (event,) = engine.step()  # the row of a second token is in flight
    engine.abort("a")
    assert event.finish_reason == "stop" and not engine.has_work() and model.ended == 1
    threading.Timer(0.05, model.gate.release).start()
    if then == "step":
        engine.submit(request("b", [3, 1, 4], 1))
    getattr(engine, then)()
    assert model.ended == 2
    assert (engine.counters()["step_ms"] > 40) is (then != "reset_counters")
    model.gate.release()
    assert run(engine, [])[0] == ({"b": solo([3, 1, 4], 1)} if then == "step" else {})


def test_a_failure_of_a_step_that_nobody_needs_is_raised_by_what_waits_for_it():
    class Broken(StubModel):
        def __call__(self, batch):
            if not batch.prefill_tokens:
                raise EngineError("it broke")
            return super().__call__(batch)

    engine = overlapped(Broken(30, 4))
    engine.submit(request("a", [3, 1, 4], 9, stop_token_ids=(solo([3, 1, 4], 1)[0],)))
    assert [event.finish_reason for _ in range(2) for event in engine.step()] == ["stop"]
    with pytest.raises(EngineError, match="it broke"):
        engine.counters()
    assert run(engine, [request("b", [1], 1)])[0] == {"b": solo([1], 1)}


def test_nothing_is_left_in_flight_when_the_last_request_is_aborted():
    model = BlockedModel()
    engine = overlapped(model)
    engine.submit(request("a", [1, 2, 3], 9))
    engine.step()
    engine.abort("a")
    assert not engine.has_work() and model.ended == 0
    threading.Timer(0.05, model.gate.release).start()
    counters = engine.counters()
    assert model.ended == 1
    # Nobody else waited; what is no waiting is the host's time, and none of it is negative.
    assert counters["pipeline.wait_ms"] > 0 and counters["host_ms"] > 0
    engine.submit(request("a", [1, 2], 1))
    model.gate.release()
    assert run(engine, [])[0] == {"a": solo([1, 2], 1)}


def test_a_drained_engine_computes_nothing_and_the_next_step_has_the_results():
    model = BlockedModel()
    engine = overlapped(model)
    engine.drain()  # nothing is in flight
    engine.submit(request("a", [1, 2, 3], 2))
    engine.step()
    model.gate.release()
    engine.drain()
    assert model.ended == 1
    engine.drain()
    (event,) = engine.step()
    assert event.token == solo([1, 2, 3], 1)[0]
    model.gate.release()
    (event,) = engine.step()
    assert event.token == solo([1, 2, 3], 2)[1] and not engine.has_work()
    assert engine.counters()["host_ms"] > 0


def test_a_failure_while_draining_ends_every_request():
    class Broken(StubModel):
        def __call__(self, batch):
            raise EngineError("it broke")

    engine = overlapped(Broken(30, 4))
    engine.submit(request("a", [1], 2))
    engine.step()
    with pytest.raises(EngineError, match="it broke"):
        engine.drain()
    assert not engine.has_work()


def test_a_failure_in_flight_is_raised_by_the_next_step():
    class Broken(StubModel):
        def __call__(self, batch):
            time.sleep(0.05)
            raise EngineError("it broke")

    engine = overlapped(Broken(30, 4))
    engine.submit(request("a", [1], 2))
    engine.step()
    with pytest.raises(EngineError, match="it broke"):
        engine.step()
    assert engine.counters()["host_ms"] > 0  # its wait is part of a step
    engine.close()
    assert not engine.has_work()


def test_penalties_see_the_token_sampled_in_the_step_before():
    """Sampling is the host's, after the results before it: histories are never stale."""
    params = {"frequency_penalty": 2.0, "repetition_penalty": 1.7, "temperature": 0.9}
    requests = [request(f"r{i}", [i, 2], 20, seed=i, **params) for i in range(5)]
    plain, _ = run(make_engine(60, max_num_seqs=3)[0], requests)
    assert run(overlapped(num_blocks=60, max_num_seqs=3), requests)[0] == plain


def test_a_token_that_is_still_unknown_is_never_computed():
    launched = []
    model = StubModel(30, 4)
    engine = overlapped(lambda batch: launched.append(batch) or model(batch))
    run(engine, [request("a", [1, 2], 4)])
    assert [len(batch.placeholders) for batch in launched] == [0, 1, 1, 1]
    stale = launched[-1]
    stale.tokens[:] = -1
    with pytest.raises(RuntimeError, match="before its input tokens were known"):
        fill_placeholders(stale, {})


@pytest.mark.parametrize("forward", ["numpy", "mlx"])
@pytest.mark.parametrize("shape", config.DecodeShape)
def test_the_real_model_in_a_thread_of_its_own(forward, shape, model_dir, plain_greedy):
    from test_paged_tokens import create_mlx, options, prompts, serve

    from labkit.engine import Request

    chosen = options()
    chosen.pipeline, chosen.decode_shape = config.Pipeline.overlap, shape
    engine = (create if forward == "numpy" else create_mlx)(chosen, model_dir("llama"))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    tokens, _ = serve(engine, [Request(str(i), p, params) for i, p in enumerate(prompts())])
    for i, prompt in enumerate(prompts()):
        assert tokens[str(i)] == plain_greedy("llama", prompt, 12)
    counters = engine.counters()
    assert counters["pipeline.overlapped"] > 10
    assert counters[f"forward.{forward}"] == counters["steps.total"]
    engine.close()
