"""Request arms in turns: clocks of their own, fair random slices, stalls taken out."""

import gc
import random
import time
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest
from serving_stubs import Clock, ServerStub, StubEngine

from labkit.config import ArrivalKind, Arrivals, Workload
from labkit.engine.engine_protocol import NO_TOKEN, StreamEvent
from labkit.workload.arm_clocks import ArmClock, LiveClock
from labkit.workload.requests import interleaved_serving_arms
from labkit.workload.requests.interleaved_serving_arms import InterleavedServing, ServingArm
from labkit.workload.requests.serving_session import ServingSession
from labkit.workload.tokenized_prompt import Prompt
from labkit.workload.turn_order import RandomTurnOrder
from labkit.workload.workload_protocols import InvalidOutput

PROMPTS = [Prompt(f"r{i}", (1, 2, 3), 20 + 7 * (i % 5)) for i in range(12)]


def plain(step, live):
    """Steps of 4 ms and some more for each live request."""
    return 0.004 + 0.0005 * live


def chat(**options):
    given = {"concurrency": 4, "warmup": 1, **options}
    return Workload(name="test", kind="requests", **given)


def alone(seconds, **options):
    base = Clock(100.0)
    session = ServingSession(
        StubEngine(base, seconds), PROMPTS, chat(**options), seed=5, vocab_size=50, clock=base
    )
    session.warm_up()
    return session.measure(lambda text: None)


def test_the_default_clocks_count_waiting_for_a_device():
    """A GPU or a server that works while the host waits takes no CPU time."""
    wait_s, base = 0.002, Clock(100.0)

    def seconds(step, live):
        time.sleep(wait_s)
        return 0.0

    def e2e_ms(engine, **clock):
        prompts = PROMPTS[:1]
        session = ServingSession(engine, prompts, chat(), seed=5, vocab_size=50, **clock)
        with clock["clock"].running() if clock else nullcontext():
            (case,) = session.measure(lambda text: None).cases
        return {metric.name: metric.repeats for metric in case.metrics}["e2e_p50_ms"][0]

    for clock in ({}, {"clock": ArmClock()}):
        engine = StubEngine(base, seconds)
        assert e2e_ms(engine, **clock) >= 1e3 * wait_s * engine.steps > 0


class Together:
    """Arms that take turns; ``log`` is the order, ``between`` seconds pass between two turns."""

    def __init__(self, *kinds, seed=1, between=0.0, workloads=None, **options):
        self.base, self.log, self.between = Clock(100.0), [], between
        self.engines = [StubEngine(self.base, kind) for kind in kinds]
        seats = []
        workloads = workloads or [chat(**options)] * len(kinds)
        for engine, workload in zip(self.engines, workloads, strict=True):
            clock = ArmClock(self.base)
            session = ServingSession(
                engine, PROMPTS, workload, seed=5, vocab_size=50, clock=clock, wait=self.wait
            )
            seats.append(ServingArm(session, clock))
        self.turns = InterleavedServing(seats, RandomTurnOrder(random.Random(seed)), self.turn)

    def wait(self, seconds):
        self.base.now += seconds

    @contextmanager
    def turn(self, arm):
        self.base.now += self.between
        self.log.append(arm)
        yield

    def measure(self):
        self.turns.warm_up()
        self.log.clear()
        return self.turns.measure(lambda text: None)


def metrics(measurement):
    return {m.name: m.repeats[0] for m in measurement.cases[0].metrics}


def speed(measurement):
    return metrics(measurement)["total_tok_s"]


def test_what_was_loaded_is_kept_from_the_collector_while_it_is_measured():
    frozen = []

    def seconds(step, live):
        if len(frozen) < 3:  # it counts them one by one
            frozen.append(gc.get_freeze_count())
        return plain(step, live)

    gc.unfreeze()  # what tests/conftest.py has frozen
    turns = Together(seconds).turns
    turns.warm_up()
    assert not any(frozen)
    frozen.clear()
    turns.measure(lambda text: None)
    assert min(frozen) > 0 and gc.get_freeze_count() == 0 and gc.isenabled()


def test_a_clock_stands_still_outside_its_turns():
    base = Clock(100.0)
    clock = ArmClock(base)
    base.now += 5
    assert clock() == 0
    with clock.running():
        base.now += 2
        assert clock() == 2
        with pytest.raises(RuntimeError, match="before the previous turn ended"), clock.running():
            pass
    base.now += 50
    assert clock() == 2
    with pytest.raises(KeyError), clock.running():
        base.now += 1
        raise KeyError
    base.now += 50
    assert clock() == 3


