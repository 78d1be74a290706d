from collections import deque

import pytest
from serving_stubs import Clock, ServerStub

from labkit.config import ArrivalKind, Arrivals, CacheState, LatencySLO, Workload
from labkit.engine.engine_protocol import (
    NO_TOKEN,
    InvalidLogitsError,
    StaleLaunchError,
    StreamEvent,
    TokenEvent,
)
from labkit.models.tokenizer import Detokenizer
from labkit.workload.requests import serving_session
from labkit.workload.requests.serving_metrics import ServedRequest
from labkit.workload.requests.serving_session import ServingSession
from labkit.workload.tokenized_prompt import Prompt
from labkit.workload.workload_protocols import InvalidOutput, StaleOutput


class StubEngine:
    """Serves every live request one token per step of 1 s; faults can be planted."""

    name = "stub"

    def __init__(self, clock, *, per_step=1, fault=None, capacity=100):
        self.clock, self.per_step, self.fault, self.capacity = clock, per_step, fault, capacity
        self.live, self.waiting, self.submitted = {}, deque(), []
        self.most_in_flight, self.resets, self.closed, self.steps = 0, 0, False, 0
        self.calls, self.joined = [], []

    def submit(self, request):
        self.joined.append(self.clock.now)
        self.submitted.append(request)
        self.waiting.append(request)
        self.most_in_flight = max(self.most_in_flight, len(self.live) + len(self.waiting))

    def abort(self, request_id):
        self.live.pop(request_id, None)

    def has_work(self):
        return bool(self.live or self.waiting)

    def step(self):
        self.clock.now += 1.0
        self.steps += 1
        assert self.steps < 1000, "the driver does not stop"
        while self.waiting and len(self.live) < self.capacity:
            request = self.waiting.popleft()
            self.live[request.request_id] = [request, 0]
        events = []
        for request_id, state in list(self.live.items()):
            for _ in range(self.per_step):
                state[1] += 1
                end = state[1] == state[0].params.max_tokens
                token = 100 * int(request_id[-1]) + state[1]
                event = TokenEvent(request_id, token, "length" if end else None, margin=0.123456789)
                events.append(event)
                if end:
                    del self.live[request_id]
                    break
        return self.fault(self, events) if self.fault else events

    def counters(self):
        return {"engine.stub": self.steps, "peak_kv_bytes": 640}

    def reset_counters(self):
        self.calls.append("reset")
        self.resets += 1
        self.steps = 0

    def clear_cache(self):
        self.calls.append("clear")

    def close(self):
        self.closed = True


PROMPTS = [Prompt(f"r{i}", tuple(range(1, 4 + i)), 2 + i % 3) for i in range(6)]


def session(engine, clock, prompts=PROMPTS, block_size=16, **changes):
    workload = Workload(name="test", **{"kind": "requests", "concurrency": 2, **changes})
    return ServingSession(
        engine, prompts, workload, seed=5, vocab_size=50, clock=clock, block_size=block_size
    )


def measure(**kinds):
    clock = Clock()
    engine = StubEngine(clock, **kinds)
    beats = []
    return session(engine, clock).measure(beats.append), engine, beats


def test_it_keeps_exactly_the_concurrency_in_flight_and_the_order():
    result, engine, beats = measure()
    assert engine.most_in_flight == 2
    assert [r.request_id for r in engine.submitted] == [p.request_id for p in PROMPTS]
    assert beats[-1] == "6 of 6 requests"
    assert [r["id"] for r in result.cases[0].outputs["requests"]] == [p.request_id for p in PROMPTS]


def test_staggered_clients_join_one_after_the_other_and_then_stay():
    """A step is a second: every two seconds another client, until there are three."""
    prompts = [Prompt(f"r{i}", (1, 2), 9) for i in range(6)]
    clock = Clock()
    engine = StubEngine(clock)
    session(engine, clock, prompts, concurrency=3, stagger_ms=2000).measure(lambda text: None)
    assert engine.most_in_flight == 3
    assert engine.joined == [0, 2, 4, 9, 11, 13]


