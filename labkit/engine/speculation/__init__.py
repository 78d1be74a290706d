"""Speculative decoding: one module per proposer of draft tokens, and the verification."""

from __future__ import annotations

from labkit import config
from labkit.engine.engine_protocol import Counters
from labkit.engine.kv_cache_interface import KVCacheManager
from labkit.engine.runner.input_builder import SegmentLayout, staircase, window
from labkit.engine.runner.model_runner import RunModel
from labkit.engine.speculation.draft_model import DraftModelProposer
from labkit.engine.speculation.ngram import NgramProposer
from labkit.engine.speculation.propose_and_verify import (
    DraftVerifier,
    Proposer,
    RandomProposer,
    Speculator,
)


def create(
    options: config.Engine,
    cache: KVCacheManager,
    run_draft: RunModel | None,
    counters: Counters,
    vocab_size: int,
    eos_token_ids: frozenset[int],
) -> Speculator:
    """Create the speculator of ``engine.speculation``. ``run_draft`` runs the draft model."""
    drafts = options.drafts
    budget = options.scheduler.max_num_batched_tokens
    proposer: Proposer
    if options.speculation is config.Speculation.none:
        return Speculator()
    if options.speculation is config.Speculation.random:
        proposer = RandomProposer(vocab_size)
    elif run_draft is not None:
        proposer = DraftModelProposer(run_draft, cache, budget)
    else:
        proposer = NgramProposer(drafts.ngram_min, drafts.ngram_max)
    return DraftVerifier(proposer, drafts.num_draft_tokens, budget, cache, counters, eos_token_ids)


def segment_layout(options: config.Engine) -> SegmentLayout:
    """Return the function that makes segments of drafts, set by ``engine.drafts.verification``."""
    return staircase if options.drafts.verification is config.Verification.staircase else window
