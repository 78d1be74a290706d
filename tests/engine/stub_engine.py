"""An engine with a stub model: all scheduling and step modes, no arithmetic.

The stub keeps the KV cache as the real model would see it: it writes the token into the slot
that the batch's block table names, and reads the whole context back from the slots. What it
returns is a function of that context, so a wrong slot, position or block shows.
"""

import mlx.core as mx
import numpy as np

from labkit import config
from labkit.engine import prefix_cache
from labkit.engine.attention.kv_and_state_shapes import StateShape
from labkit.engine.block_pool import BlockPool
from labkit.engine.engine_protocol import NO_TOKEN, Counters
from labkit.engine.kv_layout.kv_and_state_slots import HybridKVCacheManager
from labkit.engine.kv_layout.paged import PagedKVCacheManager
from labkit.engine.llm_engine import LLMEngine
from labkit.engine.recurrent_states.state_arrays import StateMemory
from labkit.engine.recurrent_states.state_slots import StateSlotManager
from labkit.engine.request import Request
from labkit.engine.runner.decode_padding import DecodePadding
from labkit.engine.runner.input_builder import InputBuilder, staircase, window
from labkit.engine.runner.step_launchers import create_launcher
from labkit.engine.sampling.sampling_params import SamplingParams
from labkit.engine.scheduler.scheduler import Scheduler
from labkit.engine.speculation.ngram import NgramProposer
from labkit.engine.speculation.propose_and_verify import DraftVerifier, Speculator
from labkit.engine.step_loop import NoScheduleCheck, StepLoop

VOCAB, EOS = 31, 30
CUTS = {"window": window, "staircase": staircase}


def next_token(context):
    """What the stub says after ``context``: a function of all of it that often repeats itself."""
    known = (sum((i + 1) * token for i, token in enumerate(context)) * 7 + len(context)) % 1009
    return known % VOCAB if known % 4 == 0 else (context[-1] + 1) % 7


def solo(prompt, max_tokens, ignore_eos=True):
    """The tokens a request must get, computed alone."""
    context, out = list(prompt), []
    while len(out) < max_tokens and (ignore_eos or not out or out[-1] != EOS):
        out.append(next_token(context))
        context.append(out[-1])
    return out


