"""The engine under random adds, steps, aborts and preemptions: its accounting stays consistent."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from stub_engine import VOCAB, Adversary, make_engine, request, solo

from labkit import config
from labkit.engine.engine_protocol import NO_TOKEN


def legal(options):
    """Tell whether the config allows these strategies together."""
    try:
        config.Scheduler(**options)
    except config.ConfigError:
        return False
    return True


@st.composite
def strategies(draw):
    """Any legal combination of caps and strategies."""
    seqs = draw(st.integers(1, 4))
    budget = seqs + draw(st.integers(0, 8))
    chunk = draw(st.none() | st.integers(1, budget))
    reservation = draw(st.sampled_from(config.Reservation))
    optimistic = reservation is config.Reservation.optimistic
    return {
        "max_num_seqs": seqs,
        "max_num_batched_tokens": budget,
        "chunk": chunk,
        "chunk_policy": draw(st.sampled_from(config.ChunkPolicy)),
        "admission": draw(st.sampled_from(config.Admission)),
        "order": draw(st.sampled_from(config.Order)),
        "composition": draw(st.sampled_from(config.Composition)),
        "reservation": reservation,
        "watermark": draw(st.sampled_from([None, 0, 0.3])) if optimistic else None,
        "queue": draw(st.sampled_from(["fcfs", "priority"])),
    }


STRATEGIES = strategies().filter(legal)
PLAIN = st.just({})
SYNC = st.fixed_dictionaries(
    {
        "proposer": st.none() | st.just("ngram") | st.builds(Adversary, st.integers(0, 99)),
        "num_drafts": st.integers(1, 6),
        "cut": st.sampled_from(["window", "staircase"]),
    }
)
STEPS = st.builds(
    lambda shape, rest: {"shape": shape, **rest},
    st.sampled_from(["exact", "bucketed", "fixed"]),
    SYNC | st.just({"pipeline": "overlap"}),
)


class EngineMachine(RuleBasedStateMachine):
    """Add, step, abort and finish in any order; the books must balance after each."""

    num_snapshots = st.none()  # without states

    @initialize(
        num_blocks=st.integers(2, 14),
        options=STRATEGIES,
        every=st.sampled_from([0, 0, 1, 2, 3, 5]),
        prefixes=st.sampled_from(config.PrefixCache),
        alphabet=st.sampled_from([2, VOCAB]),
        step=PLAIN | STEPS,
        data=st.data(),
    )
    def start(self, num_blocks, options, every, prefixes, alphabet, step, data):
        self.engine, self.model = make_engine(
            num_blocks,
            prefixes=prefixes.value,
            snapshots=data.draw(self.num_snapshots),
            **step,
            **options,
        )
        self.plain = not step
        self.alphabet = alphabet  # few tokens make many shared prefixes
        self.options, self.every = options, every
        self.requests, self.tokens, self.dead = {}, {}, set()
        self.steps = self.preempted = 0

    @rule(
        prompt=st.lists(st.integers(0, VOCAB - 1), max_size=20),
        max_tokens=st.integers(1, 12),
        ignore_eos=st.booleans(),
        priority=st.integers(-1, 1),
    )
    def add(self, prompt, max_tokens, ignore_eos, priority):
        prompt = [token % self.alphabet for token in prompt]
        new = request(f"r{len(self.requests)}", prompt, max_tokens, ignore_eos, priority)
        self.requests[new.request_id] = new
        self.tokens[new.request_id] = []
        self.engine.submit(new)

    @rule(data=st.data())
    def abort(self, data):
        if self.requests:
            request_id = data.draw(st.sampled_from(sorted(self.requests)))
            self.engine.abort(request_id)
            self.dead.add(request_id)

    @rule(data=st.data())
    def preempt(self, data):
        """Preempt any request, at any time: waiting and dead ones must not notice."""
        if self.requests:
            self.force_preemption(data.draw(st.sampled_from(sorted(self.requests))))

    @rule()
    def clear(self):
        self.engine.clear_cache()

    def force_preemption(self, request_id):
        self.engine._scheduler.preempt(request_id)
        self.preempted += 1

    @rule()
    def step(self):
        self.steps += 1
        if self.every and self.steps % self.every == 0 and self.requests:
            self.force_preemption(f"r{self.steps % len(self.requests)}")
        self.advance()

    def advance(self):
        live, before = self.engine._scheduler.has_work(), self.computed()
        self.take_events()
        if self.plain:
            assert self.computed() > before or not live, "a step with live requests did nothing"

    def computed(self):
        return self.engine.counters().get("tokens.computed", 0)

    def take_events(self):
        for event in self.engine.step():
            assert event.request_id not in self.dead, "an event for a dead request"
            if event.token != NO_TOKEN:
                self.tokens[event.request_id].append(event.token)
            if event.finish_reason is not None:
                self.dead.add(event.request_id)
                self.check_finished(event)

    def check_finished(self, event):
        submitted = self.requests[event.request_id]
        output = self.tokens[event.request_id]
        if event.finish_reason == "error":
            slots = len(submitted.prompt_token_ids) + submitted.params.max_tokens - 1
            capacity = self.engine.counters()["blocks.total"]
            assert not submitted.prompt_token_ids or -(-slots // 4) > capacity
            assert output == [] and event.error
        else:
            params = submitted.params
            assert output == solo(submitted.prompt_token_ids, params.max_tokens, params.ignore_eos)

    @invariant()
    def books_balance(self):
        if hasattr(self, "engine"):
            self.engine.check()
            assert self.model.largest <= self.options["max_num_batched_tokens"]

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        tokens = sum(len(r.prompt_token_ids) + r.params.max_tokens for r in self.requests.values())
        # Each token is computed once, and again for each later request that is in its way.
        for _ in range((tokens + 1) * (len(self.requests) + 1)):
            if not self.engine.has_work():
                break
            self.advance()
            self.engine.check()
        assert not self.engine.has_work(), "steps are not bounded"
        assert self.dead == set(self.requests)
        self.engine.clear_cache()
        counters = self.engine.counters()
        assert counters["blocks.allocated"] == counters["blocks.freed"]
        assert counters.get("state_slots.allocated") == counters.get("state_slots.freed")
        if self.plain:  # else drafts, padding and rows in vain come on top
            assert self.computed() - counters["tokens.recomputed"] <= tokens
        if self.options["reservation"] is config.Reservation.full:
            assert counters["preemptions"] <= self.preempted
        self.engine.close()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


class HybridEngineMachine(EngineMachine):
    """The same of a model with a state, whose slots and snapshots must balance too."""

    num_snapshots = st.integers(0, 3)


TestHybridEngineMachine = HybridEngineMachine.TestCase
TestHybridEngineMachine.settings = settings(
    TestEngineMachine.settings, max_examples=40, stateful_step_count=30
)


@pytest.mark.slow
class TestEngineMachineLonger(EngineMachine.TestCase):
    """More examples of the same."""

    settings = settings(TestEngineMachine.settings, max_examples=400)


@pytest.mark.slow
class TestHybridEngineMachineLonger(HybridEngineMachine.TestCase):
    """More examples of the same."""

    settings = settings(TestHybridEngineMachine.settings, max_examples=100)