def test_times_and_throughput_are_those_of_the_clock():
    result, engine, _ = measure()
    metrics = {m.name: m.repeats[0] for m in result.cases[0].metrics}
    # Outputs 2, 3, 4, 2, 3, 4 with two in flight, each a step of 1 s.
    prompt, output = sum(len(p.token_ids) for p in PROMPTS), 18
    assert engine.steps == 10
    assert metrics["total_tok_s"] == pytest.approx((prompt + output) / 10)
    assert metrics["ttft_p50_ms"] == metrics["ttft_p99_ms"] == pytest.approx(1000)
    assert metrics["itl_chunk_p99_ms"] == metrics["tpot_excl_first_p50_ms"] == pytest.approx(1000)
    assert metrics["peak_kv_bytes"] == 640
    assert result.counters["engine.stub"] == 10
    assert result.notes["engine"] == {}


def test_the_engine_s_load_decisions_are_recorded():
    clock = Clock()
    engine = StubEngine(clock)
    engine.notes = {"forward": "mlx", "forward_reason": "it is quantised"}
    result = session(engine, clock, PROMPTS).measure(lambda text: None)
    assert result.notes["engine"] == engine.notes


def test_ttft_counts_the_wait_inside_the_engine():
    result, _, _ = measure(capacity=1)
    notes = {n["id"]: n for n in result.cases[0].notes["requests"]}
    assert notes["r0"]["ttft_ms"] == 1000
    assert notes["r1"]["ttft_ms"] == 3000  # r0 takes two steps first


def test_several_tokens_of_one_step_are_one_chunk():
    result, _, _ = measure(per_step=2)
    notes = {n["id"]: n for n in result.cases[0].notes["requests"]}
    assert [len(n["itl_ms"]) for n in notes.values()] == [0, 1, 1, 0, 1, 1]
    assert notes["r2"]["output_tokens"] == 4


def test_outputs_are_tokens_with_rounded_margins_and_a_digest_of_the_tokens():
    first, second = measure()[0].cases[0].outputs, measure()[0].cases[0].outputs
    assert first == second
    assert first["kind"] == "tokens"
    assert first["requests"][1] == {
        "id": "r1",
        "tokens": [101, 102, 103],
        "margins": [0.12346] * 3,
        "finish": "length",
    }

    def flip(engine, events):
        return [
            TokenEvent(e.request_id, e.token + (e.token == 103), e.finish_reason) for e in events
        ]

    other = measure(fault=flip)[0].cases[0].outputs
    assert other["digest"] != first["digest"]
    assert other["requests"][1]["margins"] is None  # the engine gave none


def test_outputs_spell_their_tokens_where_a_tokenizer_is_given(tmp_path):
    import tokenizers

    words = {" a": 101, "b": 102, "": 103}
    model = tokenizers.models.WordLevel({**words, "?": 0}, unk_token="?")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    clock = Clock()
    spelling = ServingSession(
        StubEngine(clock), PROMPTS,
        Workload(name="test", kind="requests", concurrency=2),
        seed=5, vocab_size=50, detokenizer=Detokenizer(tmp_path), clock=clock,
    )  # fmt: skip
    outputs = spelling.measure(lambda what: None).cases[0].outputs
    assert outputs["pieces"]["102"].endswith("b") and "203" not in outputs["pieces"]
    plain = measure()[0].cases[0].outputs
    assert "pieces" not in plain and plain["digest"] == outputs["digest"]


def test_warm_up_serves_the_first_shapes_with_other_ids_and_forgets_the_counts():
    clock = Clock()
    engine = StubEngine(clock)
    session(engine, clock, warmup=3).warm_up()
    assert [len(r.prompt_token_ids) for r in engine.submitted] == [3, 4, 5]
    assert [r.params.max_tokens for r in engine.submitted] == [2, 3, 4]
    assert all(
        r.prompt_token_ids != p.token_ids for r, p in zip(engine.submitted, PROMPTS, strict=False)
    )
    assert all(0 <= t < 50 for r in engine.submitted for t in r.prompt_token_ids)
    assert engine.resets == 1 and engine.steps == 0


def test_cold_clears_the_cache_and_warm_serves_everything_once_before():
    served = {}
    for state in CacheState:
        clock = Clock()
        engine = StubEngine(clock)
        run = session(engine, clock, warmup=1, cache_state=state)
        run.warm_up()
        assert engine.calls == ["clear", "reset"]
        served[state] = [r.prompt_token_ids for r in engine.submitted[1:]]
        assert run.measure(lambda text: None).notes["cache_state"] == state.value
    assert served[CacheState.cold] == []
    assert served[CacheState.warm] == [p.token_ids for p in PROMPTS]


