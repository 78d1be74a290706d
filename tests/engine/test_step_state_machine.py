"""Every way to run a step, in any order of adding, stepping, aborting and preempting."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from stub_engine import VOCAB, Adversary, make_cache, make_engine, solo
from test_engine_state_machine import STRATEGIES, EngineMachine

from labkit import config

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


class StepMachine(EngineMachine):
    """The engine's machine with a step in flight, with drafts, with padding."""

    @initialize(
        num_blocks=st.integers(2, 14),
        options=STRATEGIES,
        every=st.sampled_from([0, 0, 1, 2, 3, 5]),
        prefixes=st.sampled_from(config.PrefixCache),
        alphabet=st.sampled_from([2, VOCAB]),
        step=STEPS,
    )
    def start(self, num_blocks, options, every, prefixes, alphabet, step):
        cache = make_cache(num_blocks, 4, prefixes.value)
        self.engine, self.model = make_engine(num_blocks, cache=cache, **step, **options)
        self.alphabet = alphabet
        self.options, self.every = options, every
        self.requests, self.tokens, self.dead = {}, {}, set()
        self.steps = self.preempted = 0

    def solo(self, params, prompt):
        return solo(prompt, params.max_tokens, params.ignore_eos)

    def plain_step(self):
        self.take_events()

    def most(self, tokens):
        """Drafts and rows in vain are computed on top."""
        return float("inf")

    def teardown(self):
        super().teardown()
        if hasattr(self, "engine"):
            self.engine.close()


TestStepMachine = StepMachine.TestCase
TestStepMachine.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