class StubModel:
    """Writes all tokens to their slots, then answers each row from what the slots hold."""

    def __init__(self, num_blocks, block_size):
        self.slots = np.full((num_blocks, block_size), -1)
        self.largest = 0
        self.shapes = []

    def __call__(self, batch):
        assert (batch.tokens >= 0).all(), "an unknown token was computed"
        self.largest = max(self.largest, batch.num_tokens)
        self.shapes.append(batch.total_q)
        self.slots[0] = -1000  # whoever reads the null block gets nonsense
        segment = np.repeat(np.arange(len(batch.seq_lens)), np.diff(batch.cu_seqlens_q))
        size = self.slots.shape[1]
        for row, position in enumerate(batch.positions):
            s = segment[row]
            after = batch.cu_seqlens_q[s + 1] - row
            assert position == batch.seq_lens[s] - after
            block = batch.block_tables[s, position // size]
            assert (block == 0) == (row >= batch.num_tokens), "padding, and only that, is nowhere"
            self.slots[block, position % size] = batch.tokens[row]
        logits = np.zeros((len(batch.logit_rows), VOCAB), np.float32)
        for i, row in enumerate(batch.logit_rows):
            positions = np.arange(batch.positions[row] + 1)
            table = batch.block_tables[segment[row]]
            context = self.slots[table[positions // size], positions % size].tolist()
            logits[i] = self.answer(context) if row < batch.num_tokens else np.nan
        return logits

    def answer(self, context):
        """The logits after a context."""
        return np.eye(VOCAB, dtype=np.float32)[next_token(context)]


class StatefulStub(StubModel):
    """A stub that also has a state: a digest of a request's tokens, in labkit's own state memory.

    It checks after every token that the digest is that of the context in the request's slots.
    """

    SHAPES = (StateShape(((1,),), ("int64",)),)

    def __init__(self, num_blocks, block_size, slots):
        super().__init__(num_blocks, block_size)
        self.states = StateMemory(self.SHAPES, slots.num_slots)

    def __call__(self, batch):
        logits = super().__call__(batch)
        step = self.states.prepare(batch.states, None, batch.total_q)
        digests = np.zeros(batch.total_q, np.int64)
        for group in step.groups:
            self.mix(group, batch.tokens, digests)
        mx.eval(step.pending())
        segment = np.repeat(np.arange(len(batch.seq_lens)), np.diff(batch.cu_seqlens_q))
        for row in range(batch.num_tokens):
            positions = np.arange(batch.positions[row] + 1)
            table, size = batch.block_tables[segment[row]], self.slots.shape[1]
            context = self.slots[table[positions // size], positions % size]
            assert digests[row] == digest(context), "a state of other tokens was read"
        return logits

    @staticmethod
    def mix(group, tokens, digests):
        """Update a group's states as a recurrent layer would."""
        rows = np.arange(len(group.batch.slots) * (group.num_tokens + group.num_drafts))
        rows = rows.reshape(len(group.batch.slots), -1)
        if group.rows is not None:
            rows = np.array(group.rows)
        for part, (start, stop) in enumerate(group.parts):
            before = group.read(part, 0, 0)
            state = np.zeros(len(rows), np.int64) if before is None else np.array(before)[:, 0]
            for column in range(start, stop):
                state = digest(tokens[rows[:, column]][None].T, state)
                digests[rows[:, column]] = state
            group.write(part, 0, 0, mx.array(state[:, None]))


def digest(tokens, state=0):
    """A digest of tokens [n], or of one more token of each of several sequences [m, 1]."""
    for token in np.asarray(tokens).T:
        state = (state * 31 + token + 1) % 1_000_003
    return state


class Adversary:
    """Proposes right tokens and wrong ones, in all lengths, as a seed has it."""

    name = "adversary"

    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)

    def propose(self, wanted):
        drafts = []
        for want in wanted:
            right = solo(want.state.token_ids, want.limit)
            wrong = self.rng.random(want.limit) < 0.3
            tokens = np.where(wrong, self.rng.integers(0, VOCAB, want.limit), right)
            drafts.append(tuple(tokens[: self.rng.integers(0, want.limit + 1)].tolist()))
        return drafts


def make_cache(num_blocks, block_size, prefixes="none"):
    """A pool with a prefix cache."""
    pool = BlockPool(num_blocks, block_size)
    prefix_structure = prefix_cache.create(prefixes, pool)
    return PagedKVCacheManager(pool, prefix_structure, block_bytes=100)


def make_engine(
    num_blocks=9,
    block_size=4,
    *,
    prefixes="none",
    pipeline="sync",
    shape="exact",
    proposer=None,
    num_drafts=3,
    cut="window",
    model=None,
    cache=None,
    snapshots=None,
    **options,
):
    """An engine on a stub; ``proposer`` is None, "ngram" or a Proposer.

    With ``snapshots`` it has states, and as many snapshots of them if prefixes are cached.
    """
    scheduling = config.Scheduler(**options)
    cache = cache or make_cache(num_blocks, block_size, prefixes)
    counters = Counters()
    if snapshots is not None:
        snapshots *= prefixes != "none"
        slots = StateSlotManager(scheduling.max_num_seqs + snapshots, 8)
        model = StatefulStub(num_blocks, block_size, slots)
        cache = HybridKVCacheManager(cache, slots, model.states, snapshots)
    model = model or StubModel(num_blocks, block_size)
    speculation = Speculator()
    if proposer is not None:
        proposer = NgramProposer(1, 3) if proposer == "ngram" else proposer
        budget = scheduling.max_num_batched_tokens
        eos = frozenset({EOS})
        speculation = DraftVerifier(proposer, num_drafts, budget, cache, counters, eos)
    rows = scheduling.max_num_seqs * (1 + num_drafts * (proposer is not None))
    scheduler = Scheduler(scheduling, cache, frozenset({EOS}))
    how = config.Pipeline(pipeline)
    engine = LLMEngine(
        scheduler=scheduler,
        cache=cache,
        loop=StepLoop(
            how,
            scheduler,
            InputBuilder(cache, CUTS[cut]),
            DecodePadding(config.DecodeShape(shape), rows, counters),
            create_launcher(how, model, counters),
            speculation,
            counters,
            NoScheduleCheck(),
        ),
        counters=counters,
        vocab_size=VOCAB,
        max_context=None,
        notes={},
        load_counters={},
        name="paged",
    )
    return engine, model


def request(request_id, prompt, max_tokens, ignore_eos=True, priority=0, **params):
    """A request by what matters most."""
    return Request(
        request_id,
        tuple(prompt),
        SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos, **params),
        priority=priority,
    )


def run(engine, requests):
    """Submit all, step to the end; tokens and last events by request id."""
    for new_request in requests:
        engine.submit(new_request)
    tokens, last = {}, {}
    while engine.has_work():
        for event in engine.step():
            assert event.request_id not in last
            if event.token != NO_TOKEN:
                tokens.setdefault(event.request_id, []).append(event.token)
            if event.finish_reason:
                last[event.request_id] = event
        engine.check()
    return tokens, last