def test_a_warm_up_of_requests_at_a_rate_does_not_send_them_all_at_once():
    """A server refused most of a thousand, whose prefixes then were not cached."""
    clock, prompts = Clock(), [Prompt(f"r{i}", (1, 2), 2) for i in range(40)]
    engine, paced = StubEngine(clock), {"arrivals": Arrivals(ArrivalKind.poisson, 9.0)}
    paced |= {"cache_state": CacheState.warm, "concurrency": None}
    session(engine, clock, prompts, warmup=0, **paced).warm_up()
    assert len(engine.submitted) == 40 and engine.most_in_flight == 16


def test_prompts_that_were_served_before_share_all_their_blocks():
    shared = {}
    for state in CacheState:
        clock = Clock()
        run = session(StubEngine(clock), clock, PROMPTS[-1:], block_size=2, cache_state=state)
        shared[state] = run.measure(lambda text: None).notes["sharing"]["shared_tokens"]
    assert shared == {CacheState.cold: 0, CacheState.warm: 6}


def test_outputs_without_token_ids_are_distinguished_by_text():
    def outputs(*texts):
        return serving_session.outputs_of(
            [ServedRequest(f"r{i}", 3, 0.0, text=text) for i, text in enumerate(texts)]
        )

    text_outputs = outputs("one", None)
    assert text_outputs["kind"] == "text" and [r["text"] for r in text_outputs["requests"]] == [
        "one",
        "",
    ]
    one, other = (r["text_digest"] for r in text_outputs["requests"])
    assert one != other
    digests = {outputs(*texts)["digest"] for texts in (("one", ""), ("", "one"), ("one", "x"))}
    assert len(digests) == 3 and text_outputs["digest"] in digests


def test_sampling_parameters_reach_the_engine_and_every_request_has_its_own_stream():
    clock = Clock()
    engine = StubEngine(clock)
    session(engine, clock, temperature=0.7, top_k=5, top_p=0.9).measure(lambda text: None)
    params = [r.params for r in engine.submitted]
    assert {(p.temperature, p.top_k, p.top_p, p.ignore_eos) for p in params} == {
        (0.7, 5, 0.9, True)
    }
    assert len({p.seed for p in params}) == len(PROMPTS)


def fail(*names, after=0):
    """Let requests end with an error, when they have got so many tokens."""

    def fault(engine, events):
        returned = []
        for event in events:
            state = engine.live.get(event.request_id)
            if event.request_id in names and (state is None or state[1] > after):
                engine.live.pop(event.request_id, None)
                event = TokenEvent(event.request_id, -1, "error", error="no room for it")
            returned.append(event)
        return returned

    return fault


def lose(engine, events):
    engine.live.clear()
    engine.waiting.clear()
    return []


def shorten(engine, events):
    engine.live.pop(events[0].request_id, None)
    return [TokenEvent(events[0].request_id, 1, "length"), *events[1:]]


def stop(engine, events):
    return [TokenEvent(e.request_id, e.token, "stop" if e.finish_reason else None) for e in events]


def haunt(engine, events):
    return [TokenEvent("ghost", 1, None)]


def not_a_number(engine, events):
    return [TokenEvent(e.request_id, e.token, e.finish_reason, margin=float("nan")) for e in events]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (fail(*(p.request_id for p in PROMPTS)), "no request was served; request r0: no room for"),
        (
            fail(*(p.request_id for p in PROMPTS), after=1),
            "no request was served; request r0: no room for it",
        ),
        (lose, r"no work left, but requests r0, r1 are unfinished"),
        (shorten, "request r0 ended with 1 of 2 tokens"),
        (stop, "request r0 ended with finish reason stop"),
        (haunt, "an event names request ghost"),
        (not_a_number, "request r0, token 0: the logits are not finite"),
    ],
)
def test_impossible_outputs_are_invalid_output(fault, message):
    with pytest.raises(InvalidOutput, match=message):
        measure(fault=fault)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(StaleLaunchError, StaleOutput), (InvalidLogitsError, InvalidOutput)],
)
def test_an_error_reported_by_the_engine_is_named(error, outcome):
    def fault(engine, events):
        raise error("layer 3: stamp 7, expected 8")

    with pytest.raises(outcome, match="layer 3: stamp 7"):
        measure(fault=fault)


def test_free_lengths_may_stop_early():
    clock = Clock()
    engine = StubEngine(clock, fault=stop)
    result = session(engine, clock, ignore_eos=False).measure(lambda text: None)
    assert {r["finish"] for r in result.cases[0].outputs["requests"]} == {"stop"}


