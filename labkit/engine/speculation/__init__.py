"""Speculative decoding: who drafts, one file per answer, and how drafts are judged."""

from __future__ import annotations

from labkit import config
from labkit.engine.engine_protocol import Counters
from labkit.engine.input_builder import SegmentLayout, staircase, window
from labkit.engine.kv_layout.kv_cache_manager import KVCacheManager
from labkit.engine.model_runner import RunModel
from labkit.engine.speculation.draft_model import DraftModel
from labkit.engine.speculation.draft_verification import DraftVerifier, Proposer, Speculation
from labkit.engine.speculation.ngram import Ngram
from labkit.engine.speculation.random_draft import RandomDraft


def create(
    options: config.Engine,
    cache: KVCacheManager,
    run_draft: RunModel | None,
    counters: Counters,
    vocab_size: int,
) -> Speculation:
    """Return the speculation of ``engine.speculation``; ``run_draft`` is the draft's forward."""
    drafts = options.drafts
    budget = options.scheduler.max_num_batched_tokens
    proposer: Proposer
    if options.speculation is config.Speculation.none:
        return Speculation()
    if options.speculation is config.Speculation.random:
        proposer = RandomDraft(vocab_size)
    elif run_draft is not None:
        proposer = DraftModel(run_draft, cache, budget)
    else:
        proposer = Ngram(drafts.ngram_min, drafts.ngram_max)
    return DraftVerifier(
        proposer, drafts.num_draft_tokens, budget, cache, options.kv.block_size, counters
    )


def segment_layout(options: config.Engine) -> SegmentLayout:
    """Return how drafts are laid out in the batch."""
    return staircase if options.drafts.verification is config.Verification.staircase else window


def max_decode_rows(options: config.Engine) -> int:
    """Return the most rows that a step of decodes alone can have."""
    drafting = options.speculation is not config.Speculation.none
    each = 1 + options.drafts.num_draft_tokens * drafting
    return min(options.scheduler.max_num_seqs * each, options.scheduler.max_num_batched_tokens)