def test_what_happens_in_the_others_turns_moves_no_time():
    """Every metric, and every request's times, are those of the arm served alone."""
    together = Together(plain, lambda step, live: 0.05, between=0.7)
    first, second = together.measure()
    assert metrics(first) == pytest.approx(metrics(alone(plain)))
    assert metrics(second) == pytest.approx(metrics(alone(lambda step, live: 0.05)))
    expected = alone(plain).cases[0].notes["requests"]
    for got, wanted in zip(first.cases[0].notes["requests"], expected, strict=True):
        assert got["ttft_ms"] == pytest.approx(wanted["ttft_ms"], abs=0.002)
        assert got["itl_ms"] == pytest.approx(wanted["itl_ms"], abs=0.002)


def test_clients_join_by_the_arm_s_own_clock():
    options = {"stagger_ms": 60.0, "warmup": 0}
    together = Together(plain, lambda step, live: 0.05, between=0.7, **options)
    first, _ = together.measure()
    expected = alone(plain, **options).cases[0].notes["requests"]
    joined = [request["submitted_ms"] for request in first.cases[0].notes["requests"]]
    assert joined == pytest.approx([request["submitted_ms"] for request in expected])
    assert joined[:2] == [0, pytest.approx(63)]


def test_requests_arrive_in_the_arm_s_own_time():
    options = {"arrivals": Arrivals(ArrivalKind.constant, 5.0), "warmup": 0, "concurrency": None}
    first, second = Together(plain, lambda step, live: 0.05, between=0.7, **options).measure()
    for measured in (first, second):
        requests = measured.cases[0].notes["requests"]
        assert [r["submitted_ms"] for r in requests] == [200.0 * i for i in range(len(PROMPTS))]
        assert measured.cases[0].notes["traffic"]["late_ms"]["max"] == pytest.approx(0, abs=0.01)
    assert speed(first) != pytest.approx(speed(second), rel=0.01)


def test_a_stall_while_a_request_arrives_leaves_no_negative_time():
    options = {"arrivals": Arrivals(ArrivalKind.constant, 5.0), "warmup": 0, "concurrency": None}
    stalled, calm = Together(noisy(0, stall=60), noisy(1), **options).measure()
    assert stalled.notes["stalls"]["seconds"] > 2.5
    for measured in (stalled, calm):
        assert min(r["ttft_ms"] for r in measured.cases[0].notes["requests"]) > 0


def test_outputs_are_those_of_the_arm_alone():
    for got in Together(plain, plain).measure():
        assert got.cases[0].outputs == alone(plain).cases[0].outputs
        assert got.counters == alone(plain).counters


def test_every_round_gives_every_arm_one_turn_in_a_random_order():
    def orders(seed):
        together = Together(*[lambda step, live: 0.04] * 3, seed=seed)
        together.measure()
        return together.log[:-3]  # the last turns compute the metrics

    log = orders(1)
    rounds = [tuple(log[i : i + 3]) for i in range(0, len(log), 3)]
    assert all(sorted(order) == [0, 1, 2] for order in rounds)
    firsts = [sum(order[0] == arm for order in rounds) for arm in range(3)]
    assert len(set(rounds)) == 6 and min(firsts) > len(rounds) / 6
    assert orders(1) == log != orders(2)


def test_a_slice_is_whole_steps_and_ends_with_the_one_that_reaches_30_ms():
    together = Together(lambda step, live: 0.008, lambda step, live: 0.2)
    at = {0: [0], 1: [0]}

    @contextmanager
    def turn(arm):
        yield
        at[arm].append(together.engines[arm].steps)

    together.turns.warm_up()
    at[0], at[1] = [0], [0]
    together.turns._turn = turn
    together.turns.measure(lambda text: None)
    assert {b - a for a, b in pairwise(at[0][:-2])} == {int(RandomTurnOrder.slice_s / 0.008) + 1}
    assert {b - a for a, b in pairwise(at[1][:-1])} == {1}


class StubServer(ServerStub, StubEngine):
    """A stub engine whose tokens another process computes."""

    def step(self):
        events, now = [], self.clock
        for event in super().step():
            token = replace(event, finish_reason=None)
            events.append(StreamEvent(**asdict(token), received=now()))
            if event.finish_reason is not None:  # without a token
                end = replace(event, token=NO_TOKEN)
                events.append(StreamEvent(**asdict(end), received=now(), counted=1))
        return events


def test_a_server_s_times_are_its_arm_s_and_keep_what_looks_like_a_stall():
    def spiky(step, live):
        return 0.01 + 0.5 * (step == 20)

    base = Clock(100.0)
    seats = []
    for _ in range(2):
        clock = ArmClock(base)
        engine = StubServer(base, spiky)
        session = ServingSession(engine, PROMPTS, chat(), seed=5, vocab_size=50, clock=clock)
        seats.append(ServingArm(session, clock))

    @contextmanager
    def turn(arm):
        base.now += 3.0  # the others' turns
        yield

    order = RandomTurnOrder(random.Random(1))
    for measured in InterleavedServing(seats, order, turn).measure(lambda text: None):
        assert "stalls" not in measured.notes
        steps = seats[0].session.engine.steps
        assert metrics(measured)["wall_s"] == pytest.approx(0.01 * (steps - 1) + 0.5, rel=0.05)