def test_close_closes_the_engine():
    clock = Clock()
    engine = StubEngine(clock)
    session(engine, clock).close()
    assert engine.closed


def test_one_request_that_fails_does_not_void_the_others():
    result, _, beats = measure(fault=fail("r1"))
    (whole,) = result.cases
    traffic = whole.notes["traffic"]
    assert (traffic["served"], traffic["refused"], traffic["failed"]) == (5, 1, 0)
    assert traffic["unserved"] == [{"id": "r1", "outcome": "refused", "error": "no room for it"}]
    assert [r["id"] for r in whole.notes["requests"]] == ["r0", "r2", "r3", "r4", "r5"]
    outputs = {r["id"]: r for r in whole.outputs["requests"]}
    assert outputs["r1"]["tokens"] == [] and outputs["r1"]["finish"] == "error"
    assert beats[-1] == "6 of 6 requests"
    later, _, _ = measure(fault=fail("r2", after=2))
    assert later.cases[0].notes["traffic"]["failed"] == 1
    assert later.cases[0].outputs["digest"] != measure()[0].cases[0].outputs["digest"]


def arriving(kind, *, prompts=PROMPTS, capacity=100, **options):
    """Measure requests that arrive by themselves: steps of 1 s, waits by the same clock."""
    clock = Clock()
    engine = StubEngine(clock, capacity=capacity)
    naps = []

    def wait(seconds):
        naps.append(seconds)
        clock.now += seconds

    given = {"concurrency": None, **options.pop("workload", {})}
    workload = Workload(name="test", arrivals=Arrivals(ArrivalKind(kind), **options), **given)
    run = ServingSession(engine, prompts, workload, seed=5, vocab_size=50, clock=clock, wait=wait)
    result = run.measure(lambda text: None)
    notes = result.cases[0].notes
    return {n["id"]: n for n in notes["requests"]}, notes["traffic"], engine, naps


PACED = {"arrivals": Arrivals(ArrivalKind.poisson, 100.0), "concurrency": None}


@pytest.mark.parametrize(
    ("changes", "primary"),
    [
        ({}, "total_tok_s"),
        (PACED, "e2e_p50_ms"),
        ({"limits": LatencySLO(e2e_ms=9000)}, "goodput_req_s"),
        ({**PACED, "limits": LatencySLO(e2e_ms=9000), "per_request": True}, "goodput_req_s"),
    ],
)
@pytest.mark.parametrize("kind", ["requests", "mine.kinds:Kind"])
def test_a_record_marks_the_primary_metric_of_its_workload(kind, changes, primary):
    """For a kind of the user's own only the record tells it."""
    clock = Clock()
    run = session(StubEngine(clock), clock, kind=kind, **changes)
    cases = run.measure(lambda text: None).cases
    assert [m.name for case in cases for m in case.metrics if m.primary] == [primary]


def test_requests_arrive_at_their_time_whatever_the_engine_does():
    """One every 2.5 s and steps of 1 s: the second is due in the middle of a step."""
    requests, traffic, engine, _ = arriving("constant", rate=0.4)
    assert [n["submitted_ms"] for n in requests.values()] == [0, 2500, 5000, 7500, 10000, 12500]
    # r0 has two tokens and ends at 2; r1 of three tokens begins at once at 2.5.
    assert engine.joined[:3] == pytest.approx([0, 2.5, 5.5])
    assert requests["r2"]["ttft_ms"] == 1500  # half a second of it another's step
    assert all(n["queued_ms"] == 0 and n["late_ms"] <= 0.001 for n in requests.values())
    assert traffic["due_per_s"] == traffic["sent_per_s"] == pytest.approx(0.4)
    assert (traffic["asked_per_s"], traffic["asked_unit"]) == (0.4, "requests/s")


def test_all_at_once_is_all_in_flight():
    requests, traffic, engine, naps = arriving("at_once")
    assert engine.most_in_flight == len(PROMPTS) and naps == []
    assert traffic["due_per_s"] is None
    assert {n["submitted_ms"] for n in requests.values()} == {0}


def test_requests_beyond_the_concurrency_limit_wait_at_the_client():
    requests, traffic, engine, _ = arriving("at_once", workload={"concurrency": 2})
    assert engine.most_in_flight == 2
    waits = [n["queued_ms"] for n in requests.values()]
    assert waits == [0, 0, 2000, 3000, 5000, 6000]
    assert requests["r2"]["ttft_ms"] == 3000  # from its arrival, not from when it is sent
    assert traffic["queue_ms"]["max"] == 6000


def test_a_turn_waits_for_the_answer_before_it():
    prompts = [Prompt(f"r{i}", (1, 2), 4, "ab"[i // 3]) for i in range(6)]
    requests, traffic, engine, _ = arriving("constant", prompts=prompts, rate=0.5)
    assert [n["submitted_ms"] for n in requests.values()] == [
        0, 4000, 8000, 2000, 6000, 10000,
    ]  # fmt: skip
    assert [n["queued_ms"] for n in requests.values()] == [0] * 6, requests
    assert engine.most_in_flight == 2
    assert (traffic["asked_per_s"], traffic["asked_unit"]) == (0.5, "sessions/s")


class StubServer(ServerStub, StubEngine):
    """A server whose client takes 0.25 s to parse what was received."""

    def step(self):
        received = []
        for event in super().step():
            at, name = self.clock.now, event.request_id
            received.append(StreamEvent(name, event.token, None, received=at))
            if event.finish_reason is not None:
                received.append(StreamEvent(name, NO_TOKEN, "length", received=at))
        self.clock.now += 0.25
        return received


def test_a_turn_arrives_when_the_answer_before_it_is_received_not_when_it_is_parsed():
    clock = Clock()
    prompts = [Prompt(f"r{i}", (1, 2), 4, "a") for i in range(3)]
    arrivals = Arrivals(ArrivalKind.constant, 100.0)
    run = session(StubServer(clock), clock, prompts, arrivals=arrivals, concurrency=None)
    load_generator = run.start(lambda text: None)
    load_generator.run()
    first, second, third = load_generator.entries
    assert (second.arrived, third.arrived) == (first.ended, second.ended)
    assert (first.late, second.late, third.late) == (0, 0.25, 0.25)
    assert second.ttft == 1.25


def test_a_wait_is_short_and_no_part_of_a_step():
    clock = Clock()
    engine = StubEngine(clock)

    def wait(seconds):
        clock.now += seconds + 0.004  # a sleep lasts longer than requested

    arrivals = Arrivals(ArrivalKind.constant, 0.2)
    workload = Workload(name="test", arrivals=arrivals, concurrency=None)
    run = ServingSession(
        engine, PROMPTS[:2], workload, seed=5, vocab_size=50, clock=clock, wait=wait
    )
    load_generator = run.start(lambda text: None)
    load_generator.run()
    assert load_generator.step_seconds().tolist() == pytest.approx(
        [1.0] * len(load_generator.steps)
    )
    second = load_generator.entries[1]
    assert second.due == second.submitted == 5.0
    assert 0 < second.late <= 0.024 and load_generator.cpu_s > 0


class SlowServer(StubServer):
    """A server that answers after 2 s, and whose client waits as long as it is told to."""

    def wait(self, seconds):
        self.clock.now += seconds

    def step(self):
        events, now = [], self.clock.now
        while self.waiting and now >= self.joined[-len(self.waiting)] + 2.0:
            name = self.waiting.popleft().request_id
            events.append(StreamEvent(name, 7, None, received=now))
            events.append(StreamEvent(name, NO_TOKEN, "length", received=now))
        return events


def test_staggered_clients_of_a_server_join_one_after_the_other():
    clock = Clock()
    prompts = [Prompt(f"r{i}", (1,), 1) for i in range(5)]
    run = session(SlowServer(clock), clock, prompts, concurrency=4, stagger_ms=50)
    run.measure(lambda text: None)
    assert run.engine.joined[:4] == pytest.approx([0.0, 0.05, 0.1, 0.15])
    assert run.engine.joined[4] >= 2.0


@pytest.mark.parametrize(
    ("arrivals", "concurrency", "streams"),
    [
        (Arrivals(), 3, 3),
        (Arrivals(), 99, 20),
        (Arrivals(ArrivalKind.at_once), None, 20),
        (Arrivals(ArrivalKind.poisson, 9.0), None, 16),
    ],
)
def test_the_client_alone_has_as_many_streams_as_the_load(arrivals, concurrency, streams):
    clock, prepared = Clock(), []
    engine = StubServer(clock)
    engine.prepare_requests = lambda requests, count: prepared.append((len(requests), count))
    prompts = [Prompt(f"r{i}", (1,), 1) for i in range(20)]
    load = {"arrivals": arrivals, "concurrency": concurrency}
    session(engine, clock, prompts, warmup=0, **load).warm_up()
    assert prepared == [(20, streams)]