@pytest.mark.parametrize("kind", [StubServer, StubEngine])
def test_counters_are_read_once_if_computed_tokens_need_not_be_read_from_them(kind):
    """A server's client tokenises all answers to count them, and an engine sums its launches."""
    reads, own = [], []

    class Counted(kind):
        def counters(self):
            reads.append(self.steps)
            return super().counters()

    base = Clock(100.0)
    engine = Counted(base, plain)
    if kind is StubEngine:
        engine.computed_tokens = lambda: own.append(engine.steps) or float(engine.computed)
    clock = ArmClock(base)
    session = ServingSession(engine, PROMPTS, chat(), seed=5, vocab_size=50, clock=clock)
    order = GrantedOrder(random.Random(1))
    serving = InterleavedServing([ServingArm(session, clock)], order, lambda arm: nullcontext())
    serving.measure(lambda text: None)
    assert reads == [engine.steps]
    assert own == ([] if kind is StubServer else [*range(1, engine.steps + 1)])


def test_a_turn_ends_in_time_although_a_server_sends_nothing():
    base, waits = Clock(100.0), []

    class Silent(StubServer):
        def wait(self, seconds):
            waits.append(seconds)
            base.now += seconds

    seats = []
    for _ in range(2):
        clock = ArmClock(base)
        engine = Silent(base, lambda step, live: 0.0)
        session = ServingSession(engine, PROMPTS, chat(), seed=5, vocab_size=50, clock=clock)
        seats.append(ServingArm(session, clock))
    order = RandomTurnOrder(random.Random(1))
    InterleavedServing(seats, order, lambda arm: nullcontext()).measure(lambda text: None)
    assert len(waits) > 100 and max(waits) == pytest.approx(order.slice_s)


class GrantedOrder(RandomTurnOrder):
    """The order of turns of an arm that takes turns with arms of other processes."""

    other_processes = True


def test_what_a_live_arm_computes_ahead_goes_on_in_its_next_turn_and_takes_time_on_its_clock():
    base, drained, stops = Clock(100.0), [], []
    clock = LiveClock(lambda: sum(stops), base)
    engine = StubEngine(base, lambda step, live: 0.01)
    engine.drain = lambda: drained.append(base.now)
    session = ServingSession(engine, PROMPTS, chat(), seed=5, vocab_size=50, clock=clock)

    @contextmanager
    def turn(arm):
        stops.append(3.0)
        base.now += 3.0  # the others' turns
        yield
        base.now += 0.001  # until the process is stopped

    order = GrantedOrder(random.Random(1))
    serving = InterleavedServing([ServingArm(session, clock)], order, turn)
    serving.warm_up()
    drained.clear()
    stops.clear()
    (measured,) = serving.measure(lambda text: None)
    turns = len(stops) - 1  # the last one computes the metrics
    assert not drained and turns > 5
    expected = 0.01 * engine.steps + 0.001 * (turns - 1)
    assert metrics(measured)["wall_s"] == pytest.approx(expected)


def test_an_arm_that_is_done_drops_out():
    together = Together(plain, lambda step, live: 10 * plain(step, live))
    fast, slow = together.measure()
    log = together.log[:-2]  # the last two turns compute the metrics
    last = max(i for i, arm in enumerate(log) if arm == 0)
    assert len(log) > 2 * last and set(log[last + 1 :]) == {1}
    assert speed(fast) / speed(slow) == pytest.approx(10)


def noisy(seed, factor=1.0, stall=None):
    rng = np.random.default_rng(seed)

    def seconds(step, live):
        noise = 1 + 0.03 * rng.random()
        return factor * plain(step, live) * noise + (3.0 if step == stall else 0.0)

    return seconds


@pytest.mark.parametrize("arms", [2, 3])
def test_a_stall_in_one_turn_does_not_move_the_estimate(arms):
    calm = Together(*(noisy(i) for i in range(arms))).measure()
    stalled = Together(noisy(0, stall=31), *(noisy(i) for i in range(1, arms))).measure()
    before, after = (speed(m[0]) / speed(m[1]) for m in (calm, stalled))
    assert after == pytest.approx(before, rel=0.004)
    assert stalled[0].notes["stalls"]["seconds"] == pytest.approx(3.0, rel=0.01)
    assert stalled[1].notes["stalls"]["steps"] == stalled[1].notes["stalls"]["seconds"] == 0
    calm_ms, stalled_ms = metrics(calm[0]), metrics(stalled[0])
    for name in ("e2e_p99_ms", "itl_chunk_p99_ms", "ttft_p99_ms"):
        assert stalled_ms[name] == pytest.approx(calm_ms[name], rel=0.05)


def test_times_with_the_stall_stand_beside():
    stalled, calm = Together(noisy(0, stall=31), noisy(1)).measure()
    (case,) = stalled.cases
    whole, noted = case.notes["as_measured"], stalled.notes["stalls"]
    assert list(whole) == [metric.name for metric in case.metrics]
    took = noted["of_s"]  # of all its steps, which is from the first request to the last token
    slower = (took - noted["seconds"]) / took
    assert whole["total_tok_s"] == pytest.approx(slower * speed(stalled), rel=1e-6)
    assert "as_measured" not in calm.cases[0].notes


@pytest.mark.parametrize("every", [5, 10, 20])
def test_what_an_arm_does_now_and_then_is_taken_for_stalls_and_kept_beside(every):
    """One process can't tell them apart; ``analysis.machine_or_arm_stalls`` can, over many."""

    def collects(step, live):
        return 0.005 + (0.02 if step % every == 0 else 0.0)

    base, arm = Together(lambda step, live: 0.005, collects).measure()
    assert speed(base) / speed(arm) == pytest.approx(1, abs=0.01)
    whole = arm.cases[0].notes["as_measured"]["total_tok_s"]
    assert speed(base) / whole == pytest.approx(1 + 4 / every, rel=0.02)


def test_a_stall_is_found_where_the_schedules_differ_too():
    workloads = [chat(), chat(concurrency=3)]
    stalled, other = Together(noisy(0, stall=31), noisy(1), workloads=workloads).measure()
    assert speed(stalled) == pytest.approx(speed(alone(noisy(0))), rel=0.05)
    assert other.notes["stalls"]["seconds"] == 0


@pytest.mark.parametrize("factor", [1.03, 2.0, 0.5])
def test_what_an_arm_does_slower_stays(factor):
    base, _, arm = Together(noisy(0), noisy(1), noisy(2, factor)).measure()
    assert speed(base) / speed(arm) == pytest.approx(factor, rel=0.005)


def test_what_an_arm_does_slower_in_one_kind_of_step_stays():
    def kinds(seed, long):
        rng = np.random.default_rng(seed)
        return lambda step, live: (long if step % 8 == 3 else 0.005) * (1 + 0.03 * rng.random())

    base, arm = Together(kinds(0, 0.04), kinds(1, 0.12)).measure()
    assert speed(base) / speed(arm) == pytest.approx((0.12 + 7 * 0.005) / (0.04 + 7 * 0.005), 0.02)


def test_what_goes_wrong_goes_wrong_in_the_turn_of_its_arm():
    together = Together(plain, plain, plain)
    together.turns.warm_up()
    engine = together.engines[2]
    step = engine.step

    def broken():
        if engine.steps == 40:
            engine.live.clear()
            return []
        return step()

    engine.step = broken
    with pytest.raises(InvalidOutput, match="no work left"):
        together.turns.measure(lambda text: None)
    assert together.log[-1] == 2
    together.turns.close()
    assert all(engine.closed for engine in together.engines)


def test_steps_of_a_rare_kind_are_no_stalls():
    """Four long prefills beside many decodes, where nothing of the same schedule is beside them."""
    times = np.array([0.03] * 60 + [5.0] * 4)
    tokens = np.array([96.0] * 60 + [4000.0] * 4)
    assert not interleaved_serving_arms.by_similar_steps(times, tokens).any()
    times[7] += 0.5
    assert interleaved_serving_arms.by_similar_steps(times, tokens).nonzero()[0].tolist() == [7]
    assert not interleaved_serving_arms.by_similar_steps(times, np.zeros(64)).any()


def test_what_an_engine_computes_ahead_ends_in_its_own_turn_and_on_its_own_clock():
    together = Together(plain, plain)
    engine, seen = together.engines[0], []

    def drain():
        seen.append(together.log[-1])
        together.base.now += 0.002

    engine.drain = drain
    ahead, other = together.measure()
    slices = together.log[:-2].count(0)
    assert set(seen) == {0} and len(seen) == slices + 1  # and one after the warm-up
    lost = ahead.notes["stalls"]["seconds"]
    assert lost == other.notes["stalls"]["seconds"] == 0
    tokens = sum(len(p.token_ids) + p.max_tokens for p in PROMPTS)
    # The last one comes after the last token.
    extra = tokens / speed(ahead) - tokens / speed(other)
    assert extra == pytest.approx(0.002 * (slices - 1))
